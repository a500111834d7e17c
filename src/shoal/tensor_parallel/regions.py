"""The conjugate operators at the border of tensor-parallel regions: each forward collective has its mirror in backward.

A tensor is *whole* where every rank holds the same values, *split* along a dim where each holds its part, and *partial*
where each holds an addend. The gradient of a whole tensor is the sum of the parts that the ranks computed of it; hence:

    forward                          backward                         bytes sent, of a whole tensor of n bytes
    enter   whole -> used by parts   partial -> whole: all-reduce     0                 2 n (N-1)/N
    leave   partial -> whole         whole -> whole                   2 n (N-1)/N       0
    enter   split -> whole           partial -> split                 n (N-1)/N         n (N-1)/N      with a dim
    leave   partial -> split         split -> whole                   n (N-1)/N         n (N-1)/N      with a dim
    split   whole -> split           split -> whole                   0                 n (N-1)/N
    gather  split -> whole           whole -> split                   n (N-1)/N         0
    share   whole -> used by parts   partial -> whole: all-reduce     0                 2 n (N-1)/N    several at once

Between `enter` and `leave` each rank computes with its slices of the weights. With a dim, tensors outside of the region are
split along it (the sequence), so that norms and dropout there cost each rank an N-th. (Shoeybi et al. 2019, section 3;
Korthikanti et al. 2022, section 4.2.)
"""

# pyright: reportIncompatibleMethodOverride=false
# (once_differentiable hides the signature of the backward that it guards.)

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from shoal.mesh.tensor_slice import divided, stretch
from shoal.tensor_parallel.axis import Axis, PendingTensor, eager

__all__ = ["enter", "gather", "leave", "share", "split"]


@eager
def enter(tensor: Tensor, axis: Axis, dim: int | None = None) -> Tensor:
    """Return the whole `tensor` for use with sliced weights: gathered along `dim`, or unchanged without a dim."""
    return cast(Tensor, _Enter.apply(tensor, axis, dim if dim is None else dim % tensor.ndim))


@eager
def leave(tensor: Tensor, axis: Axis, dim: int | None = None) -> Tensor:
    """Return the sum of the ranks' addends `tensor`: split along `dim`, or whole without a dim."""
    return cast(Tensor, _Leave.apply(tensor, axis, dim if dim is None else dim % tensor.ndim))


@eager
def split(tensor: Tensor, axis: Axis, dim: int) -> Tensor:
    """Return this rank's part of the whole `tensor` along `dim`.

    Raises `UsageError` if the ranks do not divide the size of `dim`.
    """
    return cast(Tensor, _Split.apply(tensor, axis, dim % tensor.ndim))


@eager
def gather(tensor: Tensor, axis: Axis, dim: int, size: int | None = None) -> Tensor:
    """Return the whole tensor of which each rank holds a part along `dim`.

    Every rank must compute the same with the result. Parts have one size; or with `size`, the whole size of `dim`, all
    parts but the last ones have ceil(size / ranks) rows, and the last are shorter or empty.
    """
    return cast(Tensor, _Gather.apply(tensor, axis, dim % tensor.ndim, size))


@eager
def share(axis: Axis, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Return whole `tensors` for use on this rank's part of the data; one all-reduce sums all their gradients."""
    return cast("tuple[Tensor, ...]", _SharedTensors.apply(axis, *tensors))


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, axis: Axis, dim: int | None) -> Tensor:
        ctx.axis, ctx.dim = axis, dim
        return tensor.view_as(tensor) if dim is None else gathered(tensor, axis, dim)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return summed(gradient, ctx.axis, ctx.dim, keep=True).wait(), None, None


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, axis: Axis, dim: int | None) -> Tensor:
        ctx.axis, ctx.dim = axis, dim
        total = summed(tensor, axis, dim, keep=True).wait()
        return total.view_as(total) if total is tensor else total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        if ctx.dim is None:
            return gradient, None, None
        return gathered(gradient, ctx.axis, ctx.dim), None, None


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, axis: Axis, dim: int) -> Tensor:
        ctx.axis, ctx.dim = axis, dim
        size = _part_size(tensor, axis, dim)
        return tensor.narrow(dim, axis.rank * size, size).contiguous()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return gathered(gradient, ctx.axis, ctx.dim), None, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, axis: Axis, dim: int, size: int | None) -> Tensor:
        size = tensor.shape[dim] * axis.ranks if size is None else size
        ctx.dim, ctx.rows = dim, stretch(size, axis.rank, axis.ranks)
        padding = len(stretch(size, 0, axis.ranks)) - tensor.shape[dim]
        if padding:
            tensor = functional.pad(tensor, (0, 0) * (tensor.ndim - 1 - dim) + (0, padding))
        return gathered(tensor, axis, dim).narrow(dim, 0, size)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return gradient.narrow(ctx.dim, ctx.rows.start, len(ctx.rows)), None, None, None


class _SharedTensors(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, axis: Axis, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.axis = axis
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
        parts = ctx.axis.all_reduce(flat).wait().split([gradient.numel() for gradient in gradients])
        return None, *(part.view(gradient.shape).to(gradient.dtype) for part, gradient in zip(parts, gradients, strict=True))


def summed(addend: Tensor, axis: Axis, dim: int | None, *, keep: bool = False) -> PendingTensor:
    """Start the sum of `addend` over the ranks: split along `dim`; without it in place, or with `keep` in a new tensor."""
    if dim is None:
        return axis.all_reduce(addend.contiguous(), keep=keep)
    _part_size(addend, axis, dim)
    return axis.reduce_scatter(addend.unflatten(dim, (axis.ranks, -1)).movedim(dim, 0).contiguous())


def gathered(part: Tensor, axis: Axis, dim: int) -> Tensor:
    """Return the parts of all ranks, concatenated along `dim`."""
    return joined(axis.all_gather(part.contiguous()), dim)


def joined(parts: PendingTensor, dim: int) -> Tensor:
    """Wait for the parts (ranks, ...) of a tensor, and concatenate them along `dim`."""
    return parts.wait().movedim(0, dim).flatten(dim, dim + 1)


def _part_size(tensor: Tensor, axis: Axis, dim: int) -> int:
    return divided(f"dim {dim} of {tuple(tensor.shape)}, which is to be split,", tensor.shape[dim], axis.ranks)
