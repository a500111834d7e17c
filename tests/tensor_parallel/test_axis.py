"""Collectives of a tensor axis: values, bits, bytes, and error messages."""

from __future__ import annotations

import fcntl
import os
import sys
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from shoal.errors import CollectiveFailed, CollectiveTimeout
from shoal.tensor_parallel import Axis, axis, shared_memory
from shoal.tensor_parallel.shared_memory import SLOT_BYTES, SLOTS
from shoal.testing import run_ranks
from shoal.transport.collectives import traffic

SIZES = (1, 5, 24, 1000)
LARGE = SLOT_BYTES // 4 + 3  # goes by gloo
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def world() -> dist.ProcessGroup:
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def addends(size: int, dtype: torch.dtype) -> list[Tensor]:
    return [torch.randn(size, generator=torch.Generator().manual_seed(rank)).to(dtype)
            for rank in range(dist.get_world_size())]


def total(tensors: list[Tensor]) -> Tensor:
    """The sum in rank order, in fp32 or wider."""
    wide = torch.promote_types(tensors[0].dtype, torch.float32)
    result = tensors[0].to(wide)
    for tensor in tensors[1:]:
        result = result + tensor
    return result.to(tensors[0].dtype)


def disable_shared_memory() -> None:
    axis._rings[world()] = None


def summed(shared: bool) -> list[tuple[int, str]]:
    """Return the sizes and dtypes whose sums are not the ones in rank order."""
    if not shared:
        disable_shared_memory()
    here, wrong = Axis(world()), list[tuple[int, str]]()
    for size in (*SIZES, LARGE):
        for dtype in DTYPES:
            parts = addends(size, dtype)
            mine = parts[here.rank].clone()
            kept = here.all_reduce(mine, keep=True).wait()
            alike = torch.equal(mine, parts[here.rank]) and torch.equal(kept, total(parts))
            if not alike or here.all_reduce(mine).wait() is not mine or not torch.equal(mine, kept):
                wrong.append((size, str(dtype)))
    return wrong


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_a_sum_is_that_in_rank_order_on_every_rank(ranks: int, shared: bool) -> None:
    assert run_ranks(ranks, summed, shared) == [[]] * ranks


def parts(shared: bool) -> list[str]:
    if not shared:
        disable_shared_memory()
    here, wrong = Axis(world()), list[str]()
    for size in (3, 700, LARGE):
        for dtype in DTYPES:
            everyone = [tensor.view(here.ranks, size) for tensor in addends(here.ranks * size, dtype)]
            mine = here.reduce_scatter(everyone[here.rank].clone()).wait()
            if not torch.equal(mine, total(everyone)[here.rank]):
                wrong.append(f"reduce-scatter {size} {dtype}")
            whole = here.all_gather(everyone[here.rank][0].clone()).wait()
            if not torch.equal(whole, torch.stack([tensor[0] for tensor in everyone])):
                wrong.append(f"all-gather {size} {dtype}")
    return wrong


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_parts_are_summed_and_gathered(ranks: int, shared: bool) -> None:
    assert run_ranks(ranks, parts, shared) == [[]] * ranks


def bytes_of(size: int) -> dict[str, int]:
    here = Axis(world())
    here.all_reduce(torch.zeros(size)).wait()
    here.all_gather(torch.zeros(size)).wait()
    here.reduce_scatter(torch.zeros(here.ranks, size)).wait()
    return {**traffic.bytes, "lent": traffic.peer_memory_bytes}


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("size", [4000, 4 * LARGE])
def test_bytes_sent_are_the_formulas(size: int, ranks: int) -> None:
    part = 4 * size
    for sent in run_ranks(ranks, bytes_of, size):
        lent = sent.pop("lent")
        if ranks == 1:
            assert sent == {}
            continue
        assert sent == {"tensor all-reduce": 2 * part * (ranks - 1) // ranks, "tensor all-gather": part * (ranks - 1),
                        "tensor reduce-scatter": part * (ranks - 1)}
        assert lent == (sum(sent.values()) if size == 4000 else 0)


