"""Collectives of a device: a rank that fails ends the blocked reads of others, and another order is an error by name."""

from __future__ import annotations

from contextlib import suppress

import torch
import torch.distributed as dist

from shoal.errors import PeerFailed, RanksDisagree
from shoal.testing import ranks_on, run_ranks
from shoal.transport.collectives import Communicator, Label
from shoal.transport.failure_board import FailureBoard
from tests.late.ranks import prepare


def _communicator() -> Communicator:
    assert dist.group.WORLD is not None
    return Communicator(dist.group.WORLD, timeout=60)


def _blocked_read() -> str:
    board, communicator = FailureBoard("test"), _communicator()
    store = dist.distributed_c10d._get_default_store()  # pyright: ignore[reportPrivateUsage]  no public name
    if communicator.rank == 1:
        board.publish("rank 1: out of memory")
        store.wait(["rank 0 has heard"])
        return ""
    full = torch.ones(8, device="late")
    communicator.all_gather(full, Label(kind="gather", unit="block", index=0)).wait()
    with suppress(RuntimeError):  # some backends end it by an error, others with undefined values
        full.sum().item()
    try:
        communicator.gather_words(torch.zeros(1, dtype=torch.int64))
    except PeerFailed as error:
        return str(error)
    finally:
        store.set("rank 0 has heard", "")
    return "nothing"


def test_a_failed_rank_ends_a_read_that_waits_for_its_collective() -> None:
    with ranks_on(prepare):
        assert run_ranks(2, _blocked_read)[0] == "rank 1: out of memory"


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
