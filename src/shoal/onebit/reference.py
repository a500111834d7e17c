"""The packed format: one sign bit an element, one fp32 scale a block; and its reference implementation in torch.

    bytes   0          4 blocks                  + elements / 8      to a multiple of 16
            | scales     | signs                   | zeros |
            | fp32, one  | one bit an element:     |
            | a block    | bit i % 8 of byte i / 8 |

A block is BLOCK elements; the last one may be shorter. The host's byte order is used, little-endian wherever torch runs.

The scale of a block of n elements is their mean magnitude. It is the scale s that brings s sign(x) nearest to x:

    |x - s sign(x)|^2 = |x|_2^2 - 2 s |x|_1 + n s^2       is least where      s = |x|_1 / n,

and its value there is |x|_2^2 - |x|_1^2 / n: a contraction of |x|_2^2 by 1 - |x|_1^2 / (n |x|_2^2). That factor is below 1
unless x = 0, which is all that error feedback requires (Karimireddy et al. 2019, arXiv 1901.09847, section 4).

The order of the sum is part of the format, so that every implementation gives the same bits: the block, padded with zeros to
BLOCK, is folded in the middle and its halves are added, until one number is left. (No order has a smaller error: every path
has 11 roundings.)
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["ALIGNMENT", "BLOCK", "GRAIN", "PackedViews", "blocks", "difference", "is_finite", "pack", "packed_bytes",
           "unpack", "views"]

BLOCK = 2048
"""Elements that share a scale: 256 bytes of signs to 4 of scale, 1.016 bits an element; 8 KiB of fp32, which stay in L1."""

GRAIN = 16
"""The length of a packed vector is a multiple of this, so that signs fill whole bytes and no SIMD loop has a tail."""

ALIGNMENT = 16
"""The size of a packed vector in bytes is a multiple of this: concatenated vectors then have aligned scales."""

_CHUNK = 512 * BLOCK
"""Elements computed at once: temporaries stay small beside the vector."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedViews:
    """Views of a packed vector: `scales` (blocks,) fp32, `signs` (elements / 8,) uint8, `padding` uint8."""

    scales: Tensor
    signs: Tensor
    padding: Tensor


def blocks(elements: int) -> int:
    """Return the number of blocks, the last one counted even if it is shorter."""
    return -(-elements // BLOCK)


def packed_bytes(elements: int) -> int:
    """Return the bytes of a packed vector of `elements`, a multiple of GRAIN."""
    assert elements % GRAIN == 0, f"{elements} elements are no multiple of {GRAIN}"
    return -(-(4 * blocks(elements) + elements // 8) // ALIGNMENT) * ALIGNMENT


def views(packed: Tensor, elements: int) -> PackedViews:
    """Return the views of `packed` (packed_bytes(elements),) uint8."""
    head, bits = 4 * blocks(elements), elements // 8
    return PackedViews(scales=packed[:head].view(torch.float32), signs=packed[head : head + bits],
                       padding=packed[head + bits :])


def is_finite(packed: Tensor, elements: int) -> bool:
    """Return whether no block of the vector held an Inf or NaN; reads the scales alone (and waits for a device)."""
    return bool(torch.isfinite(views(packed, elements).scales).all())


@dataclass(frozen=True, slots=True, kw_only=True)
class _Encoded:
    """`scales` (blocks,), NaN where a block is not finite, and `signs` (blocks, BLOCK) bool, True for elements >= 0."""

    scales: Tensor
    signs: Tensor

    def decoded(self, factor: Tensor | None = None) -> Tensor:
        """Return `factor` (default 1) * scale * sign, (blocks, BLOCK)."""
        scales = (self.scales if factor is None else self.scales * factor)[:, None]
        return torch.where(self.signs, scales, -scales)


def pack(values: Tensor, packed: Tensor) -> None:
    """Write signs and scales of `values` to `packed`, and replace `values` by the residual."""
    for chunk, padded, encoded in _encode(packed, values):
        residual = torch.where(torch.isfinite(encoded.scales)[:, None], padded - encoded.decoded(), 0.0)
        values[chunk.start : chunk.stop] = residual.view(-1)[: len(chunk)]


def difference(master: Tensor, weight: Tensor, packed: Tensor) -> None:
    """Write signs and scales of `master - weight` to `packed`."""
    for _ in _encode(packed, master, weight):
        pass


def unpack(packed: Tensor, target: Tensor, *, factor: float, accumulate: bool) -> None:
    """Write `factor` times the decoded vector to `target`, or add it."""
    source = views(packed, target.numel())
    multiplier = torch.full((), factor, dtype=torch.float32, device=target.device)
    bit_numbers = torch.arange(8, device=target.device)
    bits_of_byte = ((torch.arange(256, device=target.device)[:, None] >> bit_numbers) & 1).bool()
    for chunk in _chunks(target.numel()):
        sign_bytes = _padded(source.signs[chunk.start // 8 : chunk.stop // 8], BLOCK // 8)
        encoded = _Encoded(scales=source.scales[chunk.start // BLOCK : blocks(chunk.stop)],
                           signs=bits_of_byte.index_select(0, sign_bytes.view(-1).int()).view(-1, BLOCK))
        decoded = encoded.decoded(multiplier).view(-1)[: len(chunk)]
        part = target[chunk.start : chunk.stop]
        part.copy_(part.float() + decoded if accumulate else decoded)


def _encode(packed: Tensor, values: Tensor, subtrahend: Tensor | None = None) -> Iterator[tuple[range, Tensor, _Encoded]]:
    """Pack chunk by chunk; yield the chunk, its values in fp32 padded to (blocks, BLOCK), and their encoding."""
    target = views(packed, values.numel())
    target.padding.zero_()
    for chunk in _chunks(values.numel()):
        part = values[chunk.start : chunk.stop].float()
        padded = _padded(part if subtrahend is None else part - subtrahend[chunk.start : chunk.stop].float(), BLOCK)
        encoded = _Encoded(scales=_scales(padded, len(chunk)), signs=padded >= 0)
        target.scales[chunk.start // BLOCK : blocks(chunk.stop)] = encoded.scales
        target.signs[chunk.start // 8 : chunk.stop // 8] = _packed_bits(encoded.signs.view(-1)[: len(chunk)])
        yield chunk, padded, encoded


def _packed_bits(signs: Tensor) -> Tensor:
    """Return the bools `signs` (n,) as bits, (n / 8,) uint8, computed on 64-bit words of eight bools each.

    The product moves byte k of a word, 0 or 1, to bit 56 + k, and no other byte there: 8 k + (56 - 7 k).
    """
    words = signs.view(torch.uint8).view(torch.int64)
    return ((words * 0x0102040810204080) >> 56).to(torch.uint8)


def _scales(padded: Tensor, elements: int) -> Tensor:
    """Return the mean magnitude of each block of `padded` (blocks, BLOCK), of which only the first `elements` count."""
    sums = padded.abs()
    while sums.shape[1] > 1:
        left, right = sums.chunk(2, dim=1)
        sums = left + right
    counts = torch.full_like(sums, BLOCK)
    counts[-1] = elements - BLOCK * (len(counts) - 1)
    return torch.where(torch.isfinite(sums), sums / counts, torch.nan).squeeze(1)


def _padded(part: Tensor, width: int) -> Tensor:
    """Return `part` (n,) as rows of `width`, the last one padded with zeros."""
    missing = -part.numel() % width
    return torch.nn.functional.pad(part, (0, missing)).view(-1, width)


def _chunks(elements: int) -> Iterator[range]:
    for start in range(0, elements, _CHUNK):
        yield range(start, min(elements, start + _CHUNK))
