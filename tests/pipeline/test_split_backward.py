"""Backward in two halves is backward: whatever is paid together, weights receive the gradients that they do without."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from shoal.pipeline.split_backward import WeightGradQueue, deferring, rounds


class Net(nn.Module):
    """A product with a bias and one without, one of a turned weight, and a weight that is used twice."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width, bias=False)
        self.turned = nn.Parameter(torch.randn(width, width) / width)
        self.shift = nn.Parameter(torch.randn(width))

    def forward(self, value: Tensor) -> Tensor:
        value = self.down(self.up(value).relu())
        flat = torch.addmm(self.shift, value.reshape(-1, value.shape[-1]), self.turned).view_as(value)
        return self.down(self.up(flat).relu())


class Products(TorchDispatchMode):
    """Counts matrix products."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten.mm.default
        return func(*args, **kwargs or {})


def paid(net: Net, batches: list[Tensor], groups: list[int]) -> int:
    """Go forward and half back with each of `batches`, then pay so many at a time; return the products that this took."""
    owing: list[WeightGradQueue] = []
    for batch in batches:
        deferred = WeightGradQueue()
        with deferring(deferred):
            output = net(batch)
        deferred.backward([output], [torch.ones_like(output)])
        owing.append(deferred)
    start = 0
    with Products() as products:
        for together in groups:
            for run in rounds(owing[start:start + together]):
                run()
            start += together
    assert not any(map(len, owing))
    return products.count


@pytest.mark.parametrize("rows", [1, 3, 200], ids="{} rows".format)
@pytest.mark.parametrize("groups", [[1] * 4, [4], [1, 3]], ids=str)
def test_what_is_paid_together_is_the_sum(rows: int, groups: list[int]) -> None:
    torch.manual_seed(0)
    net, batches = Net(16).double(), [torch.randn(2, rows, 16).double() for _ in range(4)]
    sum(net(batch).sum() for batch in batches).backward()
    expected = {name: parameter.grad for name, parameter in net.named_parameters()}
    net.zero_grad()
    paid(net, batches, groups)
    for name, parameter in net.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-12, atol=1e-12)


def test_few_rows_are_joined() -> None:
    assert paid(Net(16), [torch.randn(1, 16) for _ in range(4)], [4]) == 3  # of up, down and turned


def test_many_rows_are_not_copied_to_be_together() -> None:
    assert paid(Net(16), [torch.randn(400, 16) for _ in range(4)], [4]) == 5 * 4  # up and down are used twice


def test_what_is_not_joined_comes_apart_so_that_sums_are_taken_where_gradients_rest() -> None:
    weight, batches = nn.Parameter(torch.ones(16, 16)), [torch.randn(400, 16) for _ in range(3)]
    owing = [WeightGradQueue() for _ in batches]
    for deferred, batch in zip(owing, batches, strict=True):
        with deferring(deferred):
            output = nn.functional.linear(batch, weight)
        deferred.backward([output], [torch.ones_like(output)])
    assert len(rounds(owing)) == 3
    assert len(rounds([WeightGradQueue()])) == 1, "a pass that pays nothing still is one: other ranks have it too"


def owes(product: Callable[[Tensor, nn.Parameter], Tensor], weight: nn.Parameter, leaving: Tensor | None = None) -> int:
    def leaves(tensor: Tensor) -> bool:
        return leaving is not None and tensor.untyped_storage().data_ptr() == leaving.untyped_storage().data_ptr()

    deferred = WeightGradQueue(leaves)
    with deferring(deferred):
        output = product(torch.randn(8, 8), weight)
    deferred.backward([output], [torch.ones_like(output)])
    assert weight.grad is not None or len(deferred)
    return len(deferred)


def test_what_cannot_be_paid_later_is_paid_at_once() -> None:
    places, linear = nn.Parameter(torch.randn(8, 8)), nn.functional.linear
    assert owes(lambda x, weight: linear(x, weight), nn.Parameter(torch.randn(8, 8)), places) == 1
    for view in (lambda: places, lambda: places.t(), places.detach, lambda: places.data):
        assert owes(lambda x, weight, view=view: linear(view(), weight), nn.Parameter(torch.randn(8, 8)), places) == 0
    assert owes(lambda x, weight: linear(x, weight), nn.Parameter(torch.randn(8))) == 0, "one output"
    hooked = nn.Parameter(torch.randn(8, 8))
    hooked.register_hook(lambda gradient: gradient.clamp(-1, 1))
    assert owes(lambda x, weight: linear(x, weight), hooked) == 0, "each gradient is changed"


def test_fp16_is_not_joined_where_a_sum_may_have_no_number() -> None:
    assert paid(Net(16).half(), [torch.randn(1, 16).half() for _ in range(4)], [4]) == 5 * 4


def test_microbatches_of_other_shapes_are_joined_too() -> None:
    net, batches = Net(16), [torch.randn(2, rows, 16) for rows in (1, 2, 1)]
    sum(net(batch).sum() for batch in batches).backward()
    expected = net.up.weight.grad
    net.zero_grad()
    paid(net, batches, [3])
    torch.testing.assert_close(net.up.weight.grad, expected)


def test_a_frozen_weight_is_owed_nothing() -> None:
    net = Net(16)
    net.down.weight.requires_grad_(False)
    paid(net, [torch.randn(1, 16) for _ in range(3)], [3])
    assert net.down.weight.grad is None and net.up.weight.grad is not None
