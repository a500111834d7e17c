"""Packing on a GPU, a program for each block, one pass over memory.

The bits are those of the other ways: every addition of the sum is over an axis of two, where there is only one order, the
division is the correctly rounded one, and no product is fused with an addition. This file is imported only where there is
Triton. With `TRITON_INTERPRET=1` Triton runs it on the host, where its rounding to bf16 is not a GPU's.
"""

# Triton's own names have no types that could be checked, and it is not on every machine where this is.
# pyright: basic, reportMissingImports=false, reportIndexIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from shoal.onebit.layout import BLOCK, blocks, parts

__all__ = ["difference", "pack", "unpack"]

_HALVINGS = BLOCK.bit_length() - 1


def pack(values: Tensor, packed: Tensor) -> None:
    """Write signs and scales of `values` to `packed`, and leave in `values` the rest."""
    _encode(packed, values, values, rest=True)


def difference(master: Tensor, weight: Tensor, packed: Tensor) -> None:
    """Write signs and scales of `master - weight` to `packed`."""
    _encode(packed, master, weight, rest=False)


def unpack(packed: Tensor, target: Tensor, *, factor: float, accumulate: bool) -> None:
    """Write, or add, `factor` times what was packed to `target`."""
    elements = target.numel()
    found = parts(packed, elements)
    if elements:
        with torch.cuda.device_of(target):
            _unpack[(blocks(elements),)](found.scales, found.signs, target, elements, factor, accumulate, BLOCK,
                                         enable_fp_fusion=False)


def _encode(packed: Tensor, left: Tensor, right: Tensor, *, rest: bool) -> None:
    elements = left.numel()
    found = parts(packed, elements)
    found.padding.zero_()
    if elements:
        with torch.cuda.device_of(left):
            _pack[(blocks(elements),)](left, right, found.scales.view(torch.int32), found.signs, elements, rest, BLOCK,
                                       _HALVINGS, enable_fp_fusion=False)


@triton.jit
def _pack(left, right, scales, signs, elements, REST: tl.constexpr, BLOCK: tl.constexpr, HALVINGS: tl.constexpr):
    """Pack a block of `left`, which keeps the rest (REST), or of `left - right`."""
    start = tl.program_id(0).to(tl.int64) * BLOCK
    places = start + tl.arange(0, BLOCK)
    there = places < elements
    whole = tl.load(left + places, mask=there, other=0.0).to(tl.float32)
    if not REST:
        whole -= tl.load(right + places, mask=there, other=0.0).to(tl.float32)

    sums = tl.abs(whole)
    for halving in tl.static_range(HALVINGS - 1):
        sums = tl.sum(tl.reshape(sums, (2, BLOCK >> (halving + 1))), axis=0)
    total = tl.sum(sums, axis=0)
    finite = total < float("inf")
    scale = tl.div_rn(total, tl.minimum(elements - start, BLOCK).to(tl.float32))
    tl.store(scales + start // BLOCK, tl.where(finite, scale.to(tl.int32, bitcast=True), 0x7FC00000))  # the bits of NaN

    bits = tl.reshape((whole >= 0).to(tl.int32), (BLOCK // 8, 8)) << tl.arange(0, 8)[None, :]
    octets = start // 8 + tl.arange(0, BLOCK // 8)
    tl.store(signs + octets, tl.sum(bits, axis=1).to(tl.uint8), mask=octets < elements // 8)
    if REST:
        rest = tl.where(finite, whole - tl.where(whole >= 0, scale, -scale), 0.0)
        tl.store(left + places, rest.to(left.dtype.element_ty), mask=there)


@triton.jit
def _unpack(scales, signs, target, elements, factor, ACCUMULATE: tl.constexpr, BLOCK: tl.constexpr):
    """Write, or add (ACCUMULATE), `factor` times what a block says."""
    start = tl.program_id(0).to(tl.int64) * BLOCK
    places = start + tl.arange(0, BLOCK)
    there = places < elements
    step = tl.load(scales + start // BLOCK) * factor
    octets = tl.load(signs + places // 8, mask=there, other=0).to(tl.int32)
    sent = tl.where((octets >> (places % 8).to(tl.int32)) & 1 != 0, step, -step)
    if ACCUMULATE:
        sent = tl.load(target + places, mask=there, other=0.0).to(tl.float32) + sent
    tl.store(target + places, sent.to(target.dtype.element_ty), mask=there)
