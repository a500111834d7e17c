"""The passes between the products of a transformer layer, as autograd functions that save as little as they can.

    dropout_add         h = residual + dropout(x)       saves a seed: the mask is a function of (seed, row, column)
    layer_norm          y = the norm of h               saves h; or if `invertible` y, from which it computes h back
    dropout_add_norm    both, of x + bias               saves h or y, and two numbers a row
    bias_gelu           gelu(u + bias)                  saves u
    gelu_linear         gelu(u + bias) W^T + b          saves u alone, and computes the GELU again in backward

With n = (h - mean) / std and y = n gain + shift, an invertible norm takes n = (y - shift) / gain in backward. It divides by
the gain, which must not be near 0.

fp32 in host memory is computed natively (layers.cpp), and on an accelerator Triton computes where it serves: one read and
one write of each element, and the gradients of bias, gain and shift are summed on the way. Elsewhere torch computes the
same by its own operations.
"""

# pyright: reportIncompatibleMethodOverride=false

from __future__ import annotations

from functools import partial
from typing import Any, Literal, cast, get_args

import torch
from torch import Tensor
from torch.nn import functional as F

from shoal.attention.dropout import drop_rows, threshold
from shoal.autograd import (
    check_first_derivative,
    differentiable_gradients,
    in_function_transform,
    in_trace,
    needs_operators,
)
from shoal.errors import UsageError
from shoal.native import layers as native
from shoal.native.layers import NO_DROPOUT, DropMask
from shoal.nn.gpu_passes import triton_passes
from shoal.products import Products, in_autocast_dtype
from shoal.transport.reduction import wide_dtype

__all__ = ["SMALLEST_GAIN", "Gelu", "bias_gelu", "check_invertible", "drop", "dropout_add", "dropout_add_norm",
           "dropout_add_norm_with_sum", "fused_passes", "gelu_linear", "layer_norm"]

Gelu = Literal["none", "tanh"]
"""The exact function, or its approximation by tanh, as torch's `gelu` names them."""

SMALLEST_GAIN = 1e-3
"""An invertible norm multiplies rounding errors of its output by 1 / gain: 1000 times at most."""
_INVERTIBLE = "an invertible layer norm, which keeps its output alone,", "set normalize_invertible to false"


def dropout_add(x: Tensor, residual: Tensor, *, dropout: float, seed: int) -> Tensor:
    """Return residual + dropout(x), both (..., columns); with the same `seed` the same elements are dropped."""
    if not dropout:
        return residual + x
    if x.shape != residual.shape:
        x, residual = torch.broadcast_tensors(x, residual)
    if in_function_transform() or in_trace():
        return drop_rows(_rows(x), _rows(residual), dropout, seed).view(x.shape)
    return cast(Tensor, _DropoutAdd.apply(x, residual, dropout, seed))


def drop(x: Tensor, residual: Tensor | None, dropout: float, seed: int) -> Tensor:
    """Return dropout(x) [+ residual], in the dtype of such a sum, without a graph.

    Computed natively on the host, by Triton or torch elsewhere.
    """
    rows, dropped = _rows(x), _dropout(dropout, seed)
    base = None if residual is None else residual.reshape(rows.shape)
    dtype = x.dtype if residual is None else torch.result_type(x, residual)
    if x.device.type == "cpu" and dtype != torch.float64 and native.available() and not needs_operators(x):
        wide = None if base is None else base.float().contiguous()
        output = native.dropout_add(rows.float(), wide, dropped).to(dtype)
    elif dtype == x.dtype and (passes := triton_passes(rows, *(() if base is None else (base,)))) is not None:
        output = passes.dropout_add(rows, None if base is None else base.contiguous(), dropped)
    else:
        output = drop_rows(rows, base, dropout, seed)
    return output.view(x.shape)


def layer_norm(h: Tensor, gain: Tensor, shift: Tensor, eps: float, *, invertible: bool) -> Tensor:
    """Return the layer norm over the last dim of `h`, as `F.layer_norm`."""
    if not invertible or in_function_transform() or in_trace():
        return F.layer_norm(h, gain.shape, gain, shift, eps)
    return cast(Tensor, _InvertibleNorm.apply(h, gain, shift, eps))


