"""Split backward gives the gradients of whole backward, whichever weight-gradient tasks run together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from shoal.pipeline.split_backward import WeightGradQueue, deferring, weight_grad_passes


class Net(nn.Module):
    """A product with a bias and one without, one with a transposed weight, and weights that are used twice."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width, bias=False)
        self.transposed = nn.Parameter(torch.randn(width, width) / width)
        self.shift = nn.Parameter(torch.randn(width))

    def forward(self, value: Tensor) -> Tensor:
        value = self.down(self.up(value).relu())
        flat = torch.addmm(self.shift, value.reshape(-1, value.shape[-1]), self.transposed).view_as(value)
        return self.down(self.up(flat).relu())


class Products(TorchDispatchMode):
    """Counts matrix products."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten.mm.default
        return func(*args, **kwargs or {})


def products_of_w(net: Net, batches: list[Tensor], groups: list[int]) -> int:
    """Run F and I of each of `batches`, then W in groups of the given sizes; return the matrix products that W ran."""
    queues: list[WeightGradQueue] = []
    for batch in batches:
        queue = WeightGradQueue()
        with deferring(queue):
            output = net(batch)
        queue.backward_input([output], [torch.ones_like(output)])
        queues.append(queue)
    start = 0
    with Products() as products:
        for size in groups:
            for run in weight_grad_passes(queues[start:start + size]):
                run()
            start += size
    assert not any(map(len, queues))
    return products.count


@pytest.mark.parametrize("rows", [1, 3, 200], ids="{} rows".format)
@pytest.mark.parametrize("groups", [[1] * 4, [4], [1, 3]], ids=str)
def test_joined_weight_gradient_tasks_give_the_sum(rows: int, groups: list[int]) -> None:
    torch.manual_seed(0)
    net, batches = Net(16).double(), [torch.randn(2, rows, 16).double() for _ in range(4)]
    sum(net(batch).sum() for batch in batches).backward()
    expected = {name: parameter.grad for name, parameter in net.named_parameters()}
    net.zero_grad()
    products_of_w(net, batches, groups)
    for name, parameter in net.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-12, atol=1e-12)


def test_tasks_of_few_rows_are_joined() -> None:
    assert products_of_w(Net(16), [torch.randn(1, 16) for _ in range(4)], [4]) == 3  # of up, down and transposed


def test_tasks_of_many_rows_are_not_joined() -> None:
    assert products_of_w(Net(16), [torch.randn(400, 16) for _ in range(4)], [4]) == 5 * 4  # up and down are used twice


def test_tasks_that_are_not_joined_run_in_separate_passes() -> None:
    weight, batches = nn.Parameter(torch.ones(16, 16)), [torch.randn(400, 16) for _ in range(3)]
    queues = [WeightGradQueue() for _ in batches]
    for queue, batch in zip(queues, batches, strict=True):
        with deferring(queue):
            output = nn.functional.linear(batch, weight)
        queue.backward_input([output], [torch.ones_like(output)])
    assert len(weight_grad_passes(queues)) == 3, "the caller adds them up in its own dtype"
    assert len(weight_grad_passes([WeightGradQueue()])) == 1, "an empty pass is still a pass: other ranks run it too"


def deferred_tasks(product: Callable[[Tensor, nn.Parameter], Tensor], weight: nn.Parameter,
                   freed: Tensor | None = None) -> int:
    def may_be_freed(tensor: Tensor) -> bool:
        return freed is not None and tensor.untyped_storage().data_ptr() == freed.untyped_storage().data_ptr()

    queue = WeightGradQueue(may_be_freed)
    with deferring(queue):
        output = product(torch.randn(8, 8), weight)
    queue.backward_input([output], [torch.ones_like(output)])
    assert weight.grad is not None or len(queue)
    return len(queue)


def test_gradients_that_cannot_be_deferred_are_computed_at_once() -> None:
    places, linear = nn.Parameter(torch.randn(8, 8)), nn.functional.linear
    assert deferred_tasks(lambda x, weight: linear(x, weight), nn.Parameter(torch.randn(8, 8)), places) == 1
    for view in (lambda: places, lambda: places.t(), places.detach, lambda: places.data):
        weight = nn.Parameter(torch.randn(8, 8))
        assert deferred_tasks(lambda x, weight, view=view: linear(view(), weight), weight, places) == 0
    assert deferred_tasks(lambda x, weight: linear(x, weight), nn.Parameter(torch.randn(8))) == 0, "one output"
    hooked = nn.Parameter(torch.randn(8, 8))
    hooked.register_hook(lambda gradient: gradient.clamp(-1, 1))
    assert deferred_tasks(lambda x, weight: linear(x, weight), hooked) == 0, "a hook sees each gradient"


def test_fp16_tasks_are_not_joined_since_the_sum_may_overflow() -> None:
    assert products_of_w(Net(16).half(), [torch.randn(1, 16).half() for _ in range(4)], [4]) == 5 * 4


def test_tasks_of_microbatches_of_different_shapes_are_joined() -> None:
    net, batches = Net(16), [torch.randn(2, rows, 16) for rows in (1, 2, 1)]
    sum(net(batch).sum() for batch in batches).backward()
    expected = net.up.weight.grad
    net.zero_grad()
    products_of_w(net, batches, [3])
    torch.testing.assert_close(net.up.weight.grad, expected)


def test_a_frozen_weight_gets_no_task() -> None:
    net = Net(16)
    net.down.weight.requires_grad_(False)
    products_of_w(net, [torch.randn(1, 16) for _ in range(3)], [3])
    assert net.down.weight.grad is None and net.up.weight.grad is not None
