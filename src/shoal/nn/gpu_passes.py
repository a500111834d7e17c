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
from shoal.device import has_triton
from shoal.log import warn_once

__all__ = ["compared", "triton_passes"]

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_CLOSE = 1e-4


def triton_passes(*tensors: Tensor) -> Any:
    """Return the module of Triton's passes where it serves `tensors`, all on one accelerator; else None."""
    first = tensors[0]
    if not has_triton(first.device) or torch.compiler.is_compiling() or find_spec("triton") is None:
        return None
    if any(each.device != first.device or each.dtype not in _FLOATS for each in tensors) or not first.numel():
        return None
    module = import_module("shoal.nn.triton_passes")  # importing Triton takes a second
    return module if first.shape[-1] <= module.WIDEST and _agrees(first.device) else None


@cache
def _agrees(device: torch.device) -> bool:
    try:
        largest = float(torch.tensor([*compared(device).values()]).max())
    except Exception as error:  # a compiler fails in many ways
        warn_once(f"layers on {device} are computed by torch operations: Triton's kernels failed: {error}")
        return False
    if not largest < _CLOSE:
        warn_once(f"layers on {device} are computed by torch operations: Triton's kernels differ from them by {largest:g}")
    return largest < _CLOSE


@torch.no_grad()
def compared(device: torch.device) -> dict[str, float]:
    """Return by how much each of Triton's passes on `device` differs from torch, by one small call."""
    passes: Any = import_module("shoal.nn.triton_passes")
    with torch.inference_mode(False):
        generator = torch.Generator().manual_seed(0)
        x, y, g = torch.randn(3, 10, 24, generator=generator).unbind()
        gain, angles = torch.randn(24, generator=generator), torch.randn(5, 12, generator=generator)
        there = [each.to(device) for each in (x, y, g, gain, angles.cos(), angles.sin())]
        expected = _expected(x, y, g, gain, angles)
        at, bt, gt, gaint, cosines, sines = there
        normed, rates = passes.rms_norm(at, gaint, 1e-6)
        found = {
            "rms_norm": (normed, *passes.rms_norm_backward(gt, at, gaint, rates)),
            "swiglu": (passes.swiglu(at, bt), *passes.swiglu_backward(gt, at, bt)),
            "rotary": (passes.rotary(at, cosines, sines, back=False), passes.rotary(gt, cosines, sines, back=True)),
            "dropout_add": (passes.dropout_add(at, bt, seed=7, threshold=threshold(0.5), kept=2.0),)}
    apart = {name: [(got.float().cpu() - wanted).abs().max() for got, wanted in zip(results, expected[name], strict=True)]
             for name, results in found.items()}
    return {name: float(torch.stack(each).max()) for name, each in apart.items()}  # torch's max keeps NaN


def _expected(x: Tensor, y: Tensor, g: Tensor, gain: Tensor, angles: Tensor) -> dict[str, tuple[Tensor, ...]]:
    """Return the same by torch, on the host."""
    with torch.enable_grad():
        a, b, c = (each.clone().requires_grad_() for each in (x, y, gain))
        normed = torch.nn.functional.rms_norm(a, (24,), c, 1e-6)
        of_norm = torch.autograd.grad(normed, (a, c), g)
        gated = torch.nn.functional.silu(a) * b
        of_gate = torch.autograd.grad(gated, (a, b), g)
    cosines, sines = (each.repeat(2, 1) for each in (angles.cos(), angles.sin()))
    turned = [torch.cat([low * cosines - sign * high * sines, high * cosines + sign * low * sines], -1)
              for (low, high), sign in ((x.chunk(2, -1), 1), (g.chunk(2, -1), -1))]
    return {"rms_norm": (normed.detach(), *of_norm), "swiglu": (gated.detach(), *of_gate), "rotary": tuple(turned),
            "dropout_add": (drop_rows(x, y, 0.5, 7),)}
