"""y = x W^T + b with W cut over the ranks, and its derivative, each as one node of the graph.

    column   W's rows are cut:      every rank computes its part of y from the whole x        (enter, then multiply)
    row      W's columns are cut:   every rank computes an addend of y from its part of x     (multiply, then leave)

In backward the gradient of x travels while that of W is computed. Each gradient is computed only if the pass at hand wants
it; a schedule that takes backward in two halves is owed those of weights (`shoal.halves`).
"""

# pyright: reportIncompatibleMethodOverride=false
# (once_differentiable hides the signature of the backward that it guards.)

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from shoal.pipeline.split_backward import WeightGradQueue, WeightGradTask, current_queue
from shoal.tensor_parallel.axis import Axis, eager
from shoal.tensor_parallel.regions import gathered, joined, summed

__all__ = ["column", "row"]


@eager
def column(x: Tensor, weight: Tensor, bias: Tensor | None, axis: Axis, dim: int | None) -> Tensor:
    """Return this rank's part (..., rows) of x W^T + b, where `weight` (rows, in) and `bias` (rows,) are its parts.

    `x` (..., in) is whole; or split along `dim`, in which case it is gathered, and again in backward rather than kept.
    """
    return cast(Tensor, _ColumnProduct.apply(*_in_one_dtype(x, weight, bias), axis, dim))


@eager
def row(x: Tensor, weight: Tensor, bias: Tensor | None, axis: Axis, dim: int | None) -> Tensor:
    """Return x W^T + b (..., out), whole or split along `dim`, from this rank's parts of `x` (..., cut) and W (out, cut)."""
    return cast(Tensor, _RowProduct.apply(*_in_one_dtype(x, weight, bias), axis, dim))


class _ColumnProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, axis: Axis, dim: int | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.axis, ctx.dim, ctx.owed = axis, dim, _Owed.to(x, weight, bias)
        return functional.linear(x if dim is None else gathered(x, axis, dim), weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None]:
        x, weight = ctx.saved_tensors
        axis, dim = ctx.axis, ctx.dim
        wants_x, wants_weight, wants_bias = _wanted(ctx)
        if ctx.owed is not None:
            ctx.owed.later(lambda: x if dim is None else joined(axis.all_gather(x.contiguous()), dim), x.shape[-1], gradient)
            wants_weight = wants_bias = False
        x_gradient = weight_gradient = bias_gradient = None
        whole = axis.all_gather(x.contiguous()) if wants_weight and dim is not None else None
        sum_of_x = summed(gradient @ weight, axis, dim) if wants_x else None
        flat = _rows(gradient)
        if wants_weight:
            x = x if whole is None else joined(whole, ctx.dim)
            weight_gradient = flat.t() @ _rows(x)
        if wants_bias:
            bias_gradient = flat.sum(0)
        if sum_of_x is not None:
            x_gradient = sum_of_x.wait()
        return x_gradient, weight_gradient, bias_gradient, None, None


class _RowProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, axis: Axis, dim: int | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.axis, ctx.dim, ctx.owed = axis, dim, _Owed.to(x, weight, bias)
        addend = functional.linear(x, weight, bias if axis.rank == 0 else None)  # added once, before anything is rounded
        return summed(addend, axis, dim).wait()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None]:
        x, weight = ctx.saved_tensors
        wants_x, wants_weight, wants_bias = _wanted(ctx)
        if ctx.dim is not None:
            gradient = gathered(gradient, ctx.axis, ctx.dim)
        if ctx.owed is not None:
            ctx.owed.later(lambda: x, x.shape[-1], gradient)
            wants_weight = wants_bias = False
        flat = _rows(gradient)
        x_gradient = gradient @ weight if wants_x else None
        weight_gradient = flat.t() @ _rows(x) if wants_weight else None
        bias_gradient = flat.sum(0) if wants_bias else None  # of the whole gradient: the same on every rank
        return x_gradient, weight_gradient, bias_gradient, None, None


@dataclass(frozen=True, slots=True)
class _Owed:
    """Weights whose gradients a schedule takes in a pass of their own."""

    deferred: WeightGradQueue
    weights: tuple[Tensor, ...]

    @classmethod
    def to(cls, x: Tensor, weight: Tensor, bias: Tensor | None) -> Self | None:
        """Return what the schedule at present owes to the weights of a product with `x`; None: it takes backward at once."""
        deferred = current_queue()
        if deferred is None or not weight.requires_grad or not deferred.accepts(x, weight, bias):
            return None
        return cls(deferred, (weight,) if bias is None else (weight, bias))

    def later(self, x: Callable[[], Tensor], inputs: int, gradient: Tensor) -> None:
        """Remember what the gradients are made of."""
        self.deferred.add(WeightGradTask(self.weights, gradient, inputs, x))


def _in_one_dtype(x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """Do what autocast would do to a matrix product, outside of the node, so that its backward sees the same dtypes."""
    if not torch.is_autocast_enabled(x.device.type):
        return x, weight, bias
    dtype = torch.get_autocast_dtype(x.device.type)
    return x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)


def _rows(tensor: Tensor) -> Tensor:
    """View (..., n) as rows of n."""
    return tensor.flatten(0, -2) if tensor.ndim > 1 else tensor.unsqueeze(0)


def _wanted(ctx: Any) -> list[bool]:
    """Say of which of x, weight and bias the backward pass under way wants the gradients."""
    tensors = zip(ctx.needs_input_grad[:3], ctx.next_functions, strict=False)  # a bias of None has no edge
    wanted = [needed and _is_reached(edge) for needed, (edge, _) in tensors]
    return [*wanted, False][:3]


def _is_reached(node: Any) -> bool:
    try:
        return bool(torch._C._will_engine_execute_node(node))  # pyright: ignore  no other way to know
    except RuntimeError:  # autograd.grad(inputs=leaves) does not tell of leaves
        return True
