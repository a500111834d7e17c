"""A checkpoint stores tensors as pieces; a piece is a flat interval of a box of a named tensor.

Every sharding of a tensor is a set of pieces: ZeRO shards flat elements, tensor parallelism shards boxes, and both
together shard the flat elements of a box. One pure function, `overlaps`, converts any sharding to any other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import accumulate
from math import prod

from torch import Tensor

__all__ = ["Box", "Interval", "Overlap", "Piece", "StridedView", "boxes", "intersect", "overlaps"]

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Box:
    """The elements `offset[d] <= index[d] < offset[d] + size[d]` of a tensor."""

    offset: Shape
    size: Shape

    @property
    def elements(self) -> int:
        return prod(self.size)


@dataclass(frozen=True, slots=True)
class Interval:
    """Elements [start, stop) of `box`, counted in the row-major order of the box."""

    box: Box
    start: int
    stop: int

    @property
    def elements(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True, kw_only=True)
class StridedView:
    """The location of a box in one-dimensional data: the index of its first element and the stride of each dim."""

    start: int
    strides: Shape

    def of(self, data: Tensor, size: Shape) -> Tensor:
        """Return the box of `size` as a view of one-dimensional, contiguous `data`."""
        return data[self.start :].as_strided(size, self.strides)


@dataclass(frozen=True, slots=True, kw_only=True)
class Overlap:
    """A box that two intervals share, and its location in the data of each."""

    size: Shape
    source: StridedView
    target: StridedView

    @property
    def elements(self) -> int:
        return prod(self.size)

    def copy(self, source: Tensor, target: Tensor) -> None:
        """Copy the shared box from the source's data to the target's, casting to the target's dtype."""
        self.target.of(target, self.size).copy_(self.source.of(source, self.size))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Piece:
    """The part of one named tensor that one rank saves or loads."""

    name: str
    """The kind and the parameter name: `weight/h.0.attn.weight`, `exp_avg/...`, `buffer/...`."""
    shape: Shape
    """The shape of the full tensor."""
    start: int
    """First element, in the row-major order of the box."""
    stop: int
    """One past the last element."""
    data: Tensor
    """One-dimensional, `stop - start` elements, any dtype and device."""
    offset: Shape | None = None
    """The offset of this rank's box within the tensor; None: the box is the full tensor."""
    size: Shape | None = None
    """The size of this rank's box; None: the box is the full tensor."""
    hold: Callable[[bool], AbstractContextManager[object]] | None = None
    """Makes offloaded `data` resident while it is read, or written (argument True); None: `data` is always resident."""

    @property
    def interval(self) -> Interval:
        if self.offset is None or self.size is None:
            return Interval(Box((0,) * len(self.shape), self.shape), self.start, self.stop)
        return Interval(Box(self.offset, self.size), self.start, self.stop)

    def fault(self) -> str | None:
        """Return why this piece is invalid, or None."""
        box = self.interval.box
        ends = tuple(offset + size for offset, size in zip(box.offset, box.size, strict=False))
        if not len(self.shape) == len(box.offset) == len(box.size):
            return f"the box has {len(box.size)} dims, the tensor {len(self.shape)}"
        if min(box.offset, default=0) < 0 or any(end > dim for end, dim in zip(ends, self.shape, strict=True)):
            return f"the box at {box.offset} of size {box.size} exceeds the tensor's shape {self.shape}"
        if not 0 <= self.start <= self.stop <= box.elements:
            return f"[{self.start}, {self.stop}) is not an interval of a box of {box.elements} elements"
        if self.data.shape != (expected := (self.stop - self.start,)):
            return f"[{self.start}, {self.stop}) needs data of shape {expected}, got {tuple(self.data.shape)}"
        return None


def boxes(shape: Shape, start: int, stop: int) -> Iterator[Box]:
    """Cover the row-major elements [start, stop) of a tensor of n dims with at most 2n - 1 boxes, in order.

    A row is one index of the first dim. The interval consists of the end of one row, whole rows, and the beginning of
    another row. The end and the beginning are each covered in the same way, in a tensor of one dim less; since they touch
    its edge, they add at most one box per dim.
    """
    if start >= stop:
        return
    if not shape:
        yield Box((), ())
        return
    row = prod(shape[1:])
    first, last = -(-start // row), stop // row
    if first > last:  # within one row
        yield from _in_row(first - 1, boxes(shape[1:], start - last * row, stop - last * row))
        return
    if start < first * row:
        yield from _in_row(first - 1, boxes(shape[1:], start - (first - 1) * row, row))
    if first < last:
        yield Box((first, *(0 for _ in shape[1:])), (last - first, *shape[1:]))
    if last * row < stop:
        yield from _in_row(last, boxes(shape[1:], 0, stop - last * row))


def _in_row(row: int, inner: Iterator[Box]) -> Iterator[Box]:
    for box in inner:
        yield Box((row, *box.offset), (1, *box.size))


def intersect(a: Box, b: Box) -> Box | None:
    """Return the box that two boxes of one tensor share, or None."""
    low = tuple(map(max, a.offset, b.offset))
    high = tuple(min(i + m, j + n) for i, m, j, n in zip(a.offset, a.size, b.offset, b.size, strict=True))
    size = tuple(stop - start for start, stop in zip(low, high, strict=True))
    return Box(low, size) if all(extent > 0 for extent in size) else None


def overlaps(source: Interval, target: Interval) -> Iterator[Overlap]:
    """Yield the disjoint boxes that two intervals of one tensor share, with their location in the data of each."""
    if source.box == target.box:  # same element order, so the flat intervals intersect
        start, stop = max(source.start, target.start), min(source.stop, target.stop)
        if start < stop:
            yield Overlap(size=(stop - start,), source=StridedView(start=start - source.start, strides=(1,)),
                          target=StridedView(start=start - target.start, strides=(1,)))
        return
    if intersect(source.box, target.box) is None:
        return
    targets = list(_chunks(target))
    for at, chunk in _chunks(source):
        for other_at, other in targets:
            if (shared := intersect(chunk, other)) is not None:
                yield Overlap(size=shared.size, source=_view(shared, chunk, at), target=_view(shared, other, other_at))


def _chunks(interval: Interval) -> Iterator[tuple[int, Box]]:
    """Yield the boxes of an interval in the tensor's coordinates, each with its position in the interval's data."""
    at = 0
    for box in boxes(interval.box.size, interval.start, interval.stop):
        yield at, Box(tuple(map(int.__add__, box.offset, interval.box.offset)), box.size)
        at += box.elements


def _view(shared: Box, chunk: Box, at: int) -> StridedView:
    """Locate `shared` in data that stores `chunk`, which contains it, in row-major order from index `at`."""
    strides = tuple(accumulate(reversed(chunk.size[1:]), int.__mul__, initial=1))[::-1][: len(chunk.size)]
    inside = (i - j for i, j in zip(shared.offset, chunk.offset, strict=True))
    return StridedView(start=at + sum(map(int.__mul__, inside, strides)), strides=strides)
