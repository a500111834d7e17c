"""Backward in two halves: the gradient of the input at once, those of weights when there is time for them.

The matrix products with weights are where the time of backward goes, half of it for either half. Within `deferring` a
product of an activation and a weight remembers, in its backward, what the weight's gradient is made of, and computes only
the input's; `WeightGradQueue.run` does the rest, in a backward pass of its own. Everything else (norms, embeddings, biases
added apart) gives its gradient in the first half, which is right too, and little.

Debts of several microbatches that are paid together are one product for each weight, of all their rows, where that moves
fewer bytes than adding a gradient to another. It is also a better product: those of few rows are slow.

A function of one's own takes part by asking for `current()` in its forward, and owing a debt in its backward.

Qi et al. 2023, "Zero Bubble Pipeline Parallelism", arXiv 2401.10241, section 2.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.autograd.function import Function
from torch.overrides import TorchFunctionMode

__all__ = ["WeightGradQueue", "WeightGradTask", "backward", "current", "deferring", "rounds"]


@dataclass(frozen=True, slots=True)
class WeightGradTask:
    """What a product, y = x W^T + b, owes to its weight W (out, in), and to its bias b (out,) if it has one."""

    weights: tuple[Tensor, ...]
    """W, or W and b."""
    gradient: Tensor
    """That of y, (..., out)."""
    inputs: int
    """in; a weight cannot say, for it may be away."""
    activation: Callable[[], Tensor]
    """Returns x, (..., in)."""
    turned: bool = False
    """Whether W is (in, out)."""

    @property
    def rows(self) -> int:
        """Rows of x and y."""
        return self.gradient.shape[:-1].numel()

    @property
    def key(self) -> tuple[int, ...]:
        """What debts that can be one have in common."""
        return self.turned, *map(id, self.weights)


class WeightGradQueue:
    """What the weights of one stage are owed by one microbatch.

    `leaves` says of a tensor whether its memory may be given up before the debts are paid, as that of weights may be.
    """

    def __init__(self, leaves: Callable[[Tensor], bool] = lambda tensor: False) -> None:
        self._leaves = leaves
        self._owed: list[WeightGradTask] = []

    def __len__(self) -> int:
        return len(self._owed)

    def takes(self, activation: Tensor, *weights: Tensor | None) -> bool:
        """Whether what a product with `activation` owes its `weights` can be paid later.

        Not where hooks of a weight are to see each gradient that comes, nor where the activation is gone by then.
        """
        plain = all(weight is None or (weight.is_leaf and not weight._backward_hooks) for weight in weights)
        return plain and not self._leaves(activation)

    def owe(self, debt: WeightGradTask) -> None:
        """Remember a debt."""
        self._owed.append(debt)

    def backward(self, outputs: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
        """Run the first half of a backward pass."""
        with deferring(self):
            backward(outputs, gradients)

    def forgotten(self) -> list[WeightGradTask]:
        """Return the debts, and owe them no longer."""
        debts, self._owed = self._owed, []
        return debts


def rounds(owing: Iterable[WeightGradQueue]) -> list[Callable[[], None]]:
    """Return the passes that run the second half of the backward passes of some microbatches; a debt is forgotten when paid.

    In each a weight is paid for all of them, by one product, or for one of them: autograd would take the sum over several in
    the weight's dtype, and whoever collects gradients may want another.
    """
    owed, alike = [deferred.forgotten() for deferred in owing], dict[tuple[int, ...], list[WeightGradTask]]()
    for debt in (debt for debts in owed for debt in debts):
        alike.setdefault(debt.key, []).append(debt)
    joined = {key: debts for key, debts in alike.items() if _one_product(debts)}
    passes: list[list[Sequence[WeightGradTask]]] = [[[debt] for debt in debts if debt.key not in joined] for debts in owed]
    passes[0][:0] = joined.values()
    return [partial(_pay, payments) for payments in passes if payments] or [_nothing]


def _pay(payments: list[Sequence[WeightGradTask]]) -> None:
    ends = [cast(Tensor, _Payment.apply(debts, *debts[0].weights)) for debts in payments]
    payments.clear()
    torch.autograd.backward(ends, ends)


def _nothing() -> None:
    """Be a pass in which nothing runs."""


def _one_product(debts: Sequence[WeightGradTask]) -> bool:
    """Whether to join the rows of `debts` moves fewer elements than to add up their gradients, of W's shape, one by one.

    Not in fp16: the sum of many gradients, each times the loss scale, may have no number there.
    """
    inputs, outputs = debts[0].inputs, debts[0].gradient.shape[-1]
    fewer = sum(debt.rows for debt in debts) * (inputs + outputs) <= (len(debts) - 1) * inputs * outputs
    return fewer and debts[0].gradient.dtype != torch.float16


class deferring(TorchFunctionMode):
    """Context of a forward whose products with weights are to owe their weights' gradients to `deferred`."""

    def __init__(self, deferred: WeightGradQueue) -> None:
        super().__init__()
        self.deferred = deferred

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (),
                           kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if torch.is_grad_enabled():
            if func is nn.functional.linear and not kwargs and self._owes(*(*args, None)[:3], outputs=0):
                return _Product.apply(self.deferred, False, *(*args, None)[:3])
            if func is torch.addmm and len(args) == 3 and not kwargs and self._owes(args[1], args[2], args[0], outputs=1):
                return _Product.apply(self.deferred, True, args[1], args[2], args[0])
        return func(*args, **kwargs)

    def _owes(self, activation: Any, weight: Any, bias: Any, *, outputs: int) -> bool:
        return _suits(activation, weight, bias, outputs=outputs) and self.deferred.takes(activation, weight, bias)