def several() -> bool:
    here = Axis(world())
    good = True
    for turn in range(20 * SLOTS):
        pending = [here.all_gather(torch.full((8,), 10.0 * turn + here.rank)) for _ in range(SLOTS - 1)]
        for one in reversed(pending):
            good &= torch.equal(one.wait()[:, 0], 10.0 * turn + torch.arange(here.ranks))
    return good


def test_concurrent_collectives_are_not_confused() -> None:
    assert run_ranks(3, several) == [True] * 3


def left_alone(seconds: float) -> str:
    group = dist.new_group(timeout=timedelta(seconds=60))
    assert group is not None
    here = Axis(group)
    here.all_reduce(torch.zeros(3)).wait()
    if (ring := axis._rings[group]) is not None:  # only the wait that is to time out may run into it
        ring._timeout = seconds
    if here.rank == 1:
        dist.barrier(world())
        return ""
    try:
        here.all_reduce(torch.zeros(2, 3)).wait()
    except CollectiveTimeout as error:
        return str(error)
    finally:
        dist.barrier(world())
    return "nothing"


def test_a_missing_rank_ends_the_wait_at_the_timeout() -> None:
    assert run_ranks(2, left_alone, 3.0)[0].startswith(
        "rank 0 of 2 of a tensor axis: all-reduce of (2, 3) float32 did not finish in time. Another rank took a different "
        "path through the model, was given a batch of another shape, or stopped.")


def abandoned() -> str:
    here = Axis(world())
    here.all_reduce(torch.zeros(3)).wait()
    if here.rank == 1:  # as the system does for a process that ends
        ring = axis._rings[world()]
        assert ring is not None
        fcntl.lockf(ring._file, fcntl.LOCK_UN, 1, 1)
        dist.barrier(world())
        return ""
    try:
        here.all_reduce(torch.zeros(2, 3)).wait()
    except CollectiveFailed as error:
        return f"{type(error).__name__}: {error}"
    finally:
        dist.barrier(world())
    return "nothing"


def test_a_dead_rank_is_told_from_a_slow_one() -> None:
    said = run_ranks(2, abandoned)[0]
    assert said.startswith("CollectiveFailed: rank 0 of 2 of a tensor axis: all-reduce of (2, 3) float32 broke: another "
                           "rank died") and said.endswith("(rank 1 of the group is gone)")


def unequal() -> list[str]:
    here, said = Axis(world()), list[str]()
    rows = 2 + here.rank  # what happens when tensor ranks are given different batches
    for start in (lambda: here.all_reduce(torch.zeros(rows, 4)), lambda: here.all_gather(torch.zeros(rows, 4)),
                  lambda: here.reduce_scatter(torch.zeros(2, rows, 4))):
        with pytest.raises(CollectiveFailed) as caught:
            start().wait()
        said.append(str(caught.value))
    return said


def test_tensors_of_unequal_size_are_refused_and_never_mixed() -> None:
    for said in run_ranks(2, unequal):
        assert all("was given a batch of another shape" in one and "were expected)" in one for one in said), said


def shared_file(folder: Path) -> tuple[list[str], bool]:
    """Return the files that a reduction left in the folder of shared memory, and whether it mapped one from there."""
    shared_memory._FOLDER = folder  # other processes have files of theirs in /dev/shm
    Axis(world()).all_reduce(torch.zeros(3)).wait()
    return os.listdir(folder), f"{folder}/shoal-" in Path("/proc/self/maps").read_text()


@pytest.mark.skipif(sys.platform != "linux", reason="ranks share memory under Linux only")
def test_shared_memory_leaves_no_file(tmp_path: Path) -> None:
    assert run_ranks(2, shared_file, tmp_path) == [([], True), ([], True)]
