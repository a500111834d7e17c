"""Where this rank's part of a parameter comes from: from what one rank alone would have drawn, or from a whole one.

Drawing: every rank draws the global tensor from its generator, block by block, and keeps its part. So the parts of all
ranks together are what one rank would have drawn from the same seed, the generators agree afterwards, and no rank holds
more than a block beside its part. (The generators of accelerators do not continue over blocks: there a block is the tensor.)

Taking: a whole parameter gives one part, however many modules hold it, so that what was tied stays tied.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from shoal.errors import UsageError
from shoal.mesh.tensor_slice import TensorSlice, slice_of

__all__ = ["Taken", "drawn"]

BLOCK = 1 << 20
"""Elements that are drawn at once."""

_RUN = 16
"""torch draws normal numbers sixteen at a time, and the last sixteen of a tensor apart: no block may be smaller."""


@torch.no_grad()
def drawn(shape: Sequence[int], cut: TensorSlice, extent: int, draw: Callable[[Tensor], object], *,
          device: torch.device | str | None, dtype: torch.dtype | None) -> Tensor:
    """Return this rank's part, of `extent` rows, of a tensor of `shape` that `draw` fills."""
    local = (*shape[:cut.dim], extent, *shape[cut.dim + 1:])
    part = torch.zeros(local, device=device, dtype=dtype)
    if part.is_meta:
        return part
    for rows in _blocks(shape, part.device):
        block = part.new_empty((len(rows), *shape[1:]))
        draw(block)
        for segment in cut.segments:
            source = range(segment.source, segment.source + segment.length)
            if cut.dim > 0:
                target = part[rows.start:rows.stop].narrow(cut.dim, segment.target, segment.length)
                target.copy_(block.narrow(cut.dim, source.start, len(source)))
            elif both := range(max(source.start, rows.start), min(source.stop, rows.stop)):
                part[both.start - source.start + segment.target:][:len(both)] = block[both.start - rows.start:][:len(both)]
    return part


def _blocks(shape: Sequence[int], device: torch.device) -> Iterator[range]:
    """Cut the rows into blocks, each but the last of a multiple of `_RUN` rows, the last of at least as many."""
    width = max(1, torch.Size(shape[1:]).numel())
    length = max(1, BLOCK // width // _RUN) * _RUN if device.type == "cpu" else shape[0]
    start = 0
    while shape[0] - start >= length + _RUN:
        yield range(start, start + length)
        start += length
    yield range(start, shape[0])


@dataclass(slots=True)
class Taken:
    """Parts of whole parameters."""

    parts: dict[nn.Parameter, tuple[TensorSlice, nn.Parameter]] = field(
        default_factory=dict[nn.Parameter, tuple[TensorSlice, nn.Parameter]])
    """By the whole parameter: its cut and its part."""

    @torch.no_grad()
    def take(self, whole: nn.Parameter, cut: TensorSlice, extent: int) -> nn.Parameter:
        """Return this rank's part of `whole`. Raises `UsageError` if it has been taken with another cut."""
        if whole in self.parts:
            known, part = self.parts[whole]
            if known != cut:
                raise UsageError(f"a parameter of shape {tuple(whole.shape)} is tied, and cut in two ways: along dim "
                                 f"{known.dim} of {known.size} rows and along dim {cut.dim} of {cut.size}; cut the layers "
                                 f"that share it alike, or untie them")
            return part
        if whole.shape[cut.dim] != cut.size:
            raise UsageError(f"a parameter of shape {tuple(whole.shape)} has {whole.shape[cut.dim]} rows along dim "
                             f"{cut.dim}, and its layer has {cut.size}")
        part = nn.Parameter(slice_of(whole, cut, extent=extent), requires_grad=whole.requires_grad)
        self.parts[whole] = cut, part
        return part
