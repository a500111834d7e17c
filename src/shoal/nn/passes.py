"""The passes between the products of a transformer layer, as autograd functions that save as little as they can.

    dropout_add     residual + dropout(x)           saves a seed: the mask is a function of (seed, row, column)
    layer_norm      the norm of h                   saves h; or if `invertible` its own output, from which it computes h back
    gelu_linear     gelu(u) W^T + b                 saves u alone, and computes gelu(u) again in backward

With n = (h - mean) / std and y = n gain + shift, an invertible norm takes n = (y - shift) / gain in backward. It divides by
the gain, which must not be near 0.
"""

# pyright: reportIncompatibleMethodOverride=false
# (once_differentiable hides the signature of the backward that it guards.)

from __future__ import annotations

from typing import Any, Literal, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from shoal.attention.dropout import drop_rows, threshold
from shoal.errors import UsageError
from shoal.native import layers as native
from shoal.nn.gpu_passes import triton_passes
from shoal.products import Products, in_autocast_dtype

__all__ = ["SMALLEST_GAIN", "Gelu", "check_invertible", "drop", "dropout_add", "gelu_linear", "layer_norm"]

Gelu = Literal["none", "tanh"]
"""The exact function, or its approximation by tanh, as torch's `gelu` names them."""

SMALLEST_GAIN = 1e-3
"""An invertible norm multiplies rounding errors of its output by 1 / gain: 1000 times at most."""


def dropout_add(x: Tensor, residual: Tensor, *, dropout: float, seed: int) -> Tensor:
    """Return residual + dropout(x), both (..., columns); with the same `seed` the same elements are dropped."""
    return cast(Tensor, _DropoutAdd.apply(x, residual, dropout, seed)) if dropout else residual + x


def drop(x: Tensor, residual: Tensor | None, dropout: float, seed: int) -> Tensor:
    """Return dropout(x) [+ residual], in the dtype of such a sum, without a graph.

    Computed natively on the host, by Triton or torch elsewhere.
    """
    rows = x.reshape(-1, x.shape[-1])
    base = None if residual is None else residual.reshape(rows.shape)
    dtype = x.dtype if residual is None else torch.result_type(x, residual)
    if x.device.type == "cpu" and native.available():
        wide = None if base is None else base.float().contiguous()
        output = native.dropout_add(rows.float().contiguous(), wide, seed=seed, threshold=threshold(dropout),
                                    kept=1 / (1 - dropout)).to(dtype)
    elif dtype == x.dtype and (passes := triton_passes(rows, *(() if base is None else (base,)))) is not None:
        output = passes.dropout_add(rows.contiguous(), None if base is None else base.contiguous(), seed=seed,
                                    threshold=threshold(dropout), kept=1 / (1 - dropout))
    else:
        output = drop_rows(rows, base, dropout, seed)
    return output.view(x.shape)


def layer_norm(h: Tensor, gain: Tensor, shift: Tensor, eps: float, *, invertible: bool) -> Tensor:
    """Return the layer norm over the last dim of `h`, as `F.layer_norm`."""
    if not invertible:
        return F.layer_norm(h, gain.shape, gain, shift, eps)
    return cast(Tensor, _InvertibleNorm.apply(h, gain, shift, eps))


def check_invertible(name: str, gain: Tensor) -> None:
    """Raise UsageError where an invertible norm's `gain`, the parameter `name`, has an element near 0."""
    smallest, place = gain.detach().abs().min(0)
    if not smallest >= SMALLEST_GAIN:
        raise UsageError(f"normalize_invertible: {name}[{int(place)}] is {float(gain.detach()[place]):.3g}: backward would "
                         f"divide by it, and gains must be {SMALLEST_GAIN} or more in magnitude; set "
                         f"normalize_invertible to false for this layer")


def gelu_linear(u: Tensor, weight: Tensor, bias: Tensor | None, *, approximate: Gelu, products: Products) -> Tensor:
    """Return gelu(u) W^T + b, and save `u` alone; under autocast all are in its dtype."""
    u, weight, bias = in_autocast_dtype(u, weight, bias)
    return cast(Tensor, _GeluLinear.apply(u, weight, bias, approximate, products))


class _DropoutAdd(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, residual: Tensor, dropout: float, seed: int) -> Tensor:
        ctx.dropout, ctx.seed = dropout, seed
        return drop(x, residual, dropout, seed)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor, None, None]:
        of_x = drop(gradient, None, ctx.dropout, ctx.seed) if ctx.needs_input_grad[0] else None
        return of_x, gradient, None, None


class _InvertibleNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, h: Tensor, gain: Tensor, shift: Tensor, eps: float) -> Tensor:
        y, _, rate = torch.native_layer_norm(h, gain.shape, gain, shift, eps)
        ctx.save_for_backward(y, rate, gain, shift)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        y, rate, gain, shift = ctx.saved_tensors
        centred = (y - shift).div_(gain).div_(rate)  # h - mean
        of_h, of_gain, of_shift = torch.ops.aten.native_layer_norm_backward(
            gradient.contiguous(), centred, gain.shape, torch.zeros_like(rate), rate, gain, shift, [True, True, True])
        return of_h, of_gain, of_shift, None


class _GeluLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, u: Tensor, weight: Tensor, bias: Tensor | None, approximate: Gelu, products: Products) -> Tensor:
        ctx.save_for_backward(u, weight)
        ctx.approximate, ctx.products = approximate, products
        return products.linear(F.gelu(u, approximate=approximate), weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None, None, None]:
        u, weight = ctx.saved_tensors
        of_weight = of_bias = None
        if ctx.needs_input_grad[1]:
            of_weight = ctx.products.gradient_of_weight(gradient, F.gelu(u, approximate=ctx.approximate))
        if ctx.needs_input_grad[2]:
            of_bias = gradient.reshape(-1, gradient.shape[-1]).sum(0)
        of_gelu = ctx.products.gradient_of_input(gradient, weight)
        of_u = torch.ops.aten.gelu_backward(of_gelu, u, approximate=ctx.approximate)
        return of_u, of_weight, of_bias, None, None