def dropout_add_norm(x: Tensor, residual: Tensor, gain: Tensor, shift: Tensor, *, bias: Tensor | None = None,
                     eps: float = 1e-5, dropout: float = 0.0, seed: int = 0, invertible: bool = False) -> Tensor:
    """Return the layer norm of h = dropout(x + bias) + residual: x, residual (..., columns), others (columns,).

    With the same `seed` the same elements are dropped. With `invertible` it saves its output, as `layer_norm` does.
    """
    if (passes := _norm_passes(x, residual, gain, shift, bias, dropout)) is None:
        h = dropout_add(x if bias is None else x + bias, residual, dropout=dropout, seed=seed)
        return layer_norm(h, gain, shift, eps, invertible=invertible)
    return _DropoutAddNorm.apply(x, bias, residual, gain, shift, eps, _dropout(dropout, seed), invertible, False, passes)[1]


def dropout_add_norm_with_sum(x: Tensor, residual: Tensor, gain: Tensor, shift: Tensor, *, bias: Tensor | None = None,
                              eps: float = 1e-5, dropout: float = 0.0, seed: int = 0,
                              invertible: bool = False) -> tuple[Tensor, Tensor]:
    """Return h = dropout(x + bias) + residual, and its layer norm."""
    if (passes := _norm_passes(x, residual, gain, shift, bias, dropout)) is None:
        h = dropout_add(x if bias is None else x + bias, residual, dropout=dropout, seed=seed)
        return h, layer_norm(h, gain, shift, eps, invertible=invertible)
    return _DropoutAddNorm.apply(x, bias, residual, gain, shift, eps, _dropout(dropout, seed), invertible, True, passes)


def _check_columns(name: str, x: Tensor, **operands: Tensor | None) -> None:
    for key, operand in operands.items():
        if operand is not None and (x.dim() == 0 or operand.shape != x.shape[-1:]):
            raise UsageError(f"{name}: got x {tuple(x.shape)} and a {key} {tuple(operand.shape)}; the {key} is "
                             f"{tuple(x.shape[-1:])}")


def bias_gelu(u: Tensor, bias: Tensor, *, approximate: Gelu = "none") -> Tensor:
    """Return gelu(u + bias) of `u` (..., columns) and `bias` (columns,)."""
    _check_columns("bias_gelu", u, bias=bias)
    if approximate not in get_args(Gelu):
        raise UsageError(f"bias_gelu: approximate: got {approximate!r}; choose {', '.join(get_args(Gelu))}")
    if fused_passes(u, bias) is None:
        return F.gelu(u + bias, approximate=approximate)
    return cast(Tensor, _BiasGelu.apply(u, bias, approximate))


def fused_passes(*tensors: Tensor, tiled: bool = False) -> Any:
    """Return the module whose passes serve `tensors`: `native.layers`, or Triton's; None where torch computes.

    A `tiled` pass takes rows of any width.
    """
    if needs_operators(*tensors):
        return None
    if all(each.dtype == torch.float32 and each.device.type == "cpu" for each in tensors):
        return native if native.available() else None
    return triton_passes(*tensors, tiled=tiled)


def _norm_passes(x: Tensor, residual: Tensor, gain: Tensor, shift: Tensor, bias: Tensor | None, dropout: float) -> Any:
    """Return the passes that serve a norm of a sum. Raises UsageError for operands that do not fit."""
    _check_columns("dropout_add_norm", x, gain=gain, shift=shift, bias=bias)
    if not 0 <= dropout < 1:
        raise UsageError(f"dropout_add_norm: dropout: got {dropout}; give a probability from 0 to below 1")
    dtype = torch.result_type(x, residual)
    allowed = (dtype, torch.float32) if dtype.itemsize == 2 else (dtype,)
    if (gain.dtype != shift.dtype or gain.dtype not in allowed) and not torch.is_autocast_enabled(x.device.type):
        raise UsageError(f"dropout_add_norm: got a gain of {gain.dtype} and a shift of {shift.dtype} for a sum of {dtype}; "
                         f"give both in {' or both in '.join(map(str, allowed))}")
    if x.shape != residual.shape or x.dtype != residual.dtype:
        return None
    return fused_passes(x, residual, gain, shift, *(() if bias is None else (bias,)))


def check_invertible(name: str, gain: Tensor) -> None:
    """Raise UsageError where an invertible norm's `gain`, the parameter `name`, has an element near 0."""
    smallest, place = gain.detach().abs().min(0)
    if not smallest >= SMALLEST_GAIN:
        raise UsageError(f"normalize_invertible: {name}[{int(place)}] is {float(gain.detach()[place]):.3g}: backward would "
                         f"divide by it, and gains must be {SMALLEST_GAIN} or more in magnitude; set "
                         f"normalize_invertible to false for this layer")


