"""`shoal.comm` is torch.distributed under the names that scripts use, counted like the library's own collectives."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import shoal as deepspeed
from shoal import comm
from shoal.testing import run_ranks
from shoal.transport.collectives import traffic

SIZE = 6


def results() -> tuple[dict[str, bool], dict[str, int], dict[str, int], set[str]]:
    """Return whether each function gives the expected result, the bytes that this rank sent, and the record."""
    comm.configure(enabled=True)
    rank, ranks = comm.get_rank(), comm.get_world_size()
    mine = torch.full((SIZE,), float(rank + 1))
    total = float(sum(range(1, ranks + 1)))
    everyone = torch.arange(1.0, ranks + 1).repeat_interleave(SIZE)
    right: dict[str, bool] = {}

    def holds(name: str, tensor: Tensor, expected: Tensor) -> None:
        right[name] = torch.equal(tensor, expected)

    comm.all_reduce(summed := mine.clone(), op=comm.ReduceOp.SUM)
    holds("all_reduce", summed, torch.full((SIZE,), total))
    comm.broadcast(sent := mine.clone(), 1)
    holds("broadcast", sent, torch.full((SIZE,), 2.0))
    comm.reduce(at := mine.clone(), dst=0)
    holds("reduce", at[:0] if rank else at, torch.full((0 if rank else SIZE,), total))
    comm.all_gather(parts := [torch.empty(SIZE) for _ in range(ranks)], mine)
    holds("all_gather", torch.cat(parts), everyone)
    comm.all_gather_into_tensor(whole := torch.empty(ranks * SIZE), mine)
    holds("all_gather_into_tensor", whole, everyone)
    comm.reduce_scatter_tensor(part := torch.empty(SIZE), everyone.clone())
    holds("reduce_scatter_tensor", part, mine * ranks)
    comm.all_to_all_single(swapped := torch.empty(ranks * SIZE), mine.repeat(ranks))
    holds("all_to_all_single", swapped, everyone)
    work = comm.all_reduce(later := mine.clone(), async_op=True, log_name="later")
    work.wait()
    holds("later", later, torch.full((SIZE,), total))
    comm.barrier()
    assert traffic.recorder is not None
    timed = {row.key.kind for row in traffic.recorder.rows if row.timed}
    recorded = {kind: sum(row.sent for row in traffic.recorder.rows if row.key.kind == kind) for kind in traffic.bytes}
    return right, dict(traffic.bytes), recorded, timed


def test_collectives_equal_torchs_and_are_counted_by_their_minimum_bytes() -> None:
    whole = 3 * SIZE * 4
    for rank, (right, sent, recorded, timed) in enumerate(run_ranks(3, results)):
        assert [name for name, holds in right.items() if not holds] == []
        by_name = {name.removesuffix("_single").removesuffix("_into_tensor").removesuffix("_tensor"): size
                   for name, size in sent.items()}
        assert by_name == {
            "all_reduce": 4 * SIZE * 4 // 3, "broadcast": SIZE * 4 * (rank == 1), "reduce": SIZE * 4 * (rank != 0),
            "all_gather": whole * 2 // 3, "reduce_scatter": whole * 2 // 3, "all_to_all": whole * 2 // 3,
            "later": 4 * SIZE * 4 // 3, "barrier": 0}
        assert recorded == sent
        assert timed == set(sent) - {"later"}  # its wait is torch's own


def of_a_group() -> list[Any]:
    group = comm.new_group([0, 2])
    mine = torch.full((1,), float(comm.get_rank()))
    before = traffic.calls.total()
    if comm.get_rank() != 1:
        comm.all_reduce(mine, group=group)
    inside = comm.get_rank() != 1
    return [mine.item(), traffic.calls.total() - before, comm.get_all_ranks_from_group(group) if inside else [0, 2]]


def test_a_group_is_counted_by_its_members_alone() -> None:
    assert run_ranks(3, of_a_group) == [[2, 1, [0, 2]], [1, 0, [0, 2]], [2, 1, [0, 2]]]


def test_comm_is_importable_as_a_module_and_as_a_name() -> None:
    assert deepspeed.comm is importlib.import_module("shoal.comm")
    assert comm.init_distributed is deepspeed.init_distributed
    missing = [name for name in comm.__all__ if name not in vars(comm)]
    assert missing == [] and comm.__all__ == sorted(comm.__all__)
    assert comm.get_world_group() is dist.group.WORLD


@pytest.mark.parametrize("given", [{}, {"comms_logger": {"enabled": False}}])
def test_a_configuration_without_the_record_switches_it_off(given: dict[str, Any]) -> None:
    comm.configure(enabled=True)
    assert traffic.recorder is not None
    comm.configure(given)
    assert traffic.recorder is None
    comm.configure({"comms_logger": {}}, verbose=False)
    assert traffic.recorder is not None
    comm.configure(enabled=False)
