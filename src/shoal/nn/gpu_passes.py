"""On an accelerator Triton computes the passes of layers where it compiles and agrees with torch; elsewhere torch does.

Triton is asked once for each device, by a small call of every pass. A machine on which it fails warns once, and trains on.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from shoal.attention.dropout import drop_rows, threshold
from shoal.autograd import isolated, needs_operators
from shoal.device import has_triton
from shoal.log import warn_once
from shoal.native.layers import DropMask

__all__ = ["compared", "triton_passes"]

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_CLOSE = 1e-4


def triton_passes(*tensors: Tensor, tiled: bool = False) -> Any:
    """Return the module of Triton's passes where it serves `tensors`, all on one accelerator; else None.

    A `tiled` pass takes rows of any width.
    """
    first = tensors[0]
    if not has_triton(first.device) or needs_operators(*tensors) or find_spec("triton") is None:
        return None
    if any(each.device != first.device or each.dtype not in _FLOATS for each in tensors) or not first.numel():
        return None
    module = import_module("shoal.nn.triton_passes")  # importing Triton takes a second
    return module if (tiled or first.shape[-1] <= module.WIDEST) and _agrees(first.device) else None


@cache
def _agrees(device: torch.device) -> bool:
    try:
        largest = float(torch.tensor([*compared(device).values()], dtype=torch.float32, device="cpu").max())
    except Exception as error:  # a compiler fails in many ways
        warn_once(f"layers on {device} are computed by torch operations: Triton's kernels failed: {error}")
        return False
    if not largest < _CLOSE:
        warn_once(f"layers on {device} are computed by torch operations: Triton's kernels differ from them by {largest:g}")
    return largest < _CLOSE


def compared(device: torch.device) -> dict[str, float]:
    """Return by how much each of Triton's passes on `device` differs from torch, by one small call."""
    passes: Any = import_module("shoal.nn.triton_passes")
    with isolated(device), torch.no_grad():
        generator = torch.Generator().manual_seed(0)
        x, y, g = torch.randn(3, 10, 24, generator=generator, dtype=torch.float32, device="cpu").unbind()
        gain, bias = torch.randn(2, 24, generator=generator, dtype=torch.float32, device="cpu").unbind()
        angles = torch.randn(5, 12, generator=generator, dtype=torch.float32, device="cpu")
        targets = torch.arange(10, device="cpu") * 2
        there = [each.to(device) for each in (x, y, g, gain, bias, angles.cos(), angles.sin())]
        expected = _expected(x, y, g, gain, bias, angles, targets)
        at, bt, gt, gaint, biast, cosines, sines = there
        normed, roots = passes.rms_norm(at, gaint, 1e-6)
        half = DropMask(7, threshold(0.5), 2.0)
        h, z, means, rates = passes.dropout_add_norm(at, biast, bt, gaint, biast, eps=1e-6, dropout=half, keep_sum=True)
        of_logits = at.clone()
        losses, _ = passes.cross_entropy(of_logits, targets.to(device), gt[:, 0].contiguous(), smoothing=0.1, z_loss=0.1)
        found = {
            "rms_norm": (normed, *passes.rms_norm_backward(gt, at, gaint, roots)),
            "swiglu": (passes.swiglu(at, bt), *passes.swiglu_backward(gt, at, bt)),
            "rotary": (passes.rotary(at, cosines, sines, back=False), passes.rotary(gt, cosines, sines, back=True)),
            "dropout_add": (passes.dropout_add(at, bt, half),),
            "dropout_add_norm": (h, z, *passes.dropout_add_norm_backward(gt, bt, h, means, rates, gaint, biast, half)),
            "bias_gelu": (passes.bias_gelu(at, biast, tanh=False), *passes.bias_gelu_backward(gt, at, biast, tanh=False)),
            "cross_entropy": (losses, of_logits)}
        pairs = {name: zip(results, expected[name], strict=True) for name, results in found.items()}
        apart = {name: [(got.float().cpu() - wanted).abs().max() for got, wanted in each] for name, each in pairs.items()}
        return {name: float(torch.stack(each).max()) for name, each in apart.items()}  # torch's max keeps NaN


def _expected(x: Tensor, y: Tensor, g: Tensor, gain: Tensor, bias: Tensor, angles: Tensor,
              targets: Tensor) -> dict[str, tuple[Tensor, ...]]:
    """Return the same by torch, on the host."""
    functional = torch.nn.functional
    with torch.enable_grad():
        a, b, c, d, e = (each.clone().requires_grad_() for each in (x, y, gain, bias, bias))
        kept = drop_rows(torch.ones_like(x), None, 0.5, 7)
        h = (a + d) * kept + b
        z = functional.layer_norm(h, (24,), c, e, 1e-6)
        of_a, of_b, *of_others = torch.autograd.grad((z, h), (a, b, c, e, d), (g, y))
        gelu = functional.gelu(a + d)
        of_gelu = torch.autograd.grad(gelu, (a, d), g)
        losses = functional.cross_entropy(a, targets, label_smoothing=0.1, reduction="none") + 0.1 * a.logsumexp(-1).square()
        (of_logits,) = torch.autograd.grad(losses, a, g[:, 0])
        normed = functional.rms_norm(a, (24,), c, 1e-6)
        of_norm = torch.autograd.grad(normed, (a, c), g)
        gated = functional.silu(a) * b
        of_gate = torch.autograd.grad(gated, (a, b), g)
    cosines, sines = (each.repeat(2, 1) for each in (angles.cos(), angles.sin()))
    turned = [torch.cat([low * cosines - sign * high * sines, high * cosines + sign * low * sines], -1)
              for (low, high), sign in ((x.chunk(2, -1), 1), (g.chunk(2, -1), -1))]
    return {"rms_norm": (normed.detach(), *of_norm), "swiglu": (gated.detach(), *of_gate), "rotary": tuple(turned),
            "dropout_add": (drop_rows(x, y, 0.5, 7),),
            "dropout_add_norm": (h.detach(), z.detach(), of_a, of_b, torch.stack(of_others)),
            "bias_gelu": (gelu.detach(), *of_gelu), "cross_entropy": (losses.detach(), of_logits)}