def gelu_linear(u: Tensor, weight: Tensor, bias: Tensor | None, *, approximate: Gelu, products: Products,
                inner_bias: Tensor | None = None) -> Tensor:
    """Return gelu(u + inner_bias) W^T + b, and save `u` alone; under autocast all are in its dtype."""
    u, weight, bias = in_autocast_dtype(u, weight, bias)
    if in_function_transform() or in_trace():
        return F.linear(_plain_gelu(u, inner_bias, approximate=approximate), weight, bias)
    return cast(Tensor, _GeluLinear.apply(u, weight, bias, approximate, products, inner_bias))


class _DropoutAdd(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, residual: Tensor, dropout: float, seed: int) -> Tensor:
        ctx.dropout, ctx.seed = dropout, seed
        return drop(x, residual, dropout, seed)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor, None, None]:
        return _dropped(gradient, ctx.dropout, ctx.seed) if ctx.needs_input_grad[0] else None, gradient, None, None


class _Drop(torch.autograd.Function):
    """Dropout by itself, which is its own transpose."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dropout: float, seed: int) -> Tensor:
        ctx.dropout, ctx.seed = dropout, seed
        return drop(x, None, dropout, seed)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return _dropped(gradient, ctx.dropout, ctx.seed), None, None


def _dropped(x: Tensor, dropout: float, seed: int) -> Tensor:
    """Return dropout(x), which autograd differentiates where it records."""
    if torch.is_grad_enabled():
        return cast(Tensor, _Drop.apply(x, dropout, seed))
    return drop(x, None, dropout, seed)


class _InvertibleNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, h: Tensor, gain: Tensor, shift: Tensor, eps: float) -> Tensor:
        y, _, rate = torch.native_layer_norm(h, gain.shape, gain, shift, eps)
        ctx.save_for_backward(y, rate, gain, shift)
        return y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        check_first_derivative(*_INVERTIBLE)
        y, rate, gain, shift = ctx.saved_tensors
        centred = (y - shift).div_(gain).div_(rate)  # h - mean
        of_h, of_gain, of_shift = torch.ops.aten.native_layer_norm_backward(
            gradient.contiguous(), centred, gain.shape, torch.zeros_like(rate), rate, gain, shift, [True, True, True])
        return of_h, of_gain, of_shift, None


class _DropoutAddNorm(torch.autograd.Function):
    """The sum (None if it is not kept) and its norm, where a fused pass computes them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor | None, residual: Tensor, gain: Tensor, shift: Tensor, eps: float,
                dropout: DropMask, invertible: bool, keep_sum: bool, passes: Any) -> tuple[Tensor | None, Tensor]:
        h, y, means, rates = passes.dropout_add_norm(
            _rows(x), None if bias is None else bias.contiguous(), _rows(residual), gain.contiguous(), shift.contiguous(),
            eps=eps, dropout=dropout, keep_sum=keep_sum or not invertible)
        h, y = None if h is None else _shaped(h, x), _shaped(y, x)
        ctx.save_for_backward(y if invertible else h, None if invertible else means, rates, gain, shift)
        ctx.dropout, ctx.passes, ctx.eps, ctx.invertible = dropout, passes, eps, invertible
        ctx.set_materialize_grads(False)
        return h, y  # what is saved is an output, so that a second derivative leads through it

    @staticmethod
    def backward(ctx: Any, of_h: Tensor | None, of_y: Tensor | None) -> tuple[Tensor | None, ...]:
        held, means, rates, gain, shift = ctx.saved_tensors
        if torch.is_grad_enabled():
            return _DropoutAddNorm._recorded(ctx, of_h, of_y)
        shape, held = held.shape, _rows(held)
        of_y = torch.zeros_like(held) if of_y is None else _rows(of_y)
        of_x, of_residual, partial = ctx.passes.dropout_add_norm_backward(
            of_y, None if of_h is None else _rows(of_h), held, means, rates, gain.contiguous(), shift.contiguous(),
            ctx.dropout)
        of_gain, of_shift, of_bias = partial.to(gain.dtype)
        of_sum = of_residual.view(shape)  # without dropout one tensor for both: autograd copies what it gives to two leaves
        return (of_sum if of_x is of_residual else of_x.view(shape), of_bias if ctx.needs_input_grad[1] else None, of_sum,
                of_gain, of_shift, None, None, None, None, None)


    @staticmethod
    def _recorded(ctx: Any, of_h: Tensor | None, of_y: Tensor | None) -> tuple[Tensor | None, ...]:
        """Return the gradients with a graph of their own."""
        if ctx.invertible:
            check_first_derivative(*_INVERTIBLE)
        h, _, _, gain, shift = ctx.saved_tensors
        of_gain = of_shift = None
        of_sum = of_h
        if of_y is not None:
            def norm(h: Tensor, gain: Tensor, shift: Tensor) -> Tensor:
                return F.layer_norm(h, gain.shape, gain, shift, ctx.eps)

            through, of_gain, of_shift = differentiable_gradients(norm, (h, gain, shift), of_y)
            of_sum = through if of_h is None or through is None else through + of_h
        if of_sum is None:
            return (None,) * 10
        dropout: DropMask = ctx.dropout
        of_x = _dropped(of_sum, dropout.threshold / 2**32, dropout.seed) if dropout.threshold else of_sum
        of_bias = of_x.flatten(0, -2).sum(0) if ctx.needs_input_grad[1] else None
        return of_x, of_bias, of_sum, of_gain, of_shift, None, None, None, None, None


