"""Split backward: I computes the gradient of a stage's input at once, W computes the gradients of its weights later.

The matrix products with weights take most of the time of backward, half of it each for I and W. Within `deferring`, a
product of an activation and a weight computes only the input gradient in its backward and adds a `WeightGradTask` to a
`WeightGradQueue`; the task runs later, in a backward pass of its own. All other parameters (norms, embeddings, biases that
are added separately) get their gradients in I, which is correct too and takes little time.

If the tasks of several microbatches run together, those of one weight become one product over all their rows, where that
moves fewer bytes than adding one gradient to another. It is also faster: products of few rows are inefficient.

A custom autograd function takes part by calling `current_queue()` in its forward and adding a task in its backward.

Qi et al. 2023, "Zero Bubble Pipeline Parallelism", arXiv 2401.10241, section 2.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import Function
from torch.overrides import TorchFunctionMode

from shoal.autograd import run_backward

__all__ = ["WeightGradQueue", "WeightGradTask", "current_queue", "deferring", "weight_grad_passes"]


@dataclass(frozen=True, slots=True)
class WeightGradTask:
    """The deferred gradients of a product y = x W^T + b: of its weight W (out, in) and, if it has one, its bias b (out,)."""

    weights: tuple[Tensor, ...]
    """W, or W and b."""
    gradient: Tensor
    """The gradient of y, (..., out)."""
    inputs: int
    """in; kept here because the storage of W may be released."""
    activation: Callable[[], Tensor]
    """Returns x, (..., in)."""
    transposed: bool = False
    """Whether W is (in, out)."""

    @property
    def rows(self) -> int:
        """Rows of x and y."""
        return self.gradient.shape[:-1].numel()

    @property
    def key(self) -> tuple[int, ...]:
        """Equal for tasks that can run as one product."""
        return self.transposed, *map(id, self.weights)


class WeightGradQueue:
    """The deferred weight-gradient tasks of one microbatch at one stage.

    `may_be_freed` tells of a tensor whether its memory may be released before the tasks run, as that of weights may be.
    """

    def __init__(self, may_be_freed: Callable[[Tensor], bool] = lambda tensor: False) -> None:
        self._may_be_freed = may_be_freed
        self._tasks: list[WeightGradTask] = []

    def __len__(self) -> int:
        return len(self._tasks)

    def accepts(self, activation: Tensor, *weights: Tensor | None) -> bool:
        """Return whether the gradients of `weights` in a product with `activation` can be deferred.

        They cannot if a weight has gradient hooks, which must see each gradient by itself, or if the memory of the
        activation may be released.
        """
        plain = all(weight is None or (weight.is_leaf and not weight._backward_hooks) for weight in weights)
        return plain and not self._may_be_freed(activation)

    def add(self, task: WeightGradTask) -> None:
        """Add a task."""
        self._tasks.append(task)

    def backward_input(self, outputs: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
        """Run I of a backward pass; products add their tasks to this queue."""
        with deferring(self):
            run_backward(outputs, gradients)

    def take_tasks(self) -> list[WeightGradTask]:
        """Return the tasks, and empty the queue."""
        tasks, self._tasks = self._tasks, []
        return tasks


def weight_grad_passes(queues: Iterable[WeightGradQueue]) -> list[Callable[[], None]]:
    """Return the backward passes that run W for some microbatches; a task is released when it has run.

    In each pass a weight gets the gradient of all microbatches, by one product, or of one of them: autograd would add up
    several in the weight's dtype, and the caller may accumulate gradients in another.
    """
    tasks_of, groups = [queue.take_tasks() for queue in queues], dict[tuple[int, ...], list[WeightGradTask]]()
    for task in (task for tasks in tasks_of for task in tasks):
        groups.setdefault(task.key, []).append(task)
    joined = {key: tasks for key, tasks in groups.items() if _worth_joining(tasks)}
    passes: list[list[Sequence[WeightGradTask]]] = [[[task] for task in tasks if task.key not in joined]
                                                    for tasks in tasks_of]
    passes[0][:0] = joined.values()
    return [partial(_run, products) for products in passes if products] or [_run_nothing]


def _run(products: list[Sequence[WeightGradTask]]) -> None:
    """Run a backward pass with one product for each sequence of tasks."""
    roots = [cast(Tensor, _WeightGradProduct.apply(tasks, *tasks[0].weights)) for tasks in products]
    products.clear()
    torch.autograd.backward(roots, roots)


def _run_nothing() -> None:
    """Run a pass without products."""


def _worth_joining(tasks: Sequence[WeightGradTask]) -> bool:
    """Return whether joining the rows of `tasks` moves fewer elements than adding up their gradients, of W's shape.

    Never in fp16: the sum of many gradients, each times the loss scale, may overflow there.
    """
    inputs, outputs = tasks[0].inputs, tasks[0].gradient.shape[-1]
    fewer = sum(task.rows for task in tasks) * (inputs + outputs) <= (len(tasks) - 1) * inputs * outputs
    return fewer and tasks[0].gradient.dtype != torch.float16


class deferring(TorchFunctionMode):
    """Context of a forward whose products with weights defer their weight gradients to `queue`."""

    def __init__(self, queue: WeightGradQueue) -> None:
        super().__init__()
        self.queue = queue

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (),
                           kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if torch.is_grad_enabled():
            if func is nn.functional.linear and not kwargs and self._defers(*(*args, None)[:3], outputs=0):
                return _DeferredProduct.apply(self.queue, False, *(*args, None)[:3])
            if func is torch.addmm and len(args) == 3 and not kwargs and self._defers(args[1], args[2], args[0], outputs=1):
                return _DeferredProduct.apply(self.queue, True, args[1], args[2], args[0])
        return func(*args, **kwargs)

    def _defers(self, activation: Any, weight: Any, bias: Any, *, outputs: int) -> bool:
        return _is_deferrable(activation, weight, bias, outputs=outputs) and self.queue.accepts(activation, weight, bias)


def current_queue() -> WeightGradQueue | None:
    """Return the queue of the innermost `deferring`; None where backward is not split."""
    for position in reversed(range(torch._C._len_torch_function_stack())):  # pyright: ignore[reportPrivateUsage]
        mode = torch._C._get_function_stack_at(position)  # pyright: ignore[reportPrivateUsage]
        if isinstance(mode, deferring):
            return mode.queue
    return None


class _DeferredProduct(Function):
    """activation @ weight.T + bias, or with `transposed` activation @ weight + bias; backward defers weight gradients."""

    @staticmethod
    def forward(ctx: Any, queue: WeightGradQueue, transposed: bool, activation: Tensor, weight: Tensor,
                bias: Tensor | None) -> Tensor:
        ctx.queue, ctx.transposed, ctx.weights = queue, transposed, (weight,) if bias is None else (weight, bias)
        ctx.save_for_backward(activation, weight)
        if not transposed:
            return nn.functional.linear(activation, weight, bias)
        return activation @ weight if bias is None else torch.addmm(bias, activation, weight)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = gradients
        activation, weight = ctx.saved_tensors
        ctx.queue.add(WeightGradTask(ctx.weights, gradient, activation.shape[-1], lambda: activation, ctx.transposed))
        input_grad = gradient @ (weight.t() if ctx.transposed else weight) if ctx.needs_input_grad[2] else None
        return None, None, input_grad, None, None


class _WeightGradProduct(Function):
    """An empty tensor in forward; in backward, the summed gradients of tasks of the same weights, by one product."""

    @staticmethod
    def forward(ctx: Any, tasks: Sequence[WeightGradTask], *weights: Tensor) -> Tensor:
        ctx.tasks = tasks
        with torch._C.DisableTorchFunctionSubclass():  # pyright: ignore[reportPrivateUsage]  a released weight has a dtype
            return torch.empty(0, dtype=weights[0].dtype, device=weights[0].device)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        tasks, ctx.tasks = ctx.tasks, None
        transposed, biased = tasks[0].transposed, len(tasks[0].weights) > 1
        rows, columns = _joined_rows(task.gradient for task in tasks), _joined_rows(task.activation() for task in tasks)
        wants = ctx.needs_input_grad[1:]
        product = (columns.t() @ rows if transposed else rows.t() @ columns) if wants[0] else None
        return None, product, *([rows.sum(0) if wants[1] else None] if biased else [])


def _joined_rows(tensors: Iterable[Tensor]) -> Tensor:
    """Return the rows of tensors (..., n) as one tensor (rows, n)."""
    flat = [tensor.reshape(-1, tensor.shape[-1]) for tensor in tensors]
    return flat[0] if len(flat) == 1 else torch.cat(flat)


def _is_deferrable(activation: object, weight: object, bias: object, *, outputs: int) -> bool:
    """Return whether `weight` and `bias` are trained parameters of a product that may be deferred.

    `outputs` is the output dim of the weight. Under autocast the product has other dtypes, and is not deferred.
    """
    if not (isinstance(weight, nn.Parameter) and isinstance(activation, Tensor) and weight.requires_grad
            and weight.dim() == 2 and activation.dtype == weight.dtype
            and not torch.is_autocast_enabled(activation.device.type)):
        return False
    return bias is None or (isinstance(bias, nn.Parameter) and tuple(bias.shape) == (weight.shape[outputs],))
