"""Triton kernels for packing on a GPU: one program a block, one pass over memory.

The bits are those of the reference: each reduction runs over an axis of size two, where only one order exists, the division
is correctly rounded, and no product is fused with an addition. This file is imported only where Triton is installed. With
`TRITON_INTERPRET=1` Triton runs it on the host, where it rounds to bf16 differently than a GPU does.
"""

# Triton is untyped, and not installed on every machine that checks types.
# pyright: basic, reportMissingImports=false, reportIndexIssue=false, reportGeneralTypeIssues=false
# pyright: reportOperatorIssue=false, reportCallIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from shoal.device import selected
from shoal.onebit.reference import BLOCK, blocks, views

__all__ = ["difference", "pack", "unpack"]

_HALVINGS = BLOCK.bit_length() - 1


def pack(values: Tensor, packed: Tensor) -> None:
    """Write signs and scales of `values` to `packed`, and replace `values` by the residual."""
    _encode(packed, values, values, residual=True)


def difference(master: Tensor, weight: Tensor, packed: Tensor) -> None:
    """Write signs and scales of `master - weight` to `packed`."""
    _encode(packed, master, weight, residual=False)


def unpack(packed: Tensor, target: Tensor, *, factor: float, accumulate: bool) -> None:
    """Write `factor` times the decoded vector to `target`, or add it."""
    elements = target.numel()
    source = views(packed, elements)
    if elements:
        with selected(target.device):
            _unpack[(blocks(elements),)](source.scales, source.signs, target, elements, factor, accumulate, BLOCK,
                                         enable_fp_fusion=False)


def _encode(packed: Tensor, left: Tensor, right: Tensor, *, residual: bool) -> None:
    elements = left.numel()
    target = views(packed, elements)
    target.padding.zero_()
    if elements:
        with selected(left.device):
            _pack[(blocks(elements),)](left, right, target.scales.view(torch.int32), target.signs, elements, residual, BLOCK,
                                       _HALVINGS, enable_fp_fusion=False)


@triton.jit
def _pack(left, right, scales, signs, elements, RESIDUAL: tl.constexpr, BLOCK: tl.constexpr, HALVINGS: tl.constexpr):
    """Pack a block of `left`, replaced by the residual (RESIDUAL), or of `left - right`."""
    start = tl.program_id(0).to(tl.int64) * BLOCK
    offsets = start + tl.arange(0, BLOCK)
    mask = offsets < elements
    values = tl.load(left + offsets, mask=mask, other=0.0).to(tl.float32)
    if not RESIDUAL:
        values -= tl.load(right + offsets, mask=mask, other=0.0).to(tl.float32)

    sums = tl.abs(values)
    for halving in tl.static_range(HALVINGS - 1):
        sums = tl.sum(tl.reshape(sums, (2, BLOCK >> (halving + 1))), axis=0)
    total = tl.sum(sums, axis=0)
    finite = total < float("inf")
    scale = tl.div_rn(total, tl.minimum(elements - start, BLOCK).to(tl.float32))
    tl.store(scales + start // BLOCK, tl.where(finite, scale.to(tl.int32, bitcast=True), 0x7FC00000))  # the bits of NaN

    bits = tl.reshape((values >= 0).to(tl.int32), (BLOCK // 8, 8)) << tl.arange(0, 8)[None, :]
    byte_offsets = start // 8 + tl.arange(0, BLOCK // 8)
    tl.store(signs + byte_offsets, tl.sum(bits, axis=1).to(tl.uint8), mask=byte_offsets < elements // 8)
    if RESIDUAL:
        residual = tl.where(finite, values - tl.where(values >= 0, scale, -scale), 0.0)
        tl.store(left + offsets, residual.to(left.dtype.element_ty), mask=mask)


@triton.jit
def _unpack(scales, signs, target, elements, factor, ACCUMULATE: tl.constexpr, BLOCK: tl.constexpr):
    """Write `factor` times a decoded block, or add it (ACCUMULATE)."""
    start = tl.program_id(0).to(tl.int64) * BLOCK
    offsets = start + tl.arange(0, BLOCK)
    mask = offsets < elements
    step = tl.load(scales + start // BLOCK) * factor
    sign_bytes = tl.load(signs + offsets // 8, mask=mask, other=0).to(tl.int32)
    decoded = tl.where((sign_bytes >> (offsets % 8).to(tl.int32)) & 1 != 0, step, -step)
    if ACCUMULATE:
        decoded = tl.load(target + offsets, mask=mask, other=0.0).to(tl.float32) + decoded
    tl.store(target + offsets, decoded.to(target.dtype.element_ty), mask=mask)
