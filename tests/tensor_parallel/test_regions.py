"""Region operators give the values and gradients of plain torch, with the bytes of their table."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from shoal.errors import UsageError
from shoal.tensor_parallel import Axis, enter, gather, leave, share, split
from shoal.testing import run_ranks
from shoal.transport.collectives import traffic

SHAPE = (4, 12, 8)
SIZE = 4 * 4 * 12 * 8


def world() -> Axis:
    assert dist.group.WORLD is not None
    return Axis(dist.group.WORLD)


def random(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def part(tensor: Tensor, dim: int, axis: Axis, rank: int | None = None) -> Tensor:
    return tensor.chunk(axis.ranks, dim)[axis.rank if rank is None else rank].contiguous()


def backward(function: Callable[[Tensor], Tensor], value: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return the value of a function and the gradient of sum(function * weight)."""
    value = value.clone().requires_grad_()
    result = function(value)
    (result * weight).sum().backward()
    assert value.grad is not None
    return result.detach(), value.grad


def crossings(dim: int | None) -> list[str]:
    """Return the operators whose result differs from their definition."""
    axis, wrong = world(), list[str]()
    whole, weights = random(0, *SHAPE), [random(rank + 1, *SHAPE) for rank in range(axis.ranks)]
    mine = whole if dim is None else part(whole, dim, axis)
    value, gradient = backward(lambda x: enter(x, axis, dim), mine, weights[axis.rank])
    wanted = sum(weights[1:], weights[0])
    if not torch.equal(value, whole) or not torch.allclose(gradient, wanted if dim is None else part(wanted, dim, axis)):
        wrong.append("enter")
    weight = whole if dim is None else part(whole, dim, axis)
    value, gradient = backward(lambda x: leave(x, axis, dim), weights[axis.rank], weight)
    if not torch.allclose(value, wanted if dim is None else part(wanted, dim, axis)) or not torch.equal(gradient, whole):
        wrong.append("leave")
    return wrong


@pytest.mark.parametrize("dim", [None, 0, 1, 2, -1, -2])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_enter_and_leave_match_plain_torch(ranks: int, dim: int | None) -> None:
    assert run_ranks(ranks, crossings, dim) == [[]] * ranks


def splits(dim: int) -> list[str]:
    axis, wrong = world(), list[str]()
    whole, weight = random(0, *SHAPE), random(1, *SHAPE)
    value, gradient = backward(lambda x: split(x, axis, dim), whole, part(weight, dim, axis))
    if not torch.equal(value, part(whole, dim, axis)) or not torch.equal(gradient, weight):
        wrong.append("split")
    value, gradient = backward(lambda x: gather(x, axis, dim), part(whole, dim, axis), weight)
    if not torch.equal(value, whole) or not torch.equal(gradient, part(weight, dim, axis)):
        wrong.append("gather")
    return wrong


@pytest.mark.parametrize("dim", [0, 1, 2, -1])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_split_and_gather_match_plain_torch(ranks: int, dim: int) -> None:
    assert run_ranks(ranks, splits, dim) == [[]] * ranks


def uneven(size: int) -> bool:
    axis = world()
    whole, weight = random(0, 3, size), random(1, 3, size)
    length = -(-size // axis.ranks)
    start, stop = min(axis.rank * length, size), min((axis.rank + 1) * length, size)
    value, gradient = backward(lambda x: gather(x, axis, -1, size), whole[:, start:stop], weight)
    return torch.equal(value, whole) and torch.equal(gradient, weight[:, start:stop])


@pytest.mark.parametrize("size", [2, 5, 9, 12])
def test_parts_of_unequal_size_are_gathered_without_padding(size: int) -> None:
    assert run_ranks(4, uneven, size) == [True] * 4


def shared() -> tuple[list[Tensor], int]:
    axis = world()
    weight, bias = torch.ones(6, requires_grad=True), torch.zeros(3, requires_grad=True)
    a, b = share(axis, weight, bias)
    before = traffic.calls.total()
    ((axis.rank + 1) * (2 * a.sum() + b.sum())).backward()
    assert weight.grad is not None and bias.grad is not None
    return [weight.grad, bias.grad], traffic.calls.total() - before


def test_share_sums_all_gradients_in_one_message() -> None:
    for (weight, bias), calls in run_ranks(2, shared):
        assert torch.equal(weight, torch.full((6,), 6.0)) and torch.equal(bias, torch.full((3,), 3.0))
        assert calls == 1


def prices() -> list[tuple[int, int]]:
    """Bytes sent forward and backward: enter, leave, both with a dim, split, gather, share."""
    axis, found = world(), list[tuple[int, int]]()
    whole, thin = torch.zeros(SHAPE), torch.zeros(SHAPE).chunk(axis.ranks, 1)[0].contiguous()
    ways: list[tuple[Callable[[Tensor], Tensor], Tensor]] = [
        (lambda x: enter(x, axis), whole), (lambda x: leave(x, axis), whole), (lambda x: enter(x, axis, 1), thin),
        (lambda x: leave(x, axis, 1), whole), (lambda x: split(x, axis, 1), whole), (lambda x: gather(x, axis, 1), thin),
        (lambda x: share(axis, x)[0], whole)]
    for way, value in ways:
        start = traffic.bytes_sent
        result = way(value.clone().requires_grad_())
        middle = traffic.bytes_sent
        result.sum().backward()
        found.append((middle - start, traffic.bytes_sent - middle))
    return found


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_bytes_are_those_of_the_table(ranks: int) -> None:
    part = SIZE * (ranks - 1) // ranks
    table = [(0, 2 * part), (2 * part, 0), (part, part), (part, part), (0, part), (part, 0), (0, 2 * part)]
    assert run_ranks(ranks, prices) == [table] * ranks


def refused(dim: int) -> str:
    with pytest.raises(UsageError) as caught:
        split(torch.zeros(2, 10), world(), dim)
    return str(caught.value)


def test_a_dim_that_does_not_divide_is_refused_with_the_numbers() -> None:
    assert run_ranks(4, refused, 1)[0] == (
        "dim 1 of (2, 10), which is to be split, cannot be divided over 4 tensor ranks; make it a multiple of 4 (8 or 12), "
        "or use a number of ranks that divides 10: 1, 2, 5, 10")
