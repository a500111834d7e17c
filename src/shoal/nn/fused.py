"""RMSNorm, SwiGLU and rotary embedding as one autograd node each, which saves only its operands.

    rms_norm(x)        x gain / sqrt(mean(x^2) + eps)                       saves x, and one number a row
    swiglu(g, u)       silu(g) u                                            saves g and u
    rotary(x)          pairs (i, i + dim / 2) turned by their angle         saves the angles

fp32 in host memory is computed natively (layers.cpp); on an accelerator Triton computes where it serves, and torch all
else, also where others follow its operators (`needs_operators`). Zhang and Sennrich 2019 (arXiv 1910.07467); Shazeer 2020
(arXiv 2002.05202); Su et al. 2021 (arXiv 2104.09864), in the pairing of Hugging Face's Llama.
"""

# pyright: reportIncompatibleMethodOverride=false

from __future__ import annotations

from functools import partial
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from shoal.autograd import differentiable_gradients, needs_operators
from shoal.errors import UsageError
from shoal.native import layers as native
from shoal.nn.gpu_passes import triton_passes
from shoal.transport.reduction import wide_dtype

__all__ = ["rms_norm", "rotary", "swiglu"]


def rms_norm(x: Tensor, gain: Tensor, eps: float = 1e-6) -> Tensor:
    """Return `x` (..., columns) over its root mean square, times `gain` (columns,).

    Computed in fp32, of fp64 in fp64. Raises UsageError for shapes that do not fit, and integers.
    """
    if x.dim() == 0 or gain.shape != x.shape[-1:]:
        raise UsageError(f"rms_norm: got x {tuple(x.shape)} and a gain {tuple(gain.shape)}; x is (..., columns), and the "
                         f"gain is {tuple(x.shape[-1:]) or '(columns,)'}")
    _check_floating("rms_norm", x, gain)
    if needs_operators(x, gain):
        return _plain_rms_norm(x, gain, eps=eps)
    return cast(Tensor, _RmsNorm.apply(x, gain, eps))


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Return silu(gate) * up, of one shape, in the wider dtype. Raises UsageError for two shapes, and integers."""
    if gate.shape != up.shape:
        raise UsageError(f"swiglu: got a gate {tuple(gate.shape)} and {tuple(up.shape)}; both have one shape")
    _check_floating("swiglu", gate, up)
    if needs_operators(gate, up):
        return _plain_swiglu(gate, up)
    dtype = torch.promote_types(gate.dtype, up.dtype)
    return cast(Tensor, _SwiGlu.apply(gate.to(dtype), up.to(dtype)))


def rotary(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Return `x` (..., length, dim) with pairs (i, i + dim / 2) turned by the angles of their position.

    `cosines` and `sines` of the angles are (length, dim / 2). Where they are to have gradients, torch computes.
    """
    wanted = (*x.shape[-2:-1], x.shape[-1] // 2) if x.dim() > 1 else None
    if cosines.shape != wanted or sines.shape != wanted or x.shape[-1] % 2:
        raise UsageError(f"rotary: got x {tuple(x.shape)}, cosines {tuple(cosines.shape)} and sines {tuple(sines.shape)}; "
                         f"they are (..., length, dim), and (length, dim / 2)")
    if needs_operators(x, cosines, sines) or (torch.is_grad_enabled() and (cosines.requires_grad or sines.requires_grad)):
        return _plain_turn(x, cosines, sines)
    return cast(Tensor, _Rotary.apply(x, cosines, sines))


def _check_floating(name: str, *tensors: Tensor) -> None:
    for tensor in tensors:
        if not tensor.is_floating_point():
            raise UsageError(f"{name}: got {tuple(tensor.shape)} of {tensor.dtype}; give a floating-point dtype")


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, gain: Tensor, eps: float) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        if _native(x, gain):
            output, rates = native.rms_norm(rows.contiguous(), gain.contiguous(), eps)
        elif (passes := triton_passes(rows, gain)) is not None:
            output, rates = passes.rms_norm(rows.contiguous(), gain.contiguous(), eps)
        else:
            wide = rows.to(wide_dtype(x.dtype))
            rates = wide.square().mean(-1).add_(eps).rsqrt_()
            output = (wide * rates[:, None]).mul_(gain).to(x.dtype)
        ctx.save_for_backward(x, gain, rates)
        ctx.eps = eps
        return output.view(x.shape)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, gain, rates = ctx.saved_tensors
        if torch.is_grad_enabled():
            of_x, of_gain = differentiable_gradients(partial(_plain_rms_norm, eps=ctx.eps), (x, gain), gradient)
            return of_x, of_gain, None
        rows, flat = x.reshape(-1, x.shape[-1]), _rows(gradient)
        if _native(x, gain) and gradient.dtype == torch.float32:
            of_x, of_gain = native.rms_norm_backward(flat, rows.contiguous(), gain.contiguous(), rates)
        elif (passes := triton_passes(rows, gain, flat)) is not None:
            of_x, of_gain = passes.rms_norm_backward(flat, rows.contiguous(), gain.contiguous(), rates)
        else:
            unit = rows.to(rates.dtype) * rates[:, None]
            scaled = flat.to(rates.dtype) * gain
            of_x = (scaled - unit * (scaled * unit).mean(-1, keepdim=True)).mul_(rates[:, None])
            of_gain = (flat.to(rates.dtype) * unit).sum(0)
        return of_x.view(x.shape).to(x.dtype), of_gain.to(gain.dtype), None


