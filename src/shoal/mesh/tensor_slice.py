"""A tensor is sliced over ranks along one dim: together the ranks hold every row once, and any other row is padding.

    global rows   q q q q k k v v          a fused projection of two ranks: three segments each
    rank 0        q q k v                  source 0 -> target 0, 4 -> 2, 6 -> 3
    rank 1        q q k v                  source 2 -> target 0, 5 -> 2, 7 -> 3

A `TensorSlice` gives the rows of the global tensor that this rank's parameter holds, and their places in it. Rows of the
parameter that no segment covers are padding: zeros, without effect, never saved. A parameter without a slice is whole on
every rank. Code that needs the global tensor (checkpoints, norms, estimates) uses only names and slices.
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
    """`length` rows along the sliced dim, starting at `source` in the global tensor and at `target` in the local one."""

    source: int
    target: int
    length: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSlice:
    """The part of a global tensor that this rank's parameter holds, along one dim."""

    dim: int
    size: int
    """Size of that dim in the global tensor, without padding."""
    segments: tuple[Segment, ...]
    """In order of `target`. They do not overlap; those of all ranks cover the dim once."""
    rank: int
    ranks: int

    @classmethod
    def even(cls, dim: int, sizes: Sequence[int], rank: int, ranks: int) -> Self:
        """Return the slice of concatenated tensors of `sizes`, each sliced evenly over the ranks.

        Raises `UsageError` for a size that the ranks do not divide.
        """
        shares = [divided(f"a dim of {size}", size, ranks) for size in sizes]
        sources, targets = accumulate(sizes, initial=0), accumulate(shares, initial=0)
        segments = tuple(Segment(source=source + rank * share, target=target, length=share)
                         for source, target, share in zip(sources, targets, shares, strict=False) if share)
        return cls(dim=dim, size=sum(sizes), segments=segments, rank=rank, ranks=ranks)

    @classmethod
    def padded(cls, dim: int, size: int, rank: int, ranks: int) -> Self:
        """Return the slice of ceil(size / ranks) rows on each rank, of which those beyond `size` are padding."""
        rows = stretch(size, rank, ranks)
        segments = (Segment(source=rows.start, target=0, length=len(rows)),) if rows else ()
        return cls(dim=dim, size=size, segments=segments, rank=rank, ranks=ranks)

    @property
    def length(self) -> int:
        """The number of rows of the global tensor that this rank holds."""
        return sum(segment.length for segment in self.segments)

    def shape(self, local_shape: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of the global tensor for a slice of `local_shape`."""
        return (*local_shape[:self.dim], self.size, *local_shape[self.dim + 1:])


@runtime_checkable
class SlicedModule(Protocol):
    """A module whose parameters are slices of global tensors."""

    def cuts(self) -> Mapping[str, TensorSlice]:
        """Return the slice of each sliced parameter of the module itself, by its name in the module."""
        ...


def cuts_of(model: nn.Module) -> dict[str, TensorSlice]:
    """Return the slices of a model's parameters by full name; tied parameters appear under each name.

    Raises `UsageError` for a parameter that two modules slice differently.
    """
    slices: dict[nn.Parameter, tuple[str, TensorSlice]] = {}
    for name, parameter, own in _slices(model):
        first_name, first = slices.setdefault(parameter, (name, own))
        if first != own:
            raise UsageError(f"{name} and {first_name} are one parameter, and are sliced differently: {own} and {first}; "
                             f"tie only layers that are sliced alike")
    return {name: slices[parameter][1] for name, parameter in model.named_parameters(remove_duplicate=False)
            if parameter in slices}


def _slices(model: nn.Module) -> Iterator[tuple[str, nn.Parameter, TensorSlice]]:
    for path, module in model.named_modules():
        own = dict(module.named_parameters(recurse=False, remove_duplicate=False))
        for name, tensor_slice in (module.cuts() if isinstance(module, SlicedModule) else {}).items():
            yield f"{path}.{name}" if path else name, own[name], tensor_slice


def whole(parts: Sequence[Tensor], slices: Sequence[TensorSlice]) -> Tensor:
    """Return the global tensor of the `parts` of all ranks, each with its slice.

    Raises `UsageError` if the slices do not make up one tensor.
    """
    first = slices[0]
    shape = first.shape(parts[0].shape)
    rows = sorted((segment.source, segment.length) for each in slices for segment in each.segments)
    ends = accumulate((length for _, length in rows), initial=0)
    contiguous = all(start == end for (start, _), end in zip(rows, ends, strict=False))
    if not contiguous or sum(length for _, length in rows) != first.size or any(
            (each.dim, each.shape(part.shape)) != (first.dim, shape) for part, each in zip(parts, slices, strict=True)):
        shapes = ", ".join(str(tuple(part.shape)) for part in parts)
        raise UsageError(f"{len(parts)} parts of shapes {shapes} do not make one tensor: their rows along the sliced dim "
                         f"are {rows} of {first.size}")
    result = parts[0].new_empty(shape)
    for part, own in zip(parts, slices, strict=True):
        for segment in own.segments:
            result.narrow(own.dim, segment.source, segment.length).copy_(
                part.narrow(own.dim, segment.target, segment.length))
    return result


def slice_of(tensor: Tensor, own: TensorSlice, *, extent: int | None = None) -> Tensor:
    """Return a copy of the slice `own` of the global `tensor`, padded with zeros to `extent` rows."""
    extent = own.length if extent is None else extent
    shape = (*tensor.shape[:own.dim], extent, *tensor.shape[own.dim + 1:])
    part = tensor.new_empty(shape) if extent == own.length else tensor.new_zeros(shape)
    for segment in own.segments:
        part.narrow(own.dim, segment.target, segment.length).copy_(
            tensor.narrow(own.dim, segment.source, segment.length))
    return part


def stretch(size: int, rank: int, ranks: int) -> range:
    """Return the rows of `rank`: ceil(size / ranks) contiguous rows each; the last ranks may have fewer, or none."""
    length = -(-size // ranks)
    return range(min(rank * length, size), min((rank + 1) * length, size))


def divided(what: str, size: int, ranks: int) -> int:
    """Return `size / ranks`. Raises `UsageError` with the nearest sizes and numbers of ranks that divide."""
    share, left = divmod(size, ranks)
    if left:
        nearest = " or ".join(str(multiple) for multiple in (size - left, size - left + ranks) if multiple)
        counts = [str(count) for count in range(1, size + 1) if size % count == 0]
        allowed = ", ".join(counts if len(counts) < 12 else [*counts[:10], "...", counts[-1]])
        raise UsageError(f"{what} cannot be divided over {ranks} tensor ranks; make it a multiple of {ranks} ({nearest}), "
                         f"or use a number of ranks that divides {size}: {allowed}")
    return share