def backward(outputs: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
    """Run a backward pass from `outputs`, whose `gradients` are of their shapes: what torch's engine refuses, it refuses.

    torch's own entry would take the mode of `deferring` away before anything runs, and with it from activations that are
    computed once more, and looks at shapes for longer than a small pass takes.
    """
    Variable._execution_engine.run_backward(  # pyright: ignore  no annotation, no other way
        tuple(outputs), tuple(gradients), False, False, (), allow_unreachable=True, accumulate_grad=True)


def current() -> WeightGradQueue | None:
    """Return whom weights' gradients are to be owed to, if a schedule takes backward in two halves at present."""
    for position in reversed(range(torch._C._len_torch_function_stack())):  # pyright: ignore[reportPrivateUsage]
        mode = torch._C._get_function_stack_at(position)  # pyright: ignore[reportPrivateUsage]
        if isinstance(mode, deferring):
            return mode.deferred
    return None


class _Product(Function):
    """activation @ weight.T + bias, or with `turned` activation @ weight + bias."""

    @staticmethod
    def forward(ctx: Any, deferred: WeightGradQueue, turned: bool, activation: Tensor, weight: Tensor,
                bias: Tensor | None) -> Tensor:
        ctx.deferred, ctx.turned, ctx.weights = deferred, turned, (weight,) if bias is None else (weight, bias)
        ctx.save_for_backward(activation, weight)
        if not turned:
            return nn.functional.linear(activation, weight, bias)
        return activation @ weight if bias is None else torch.addmm(bias, activation, weight)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = gradients
        activation, weight = ctx.saved_tensors
        ctx.deferred.owe(WeightGradTask(ctx.weights, gradient, activation.shape[-1], lambda: activation, ctx.turned))
        back = gradient @ (weight.t() if ctx.turned else weight) if ctx.needs_input_grad[2] else None
        return None, None, back, None, None


class _Payment(Function):
    """Nothing forward; backward, what debts to the same weights come to."""

    @staticmethod
    def forward(ctx: Any, debts: Sequence[WeightGradTask], *weights: Tensor) -> Tensor:
        ctx.debts = debts
        with torch._C.DisableTorchFunctionSubclass():  # pyright: ignore[reportPrivateUsage]  a released weight has a dtype
            return torch.empty(0, dtype=weights[0].dtype, device=weights[0].device)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        debts, ctx.debts = ctx.debts, None
        turned, biased = debts[0].turned, len(debts[0].weights) > 1
        rows, columns = _joined(debt.gradient for debt in debts), _joined(debt.activation() for debt in debts)
        wants = ctx.needs_input_grad[1:]
        product = (columns.t() @ rows if turned else rows.t() @ columns) if wants[0] else None
        return None, product, *([rows.sum(0) if wants[1] else None] if biased else [])


def _joined(tensors: Iterable[Tensor]) -> Tensor:
    """Return the rows (rows, n) of tensors (..., n), one after the other."""
    flat = [tensor.reshape(-1, tensor.shape[-1]) for tensor in tensors]
    return flat[0] if len(flat) == 1 else torch.cat(flat)


def _suits(activation: object, weight: object, bias: object, *, outputs: int) -> bool:
    """Whether `weight` and `bias` are parameters that are trained, of which a product may be deferred.

    `outputs` is the dim of the weight that counts outputs. Under autocast the product is not of these dtypes.
    """
    if not (isinstance(weight, nn.Parameter) and isinstance(activation, Tensor) and weight.requires_grad
            and weight.dim() == 2 and activation.dtype == weight.dtype
            and not torch.is_autocast_enabled(activation.device.type)):
        return False
    return bias is None or (isinstance(bias, nn.Parameter) and tuple(bias.shape) == (weight.shape[outputs],))
