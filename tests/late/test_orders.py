"""Collectives that ranks give a device in different orders are an error by name: the device would mix them up unnoticed."""

from __future__ import annotations

import torch
import torch.distributed as dist

from shoal.errors import RanksDisagree
from shoal.testing import ranks_on, run_ranks
from shoal.transport.collectives import Communicator, Label
from tests.late.ranks import prepare


def _communicator() -> Communicator:
    assert dist.group.WORLD is not None
    return Communicator(dist.group.WORLD, timeout=60)


def _order(*, same: bool) -> str:
    communicator = _communicator()
    communicator.note_step(3)
    units = ["attention", "mlp"] if same or communicator.rank == 0 else ["mlp", "attention"]
    for unit in units:
        full = torch.ones(8, device="late")
        communicator.all_gather(full, Label(kind="gather", unit=unit, index=0)).wait()
    try:
        return str(communicator.gather_step_words(torch.tensor([communicator.rank])).tolist())
    except RanksDisagree as error:
        return str(error)


def test_another_order_of_collectives_names_rank_unit_and_collective() -> None:
    with ranks_on(prepare):
        assert run_ranks(2, _order, same=True) == ["[[0], [1]]"] * 2
        for said in run_ranks(2, _order, same=False):
            assert said.startswith("step 3: ranks issue collectives in different orders")
            assert ("collective 1 since the last step is gather of unit 'attention' (8 x torch.float32) on rank 0 and "
                    "gather of unit 'mlp' (8 x torch.float32) on rank 1") in said
