"""Whole tensors drop the same elements on all ranks, parts drop others, and whatever is replayed drops the same again."""

from __future__ import annotations

import random

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from shoal.tensor_parallel import Apart, PartDropout, align
from shoal.testing import run_ranks


def world() -> dist.ProcessGroup:
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def masks() -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(4)
    ones, drop = torch.ones(200), PartDropout(0.5, group=world())
    return functional.dropout(ones), drop(ones), functional.dropout(ones)


def test_dropout_of_parts_differs_and_that_of_whole_tensors_does_not() -> None:
    before, apart, after = zip(*run_ranks(4, masks), strict=True)
    for same in (before, after):
        assert all(torch.equal(mask, same[0]) for mask in same)
    assert not torch.equal(before[0], after[0])
    for i in range(4):
        assert 60 < int((apart[i] > 0).sum()) < 140
        for j in range(i):
            agree = int(((apart[i] > 0) == (apart[j] > 0)).sum())
            assert 60 < agree < 140, "the masks of two ranks are not independent"


def test_the_stream_follows_the_default_generator() -> None:
    stream = Apart(1)
    torch.manual_seed(4)
    with stream.fork():
        first = torch.rand(5)
    with stream.fork():
        second = torch.rand(5)
    torch.manual_seed(4)
    with Apart(1).fork():
        assert torch.equal(torch.rand(5), first)
    assert not torch.equal(first, second)


def test_an_error_gives_the_default_generator_back() -> None:
    torch.manual_seed(4)
    torch.randint(1 << 31, ())
    wanted = torch.rand(3)
    torch.manual_seed(4)
    with pytest.raises(ValueError, match="planted"), Apart(0).fork():
        torch.rand(100)
        raise ValueError("planted")
    assert torch.equal(torch.rand(3), wanted)


def test_seeds_and_ranks_tell_streams_apart() -> None:
    def first(rank: int, seed: int) -> float:
        torch.manual_seed(4)
        with Apart(rank, seed).fork():
            return float(torch.rand(()))

    assert len({first(rank, seed) for rank in range(8) for seed in range(8)}) == 64


def test_its_state_is_its_seed() -> None:
    stream, other = Apart(1, 17), Apart(1)
    other.load_state_dict(stream.state_dict())
    assert (other.rank, other.seed) == (1, 17)


def recomputed() -> bool:
    torch.manual_seed(4)
    drop = PartDropout(0.5, group=world())

    def function(x: Tensor) -> Tensor:
        return drop(x * x)

    x = torch.rand(100, requires_grad=True)
    y = checkpoint(function, x, use_reentrant=False)
    assert isinstance(y, Tensor)
    y.sum().backward()
    assert x.grad is not None
    return torch.equal(x.grad != 0, y != 0)


def test_recompute_drops_the_same_elements() -> None:
    assert run_ranks(2, recomputed) == [True] * 2


def aligned() -> tuple[float, float]:
    torch.manual_seed(dist.get_rank())
    random.seed(dist.get_rank())
    align(world())
    return float(torch.rand(())), random.random()


def test_ranks_are_aligned_with_the_first() -> None:
    (first, _), (second, _) = run_ranks(2, aligned)
    torch.manual_seed(0)
    assert first == second == float(torch.rand(()))


def test_evaluation_draws_nothing() -> None:
    assert run_ranks(1, evaluated) == [True]


def evaluated() -> bool:
    drop = PartDropout(0.5, group=world()).eval()
    state = torch.get_rng_state()
    x = torch.ones(3)
    return drop(x) is x and torch.equal(torch.get_rng_state(), state)
