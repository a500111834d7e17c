"""A topology numbers the ranks of a grid of named axes in row-major order; the last axis is the fastest.

    ProcessTopology(axes=["pipe", "data"], dims=[2, 3])        data 0   1   2
                                                       pipe 0       0   1   2
                                                       pipe 1       3   4   5

Nothing here communicates; every rank computes the topology by itself.
"""

from __future__ import annotations

import math
import operator
from collections import namedtuple
from collections.abc import Sequence
from itertools import product
from typing import Any, SupportsIndex

from shoal.errors import UsageError

__all__ = ["PipeDataParallelTopology", "PipeModelDataParallelTopology", "ProcessTopology"]


class ProcessTopology:
    """The ranks 0 to n-1 on a grid of `axes` of the sizes `dims`.

    Raises `UsageError` if names repeat or are no identifiers, if their number differs from that of the sizes, or if a size
    is not positive.
    """

    def __init__(self, axes: Sequence[str], dims: Sequence[int]):
        if len(axes) != len(dims) or len(set(axes)) != len(axes) or not all(axis.isidentifier() for axis in axes):
            raise UsageError(f"topology: got axes {list(axes)} with dims {list(dims)}; give each axis one size and a name "
                             f"of its own, such as axes=['pipe', 'data'], dims=[2, 4]")
        if odd := [dim for dim in dims if not isinstance(dim, SupportsIndex)]:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise UsageError(f"topology: got {odd[0]!r} among dims {list(dims)} for axes {list(axes)}; give whole "
                             f"numbers")
        if any(operator.index(dim) < 1 for dim in dims):
            raise UsageError(f"topology: got dims {list(dims)} for axes {list(axes)}; sizes are 1 or more")
        self.axes = tuple(axes)
        self.dims = tuple(operator.index(dim) for dim in dims)
        self.ProcessCoord: Any = namedtuple("ProcessCoord", self.axes)  # pyright: ignore[reportUntypedNamedTuple]  of any axes
        """The class of a coordinate: a named tuple of the axes."""
        self._coords = [self.ProcessCoord(*place) for place in product(*map(range, self.dims))]

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{axis}={dim}' for axis, dim in zip(self.axes, self.dims, strict=True))})"

    def world_size(self) -> int:
        """Return the number of ranks."""
        return math.prod(self.dims)

    def get_axis_names(self) -> list[str]:
        """Return the names of the axes, the slowest first."""
        return list(self.axes)

    def get_dim(self, axis: str) -> int:
        """Return the size of an axis, 0 for an unknown axis."""
        return self.dims[self.axes.index(axis)] if axis in self.axes else 0

    def get_rank(self, **coords: int) -> int:
        """Return the rank at a complete coordinate, such as `get_rank(pipe=0, data=1)`.

        Raises `UsageError` if an axis is missing or unknown, or its coordinate out of range.
        """
        inside = all(0 <= coords[axis] < self.get_dim(axis) for axis in coords)
        if set(coords) != set(self.axes) or not inside:
            raise UsageError(f"topology: get_rank: got {_formatted(coords)}; give each axis of {self} its coordinate, from "
                             f"0 to its size less 1 (filter_match takes some of the axes)")
        rank = 0
        for axis, dim in zip(self.axes, self.dims, strict=True):
            rank = rank * dim + coords[axis]
        return rank

    def get_coord(self, rank: int) -> Any:
        """Return the coordinate of a rank as a named tuple: `get_coord(3).pipe`. Raises `UsageError` for an unknown rank."""
        if not 0 <= rank < self.world_size():
            raise UsageError(f"topology: get_coord: got rank {rank}; {self} has the ranks 0 to {self.world_size() - 1}")
        return self._coords[rank]

    def get_rank_repr(self, rank: int, omit_axes: Sequence[str] = ("data", "pipe"), inner_sep: str = "_",
                      outer_sep: str = "-") -> str:
        """Return the rank's coordinate without `omit_axes` as a string for file names, such as `model_00`."""
        coord = self.get_coord(rank)
        return outer_sep.join(f"{axis}{inner_sep}{place:02d}" for axis, place in zip(self.axes, coord, strict=True)
                              if axis not in omit_axes)

    def get_axis_comm_lists(self, axis: str) -> list[list[int]]:
        """Return the lists of ranks that differ along `axis` only, by their other coordinates; none for an unknown axis."""
        if axis not in self.axes:
            return []
        others = [other for other in self.axes if other != axis]
        places = product(*(range(self.get_dim(other)) for other in others))
        return [self.filter_match(**dict(zip(others, place, strict=True))) for place in places]

    def filter_match(self, **coords: int) -> list[int]:
        """Return the ranks, in order, with these coordinates, such as `filter_match(pipe=0)`.

        Raises `UsageError` for an unknown axis.
        """
        if unknown := set(coords) - set(self.axes):
            raise UsageError(f"topology: filter_match: got {_formatted(coords)}; {self} has no axis "
                             f"{', '.join(sorted(unknown))}")
        return [rank for rank, coord in enumerate(self._coords)
                if all(getattr(coord, axis) == place for axis, place in coords.items())]

    def get_axis_list(self, axis: str, idx: int) -> list[int]:
        """Return the ranks, in order, whose coordinate along `axis` is `idx`."""
        return self.filter_match(**{axis: idx})


class PipeDataParallelTopology(ProcessTopology):
    """Pipeline stages of `num_dp` data ranks each; the ranks of a stage are consecutive."""

    def __init__(self, num_pp: int, num_dp: int):
        super().__init__(axes=["pipe", "data"], dims=[num_pp, num_dp])


class PipeModelDataParallelTopology(ProcessTopology):
    """Pipeline stages of `num_dp` data ranks of `num_mp` tensor ranks each; the tensor ranks are consecutive."""

    def __init__(self, num_pp: int, num_mp: int, num_dp: int):
        super().__init__(axes=["pipe", "data", "model"], dims=[num_pp, num_dp, num_mp])


def _formatted(coords: dict[str, int]) -> str:
    return ", ".join(f"{axis}={place}" for axis, place in coords.items()) or "nothing"
