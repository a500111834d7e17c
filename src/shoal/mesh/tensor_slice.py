"""A tensor is cut over ranks along one dim: together they hold every row of it once, and what else they hold is padding.

    global rows   q q q q k k v v          a fused projection of two ranks: three segments each
    rank 0        q q k v                  source 0 -> target 0, 4 -> 2, 6 -> 3
    rank 1        q q k v                  source 2 -> target 0, 5 -> 2, 7 -> 3

A `TensorSlice` says which rows of the global tensor this rank's parameter holds, and where. Rows of the parameter that no
segment covers are padding: zeros, of no effect, never saved. A parameter without a slice is whole on every rank. Code that
needs the global tensor (checkpoints, norms, estimates) uses names and slices alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol, Self, runtime_checkable

from torch import Tensor, nn

from shoal.errors import UsageError

__all__ = ["Segment", "SlicedModule", "TensorSlice", "cuts_of", "divided", "slice_of", "stretch", "whole"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """`length` rows of the cut dim, which begin at `source` in the global tensor and at `target` in the local one."""

    source: int
    target: int
    length: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSlice:
    """Which part of a global tensor this rank's parameter holds, along one dim."""

    dim: int
    size: int
    """Extent of that dim in the global tensor, without padding."""
    segments: tuple[Segment, ...]
    """In order of `target`. None overlap, and over all ranks they cover the dim once."""
    rank: int
    ranks: int

    @classmethod
    def even(cls, dim: int, sizes: Sequence[int], rank: int, ranks: int) -> Self:
        """Return the cut of tensors of `sizes` that lie one after the other, each cut evenly over the ranks.

        Raises `UsageError` for a size that does not divide.
        """
        shares = [divided(f"a dim of {size}", size, ranks) for size in sizes]
        sources, targets = accumulate(sizes, initial=0), accumulate(shares, initial=0)
        segments = tuple(Segment(source=source + rank * share, target=target, length=share)
                         for source, target, share in zip(sources, targets, shares, strict=False) if share)
        return cls(dim=dim, size=sum(sizes), segments=segments, rank=rank, ranks=ranks)

    @classmethod
    def padded(cls, dim: int, size: int, rank: int, ranks: int) -> Self:
        """Return the cut in which each rank holds as many rows, the last ones padding where `size` does not divide."""
        rows = stretch(size, rank, ranks)
        segments = (Segment(source=rows.start, target=0, length=len(rows)),) if rows else ()
        return cls(dim=dim, size=size, segments=segments, rank=rank, ranks=ranks)

    @property
    def length(self) -> int:
        """How many rows of the global tensor this rank holds."""
        return sum(segment.length for segment in self.segments)

    def shape(self, local_shape: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of the global tensor of which a tensor of `local_shape` is the part."""
        return (*local_shape[:self.dim], self.size, *local_shape[self.dim + 1:])


@runtime_checkable
class SlicedModule(Protocol):
    """A module that holds parts of global tensors."""

    def cuts(self) -> Mapping[str, TensorSlice]:
        """Return the cut of each of its own parameters that has one, by its name in the module."""
        ...


def cuts_of(model: nn.Module) -> dict[str, TensorSlice]:
    """Return the cuts of a model's parameters by full name, also under the other names of tied ones.

    Raises `UsageError` for a parameter of which two modules say different things.
    """
    found: dict[nn.Parameter, tuple[str, TensorSlice]] = {}
    for name, parameter, cut in _said(model):
        known = found.setdefault(parameter, (name, cut))
        if known[1] != cut:
            raise UsageError(f"{name} and {known[0]} are one parameter, and are cut differently: {cut} and {known[1]}; tie "
                             f"only layers that are cut alike")
    return {name: found[parameter][1] for name, parameter in model.named_parameters(remove_duplicate=False)
            if parameter in found}


def _said(model: nn.Module) -> Iterator[tuple[str, nn.Parameter, TensorSlice]]:
    for path, module in model.named_modules():
        own = dict(module.named_parameters(recurse=False, remove_duplicate=False))
        for name, cut in (module.cuts() if isinstance(module, SlicedModule) else {}).items():
            yield f"{path}.{name}" if path else name, own[name], cut


def whole(parts: Sequence[Tensor], cuts: Sequence[TensorSlice]) -> Tensor:
    """Join the `parts` of all ranks, each with its cut, to the global tensor.

    Raises `UsageError` if the cuts are not the parts of one tensor.
    """
    first = cuts[0]
    shape = first.shape(parts[0].shape)
    rows = sorted((segment.source, segment.length) for cut in cuts for segment in cut.segments)
    ends = accumulate((length for _, length in rows), initial=0)
    joined = all(start == end for (start, _), end in zip(rows, ends, strict=False))
    if not joined or sum(length for _, length in rows) != first.size or any(
            (cut.dim, cut.shape(part.shape)) != (first.dim, shape) for part, cut in zip(parts, cuts, strict=True)):
        shapes = ", ".join(str(tuple(part.shape)) for part in parts)
        raise UsageError(f"{len(parts)} parts of shapes {shapes} do not make one tensor: their rows along the cut dim are "
                         f"{rows} of {first.size}")
    result = parts[0].new_empty(shape)
    for part, cut in zip(parts, cuts, strict=True):
        for segment in cut.segments:
            result.narrow(cut.dim, segment.source, segment.length).copy_(
                part.narrow(cut.dim, segment.target, segment.length))
    return result


def slice_of(tensor: Tensor, cut: TensorSlice, *, extent: int | None = None) -> Tensor:
    """Return a copy of the part of the global `tensor` that `cut` describes, padded with zeros to `extent` rows."""
    extent = cut.length if extent is None else extent
    shape = (*tensor.shape[:cut.dim], extent, *tensor.shape[cut.dim + 1:])
    part = tensor.new_empty(shape) if extent == cut.length else tensor.new_zeros(shape)
    for segment in cut.segments:
        part.narrow(cut.dim, segment.target, segment.length).copy_(
            tensor.narrow(cut.dim, segment.source, segment.length))
    return part


def stretch(size: int, rank: int, ranks: int) -> range:
    """Return the rows of `rank` when `size` rows are dealt out in equal runs, the last of which may be short or empty."""
    length = -(-size // ranks)
    return range(min(rank * length, size), min((rank + 1) * length, size))


def divided(what: str, size: int, ranks: int) -> int:
    """Return `size / ranks`. Raises `UsageError` that says which sizes and ranks would do."""
    share, left = divmod(size, ranks)
    if left:
        nearest = " or ".join(str(multiple) for multiple in (size - left, size - left + ranks) if multiple)
        counts = [str(count) for count in range(1, size + 1) if size % count == 0]
        allowed = ", ".join(counts if len(counts) < 12 else [*counts[:10], "...", counts[-1]])
        raise UsageError(f"{what} cannot be divided over {ranks} tensor ranks; make it a multiple of {ranks} ({nearest}), "
                         f"or use a number of ranks that divides {size}: {allowed}")
    return share


