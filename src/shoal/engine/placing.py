"""Where elements of a rank's parameter lie in the global tensor: flat intervals of boxes, which is all a checkpoint knows.

A parameter that no tensor rank cuts is the global tensor. Of one that is cut, each segment of rows is a box; what of it lies
in one run of the parameter's own memory is one interval. Rows that no segment covers are padding, and nowhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from shoal.mesh.tensor_slice import TensorSlice

__all__ = ["Placed", "flat_to_boxes"]

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """A run of a parameter's elements as an interval of a box of the global tensor."""

    local: range
    """The elements, in the row-major order of this rank's parameter."""
    start: int
    """The first of them, in the row-major order of the box."""
    shape: Shape
    """The shape of the global tensor."""
    offset: Shape | None = None
    size: Shape | None = None
    """The box; None: the whole tensor."""


def flat_to_boxes(shape: Shape, elements: range, cut: TensorSlice | None) -> Iterator[Placed]:
    """Yield where the `elements` of a parameter of `shape` lie, which this rank holds by `cut`."""
    if cut is None:
        yield Placed(local=elements, start=elements.start, shape=shape)
        return
    dim, inner, rows = cut.dim, prod(shape[cut.dim + 1:]), shape[cut.dim]
    whole = len(cut.segments) == 1 and cut.segments[0].length == rows
    lead = shape[:dim] if not whole else ()  # one box holds all: its runs are the parameter's own
    for index in range(elements.start // max(1, rows * inner), -(-elements.stop // max(1, rows * inner))) if lead else (0,):
        at = index * rows * inner
        for segment in cut.segments:
            extent = segment.length * inner * (prod(shape[:dim]) if whole else 1)
            first = at + segment.target * inner
            run = range(max(elements.start, first), min(elements.stop, first + extent))
            if not run:
                continue
            offset = [*_unravel(index, shape[:dim]), segment.source, *([0] * (len(shape) - dim - 1))]
            size = [*([1] * dim if not whole else shape[:dim]), segment.length, *shape[dim + 1:]]
            yield Placed(local=run, start=run.start - first, shape=cut.shape(shape), offset=tuple(offset), size=tuple(size))


def _unravel(index: int, shape: Shape) -> list[int]:
    place: list[int] = []
    for extent in reversed(shape):
        place.insert(0, index % extent)
        index //= extent
    return place
