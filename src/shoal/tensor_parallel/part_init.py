"""This rank's slice of a parameter: drawn as one rank would have drawn the whole, or taken from a whole parameter.

Drawing: each rank draws the global tensor from its generator, block by block, and keeps its slice. The slices of all ranks
together are thus what one rank would have drawn from the same seed, the generators agree afterwards, and no rank holds more
than one block beside its slice. (Generators of accelerators do not continue across blocks: there the block is the tensor.)

Taking: a whole parameter gives one slice, however many modules hold it, so that tied parameters stay tied.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from shoal.errors import UsageError
from shoal.mesh.tensor_slice import TensorSlice, slice_of

__all__ = ["ParameterSlices", "draw_slice"]

BLOCK = 1 << 20
"""Elements that are drawn at once."""

_RUN = 16
"""torch draws normal numbers sixteen at a time, and the last sixteen of a tensor separately: no block may be smaller."""


@torch.no_grad()
def draw_slice(shape: Sequence[int], own: TensorSlice, extent: int, draw: Callable[[Tensor], object], *,
               device: torch.device | str | None, dtype: torch.dtype | None) -> Tensor:
    """Return the slice `own`, of `extent` along its dim, of a tensor of `shape` that `draw` fills in place."""
    local = (*shape[:own.dim], extent, *shape[own.dim + 1:])
    part = torch.zeros(local, device=device, dtype=dtype)
    if part.is_meta:
        return part
    for rows in _blocks(shape, part.device):
        block = part.new_empty((len(rows), *shape[1:]))
        draw(block)
        for segment in own.segments:
            source = range(segment.source, segment.source + segment.length)
            if own.dim > 0:
                target = part[rows.start:rows.stop].narrow(own.dim, segment.target, segment.length)
                target.copy_(block.narrow(own.dim, source.start, len(source)))
            elif both := range(max(source.start, rows.start), min(source.stop, rows.stop)):
                part[both.start - source.start + segment.target:][:len(both)] = block[both.start - rows.start:][:len(both)]
    return part


def _blocks(shape: Sequence[int], device: torch.device) -> Iterator[range]:
    """Divide the rows into blocks: the last has at least `_RUN` rows, the others a multiple of `_RUN`."""
    width = max(1, torch.Size(shape[1:]).numel())
    length = max(1, BLOCK // width // _RUN) * _RUN if device.type == "cpu" else shape[0]
    start = 0
    while shape[0] - start >= length + _RUN:
        yield range(start, start + length)
        start += length
    yield range(start, shape[0])


@dataclass(slots=True)
class ParameterSlices:
    """The slices that layers have taken of whole parameters, so that tied parameters share one."""

    taken: dict[nn.Parameter, tuple[TensorSlice, nn.Parameter]] = field(
        default_factory=dict[nn.Parameter, tuple[TensorSlice, nn.Parameter]])
    """By the whole parameter: the slice's place in it, and the slice."""

    @torch.no_grad()
    def of(self, whole: nn.Parameter, own: TensorSlice, extent: int) -> nn.Parameter:
        """Return the slice `own` of `whole`. Raises `UsageError` if another slice of it has been taken."""
        if whole in self.taken:
            known, part = self.taken[whole]
            if known != own:
                raise UsageError(f"a parameter of shape {tuple(whole.shape)} is tied, and sliced in two ways: along dim "
                                 f"{known.dim} of {known.size} rows and along dim {own.dim} of {own.size}; slice the layers "
                                 f"that share it alike, or untie them")
            return part
        if whole.shape[own.dim] != own.size:
            raise UsageError(f"a parameter of shape {tuple(whole.shape)} has {whole.shape[own.dim]} rows along dim "
                             f"{own.dim}, and its layer has {own.size}")
        part = nn.Parameter(slice_of(whole, own, extent=extent), requires_grad=whole.requires_grad)
        self.taken[whole] = own, part
        return part
