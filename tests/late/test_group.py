"""Collectives of the late device order streams, not the host, and give what gloo gives."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from shoal.testing import ranks_on, run_ranks
from tests.late.device import queued, seed
from tests.late.programs import PROGRAMS, numbers
from tests.late.ranks import prepare, prepare_staged

DEVICE = "late"


def _sums(rank: int, dtype: torch.dtype) -> list[list[float]]:
    """Return the results of each collective, in an order that both ranks share."""
    seed(rank + 1)
    own = torch.arange(4, device=DEVICE).to(dtype) + rank * 10
    results: list[Tensor] = []
    total = own.clone()
    dist.all_reduce(total)
    results.append(total)
    mean = own.clone()
    dist.all_reduce(mean, op=dist.ReduceOp.AVG)
    results.append(mean)
    gathered = torch.empty(8, dtype=dtype, device=DEVICE)
    dist.all_gather_into_tensor(gathered, own)
    results.append(gathered)
    part = torch.empty(2, dtype=dtype, device=DEVICE)
    dist.reduce_scatter_tensor(part, own)
    results.append(part)
    rows = [torch.empty(2, dtype=dtype, device=DEVICE) for _ in range(2)]
    dist.all_to_all(rows, list(own.split(2)))
    results += rows
    listed = [torch.empty(4, dtype=dtype, device=DEVICE) for _ in range(2)]
    dist.all_gather(listed, own)
    results += listed
    first = own.clone()
    dist.broadcast(first, 0)
    results.append(first)
    got = torch.empty_like(own)
    works = [dist.irecv(got, 1 - rank), dist.isend(own, 1 - rank)]
    for work in works:
        assert work is not None
        work.wait()
    results.append(got)
    dist.barrier()
    return [result.float().tolist() for result in results]


def _every_collective() -> list[list[list[float]]]:
    rank = dist.get_rank()
    return [_sums(rank, torch.float32), _sums(rank, torch.bfloat16)]


@pytest.mark.parametrize("group", [prepare, prepare_staged])
def test_collectives_give_the_numbers_of_the_cpu(group: Callable[[], str]) -> None:
    with ranks_on(group):
        zero, one = run_ranks(2, _every_collective)
    shared = [[10, 12, 14, 16], [5, 6, 7, 8], [0, 1, 2, 3, 10, 11, 12, 13]]
    listed = [[0, 1, 2, 3], [10, 11, 12, 13], [0, 1, 2, 3]]
    assert zero == [[*shared, [10, 12], [0, 1], [10, 11], *listed, [10, 11, 12, 13]]] * 2
    assert one == [[*shared, [14, 16], [2, 3], [12, 13], *listed, [0, 1, 2, 3]]] * 2


def _waits() -> tuple[int, float, float]:
    x = torch.ones(4, device=DEVICE)
    with_work = dist.all_reduce(x, async_op=True)
    early = x.clone()
    assert with_work is not None
    with_work.wait()
    waiting = queued()
    late = x.clone()
    read = early.sum().item(), late.sum().item()
    return waiting, *read


def test_a_wait_orders_streams_and_runs_nothing() -> None:
    with ranks_on(prepare):
        for waiting, early, late in run_ranks(2, _waits):
            assert waiting > 0
            assert (early, late) == (4, 8)


def _one_rank_waits_elsewhere() -> float:
    other = dist.new_group(backend="gloo")
    x = torch.ones(4, device=DEVICE)
    dist.all_reduce(x)
    total = x.sum()
    if dist.get_rank() == 0:
        total.item()  # forces the collective, which rank 1 has only queued
    dist.barrier(other)  # rank 1 blocks its host here before it reads anything
    return total.item()


def test_a_blocked_host_does_not_hold_up_a_collective() -> None:
    with ranks_on(prepare):
        assert run_ranks(2, _one_rank_waits_elsewhere) == [8, 8]


@pytest.mark.parametrize("name", ["sharded", "replicated", "offloaded", "compressed", "pipeline", "tensor parallel"])
def test_ranks_that_share_a_device_train_through_the_host(name: str) -> None:
    with ranks_on(prepare):
        expected = run_ranks(PROGRAMS[name].ranks, numbers, name)
    with ranks_on(prepare_staged):
        found = run_ranks(PROGRAMS[name].ranks, numbers, name)
    for one, other in zip(expected, found, strict=True):
        torch.testing.assert_close(one, other)