class _BiasGelu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, u: Tensor, bias: Tensor, approximate: Gelu) -> Tensor:
        ctx.save_for_backward(u, bias)
        ctx.approximate = approximate
        return _gelu(u, bias, approximate)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        u, bias = ctx.saved_tensors
        if torch.is_grad_enabled():
            return *differentiable_gradients(partial(_plain_gelu, approximate=ctx.approximate), (u, bias), gradient), None
        return *_gelu_backward(gradient, u, bias, ctx.approximate), None


class _GeluLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, u: Tensor, weight: Tensor, bias: Tensor | None, approximate: Gelu, products: Products,
                inner_bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(u, weight, inner_bias)
        ctx.approximate, ctx.products = approximate, products
        return products.linear(_gelu(u, inner_bias, approximate), weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        u, weight, inner_bias = ctx.saved_tensors
        if torch.is_grad_enabled():
            def product(u: Tensor, weight: Tensor, inner_bias: Tensor | None) -> Tensor:
                return F.linear(_plain_gelu(u, inner_bias, approximate=ctx.approximate), weight)

            of_u, of_weight, of_inner = differentiable_gradients(product, (u, weight, inner_bias), gradient)
            of_bias = gradient.reshape(-1, gradient.shape[-1]).sum(0) if ctx.needs_input_grad[2] else None
            return of_u, of_weight, of_bias, None, None, of_inner
        of_weight = of_bias = None
        if ctx.needs_input_grad[1]:
            of_weight = ctx.products.gradient_of_weight(gradient, _gelu(u, inner_bias, ctx.approximate))
        if ctx.needs_input_grad[2]:
            of_bias = gradient.reshape(-1, gradient.shape[-1]).sum(0)
        of_gelu = ctx.products.gradient_of_input(gradient, weight)
        of_u, of_inner = _gelu_backward(of_gelu, u, inner_bias, ctx.approximate)
        return of_u, of_weight, of_bias, None, None, of_inner


def _plain_gelu(u: Tensor, bias: Tensor | None, *, approximate: Gelu) -> Tensor:
    return F.gelu(u if bias is None else u + bias, approximate=approximate)


def _gelu(u: Tensor, bias: Tensor | None, approximate: Gelu) -> Tensor:
    if bias is None:
        return F.gelu(u, approximate=approximate)
    if (passes := fused_passes(u, bias)) is None:
        return F.gelu(u + bias, approximate=approximate)
    return _shaped(passes.bias_gelu(_rows(u), bias.contiguous(), tanh=approximate == "tanh"), u)


def _gelu_backward(gradient: Tensor, u: Tensor, bias: Tensor | None, approximate: Gelu) -> tuple[Tensor, Tensor | None]:
    """Return the gradients of u and bias."""
    if bias is None:
        return torch.ops.aten.gelu_backward(gradient, u, approximate=approximate), None
    if (passes := fused_passes(u, bias, gradient)) is None:
        of_u = torch.ops.aten.gelu_backward(gradient, u + bias, approximate=approximate)
        return of_u, of_u.flatten(0, -2).sum(0, dtype=wide_dtype(of_u.dtype)).to(bias.dtype)
    of_u, of_bias = passes.bias_gelu_backward(_rows(gradient), _rows(u), bias.contiguous(), tanh=approximate == "tanh")
    return of_u.view(u.shape), of_bias.to(bias.dtype)


def _dropout(share: float, seed: int) -> DropMask:
    return DropMask(seed, threshold(share), 1 / (1 - share)) if share else NO_DROPOUT


def _shaped(rows: Tensor, like: Tensor) -> Tensor:
    """Return a new matrix in the shape of `like`, and no view: a script may write to the output of a pass in place."""
    return torch.ops.aten._unsafe_view.default(rows, like.shape)


def _rows(tensor: Tensor) -> Tensor:
    """Return the tensor as a matrix (rows, columns) whose memory holds its values."""
    return tensor.reshape(-1, tensor.shape[-1]).contiguous().resolve_neg()