class _SwiGlu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        if _native(gate, up):
            return native.swiglu(gate.contiguous(), up.contiguous())
        if (passes := triton_passes(gate, up)) is not None:
            return passes.swiglu(*(_rows(each) for each in (gate, up))).view(gate.shape)
        return F.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None]:
        gate, up = ctx.saved_tensors
        if torch.is_grad_enabled():
            of_gate, of_up = differentiable_gradients(_plain_swiglu, (gate, up), gradient)
            return of_gate, of_up
        if _native(gate, up, gradient):
            return native.swiglu_backward(gradient.contiguous(), gate.contiguous(), up.contiguous())
        if (passes := triton_passes(gate, up, gradient)) is not None:
            of_gate, of_up = passes.swiglu_backward(*(_rows(each) for each in (gradient, gate, up)))
            return of_gate.view(gate.shape), of_up.view(up.shape)
        return torch.ops.aten.silu_backward(gradient * up, gate), F.silu(gate).mul_(gradient)


class _Rotary(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
        ctx.save_for_backward(cosines, sines)
        return _turn(x, cosines, sines, back=False)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        cosines, sines = ctx.saved_tensors
        if torch.is_grad_enabled():  # the transpose of a turn is the turn back
            return cast(Tensor, _Rotary.apply(gradient, cosines, -sines)), None, None
        return _turn(gradient, cosines, sines, back=True), None, None


def _plain_swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


def _plain_rms_norm(x: Tensor, gain: Tensor, *, eps: float) -> Tensor:
    wide = x.to(wide_dtype(x.dtype))
    return (wide * (wide.square().mean(-1, keepdim=True) + eps).rsqrt() * gain).to(x.dtype)


def _turn(x: Tensor, cosines: Tensor, sines: Tensor, *, back: bool) -> Tensor:
    if _native(x, cosines, sines):
        rows = x.reshape(-1, x.shape[-1]).contiguous()
        return native.rotary(rows, cosines.contiguous(), sines.contiguous(), back=back).view(x.shape)
    if (passes := triton_passes(x, cosines, sines)) is not None:
        return passes.rotary(_rows(x), cosines.contiguous(), sines.contiguous(), back=back).view(x.shape)
    return _plain_turn(x, cosines, -sines if back else sines)


def _plain_turn(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    low, high = x.chunk(2, -1)
    return torch.cat([low * cosines - high * sines, high * cosines + low * sines], -1).to(x.dtype)


def _rows(tensor: Tensor) -> Tensor:
    """Return the tensor as a matrix (rows, columns) whose memory holds its values."""
    return tensor.reshape(-1, tensor.shape[-1]).contiguous().resolve_neg()


def _native(*tensors: Tensor) -> bool:
    return (native.available() and not needs_operators(*tensors)
            and all(each.dtype == torch.float32 and each.device.type == "cpu" for each in tensors))
