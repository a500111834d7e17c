"""Packing in torch, on any device: slower than the other ways, and what they are compared with.

The scale of a block of n elements is their mean magnitude. Of all s it brings s sign(x) nearest to x:

    |x - s sign(x)|^2 = |x|_2^2 - 2 s |x|_1 + n s^2       is least where      s = |x|_1 / n,

and there it is |x|_2^2 - |x|_1^2 / n: a contraction of |x|_2^2 by 1 - |x|_1^2 / (n |x|_2^2), below 1 unless x = 0, which
is all that error feedback asks for (Karimireddy et al. 2019, arXiv 1901.09847, section 4).

The sum is taken in one order, so that every way finds the same bits: the block, with zeros up to BLOCK, is folded in the
middle and its halves are added, until one number is left. (No order has a smaller error: 11 roundings on any path.)
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from shoal.onebit.layout import BLOCK, blocks, parts

__all__ = ["difference", "pack", "unpack"]

_AT_ONCE = 512 * BLOCK  # elements: what is computed in between stays small beside the vector


@dataclass(frozen=True, slots=True, kw_only=True)
class _Encoded:
    """`scales` (blocks,), NaN where a block is not finite, and `signs` (blocks, BLOCK), whether an element is >= 0."""

    scales: Tensor
    signs: Tensor

    def steps(self, factor: Tensor | None = None) -> Tensor:
        """Return what is sent, scale * sign, (blocks, BLOCK)."""
        scales = (self.scales if factor is None else self.scales * factor)[:, None]
        return torch.where(self.signs, scales, -scales)


def pack(values: Tensor, packed: Tensor) -> None:
    """Write signs and scales of `values` to `packed`, and leave in `values` the rest."""
    for span, whole, encoded in _encoded(packed, values):
        rest = torch.where(torch.isfinite(encoded.scales)[:, None], whole - encoded.steps(), 0.0)
        values[span.start : span.stop] = rest.view(-1)[: len(span)]


def difference(master: Tensor, weight: Tensor, packed: Tensor) -> None:
    """Write signs and scales of `master - weight` to `packed`."""
    for _ in _encoded(packed, master, weight):
        pass


def unpack(packed: Tensor, target: Tensor, *, factor: float, accumulate: bool) -> None:
    """Write, or add, `factor` times what was sent to `target`."""
    found = parts(packed, target.numel())
    multiple = torch.full((), factor, dtype=torch.float32, device=target.device)
    places = torch.arange(8, device=target.device)
    octets = ((torch.arange(256, device=target.device)[:, None] >> places) & 1).bool()
    for span in _spans(target.numel()):
        bits = _padded(found.signs[span.start // 8 : span.stop // 8], BLOCK // 8)
        encoded = _Encoded(scales=found.scales[span.start // BLOCK : blocks(span.stop)],
                           signs=octets.index_select(0, bits.view(-1).int()).view(-1, BLOCK))
        steps = encoded.steps(multiple).view(-1)[: len(span)]
        part = target[span.start : span.stop]
        part.copy_(part.float() + steps if accumulate else steps)


def _encoded(packed: Tensor, values: Tensor, less: Tensor | None = None) -> Iterator[tuple[range, Tensor, _Encoded]]:
    """Yield span by span what was packed: the span, its values in fp32 (blocks, BLOCK), and how they were encoded."""
    found = parts(packed, values.numel())
    found.padding.zero_()
    for span in _spans(values.numel()):
        part = values[span.start : span.stop].float()
        whole = _padded(part if less is None else part - less[span.start : span.stop].float(), BLOCK)
        encoded = _Encoded(scales=_scales(whole, len(span)), signs=whole >= 0)
        found.scales[span.start // BLOCK : blocks(span.stop)] = encoded.scales
        found.signs[span.start // 8 : span.stop // 8] = _octets(encoded.signs.view(-1)[: len(span)])
        yield span, whole, encoded


def _octets(signs: Tensor) -> Tensor:
    """Return `signs` (n,) of eight bytes each as bytes of eight bits (n / 8,), in arithmetic on words of eight bytes.

    The product brings byte k of a word, 0 or 1, to bit 56 + k, and nothing else there: 8 k + (56 - 7 k).
    """
    words = signs.view(torch.uint8).view(torch.int64)
    return ((words * 0x0102040810204080) >> 56).to(torch.uint8)


def _scales(whole: Tensor, elements: int) -> Tensor:
    """Return the mean magnitude of each block of `whole` (blocks, BLOCK), of whose elements the first `elements` count."""
    sums = whole.abs()
    while sums.shape[1] > 1:
        left, right = sums.chunk(2, dim=1)
        sums = left + right
    counts = torch.full_like(sums, BLOCK)
    counts[-1] = elements - BLOCK * (len(counts) - 1)
    return torch.where(torch.isfinite(sums), sums / counts, torch.nan).squeeze(1)


def _padded(part: Tensor, width: int) -> Tensor:
    """Return `part` (n,) as rows of `width`, with zeros to the end of the last."""
    missing = -part.numel() % width
    return torch.nn.functional.pad(part, (0, missing)).view(-1, width)


def _spans(elements: int) -> Iterator[range]:
    for start in range(0, elements, _AT_ONCE):
        yield range(start, min(elements, start + _AT_ONCE))
