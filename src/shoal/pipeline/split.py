"""Where a list of layers is cut: into contiguous parts of one layer or more, the heaviest part as light as it can be.

Of all such cuts, the one of the least sum of squares: what the heaviest part leaves open is even too, and no part weighs
nothing where each could weigh something. Of these, the one whose early parts are the heavier, and longer.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate, pairwise

from shoal.errors import UsageError

__all__ = ["balanced", "enough", "given"]


def balanced(weights: Sequence[float], parts: int) -> tuple[int, ...]:
    """Return the boundaries of `parts` parts of the layers of `weights` (0 or more): part k is layers b[k] to b[k+1]-1.

    Raises `UsageError` for fewer layers than parts.
    """
    enough(len(weights), parts)
    sums = (0, *accumulate(weights))
    limit = _heaviest(sums, parts)
    layers = len(weights)
    # costs[k][stop]: the least sum of squares of the first `stop` layers in k parts of at most `limit`
    infinite = float("inf")
    costs: list[list[float]] = [[0.0] + [infinite] * layers]
    starts: list[list[int]] = [[0] * (layers + 1)]
    for part in range(1, parts + 1):
        before, cost, start = costs[-1], [infinite] * (layers + 1), [0] * (layers + 1)
        for stop in range(part, layers + 1):
            for first in range(stop - 1, part - 2, -1):  # the last part as short as it can be: of equals, the later start
                weight = sums[stop] - sums[first]
                if weight > limit:
                    break
                if before[first] + weight * weight < cost[stop]:
                    cost[stop], start[stop] = before[first] + weight * weight, first
        costs.append(cost)
        starts.append(start)
    boundaries = [layers]
    for part in range(parts, 0, -1):
        boundaries.append(starts[part][boundaries[-1]])
    return tuple(reversed(boundaries))


def enough(layers: int, parts: int) -> None:
    """Raise `UsageError` for fewer layers than parts."""
    if not 1 <= parts <= layers:
        raise UsageError(f"pipeline: {layers} layers cannot be split over {parts} stages: each stage takes one layer or "
                         f"more; give more layers, or fewer stages")


def _heaviest(sums: Sequence[float], parts: int) -> float:
    """Return the weight of the heaviest part where that is least; `sums` are those of the first 0, 1, 2 ... layers.

    The lightest heaviest part of the first layers grows with their number, and the last part shrinks with its start: the
    best start is where they cross.
    """
    layers = len(sums) - 1
    heaviest = list(sums)
    for part in range(2, parts + 1):
        before, heaviest = heaviest, [float("inf")] * (layers + 1)
        for stop in range(part, layers + 1):
            crossing = bisect_left(range(part - 1, stop), True,
                                   key=lambda first, stop=stop, before=before: before[first] >= sums[stop] - sums[first])
            near = {max(part - 1, part - 2 + crossing), min(stop - 1, part - 1 + crossing)}
            heaviest[stop] = min(max(before[first], sums[stop] - sums[first]) for first in near)
    return heaviest[layers]


def given(boundaries: Sequence[int], layers: int, parts: int) -> tuple[int, ...]:
    """Return boundaries that somebody chose. Raises `UsageError` unless they begin `parts` parts of one layer or more."""
    ascends = all(start < stop for start, stop in pairwise(boundaries))
    if len(boundaries) != parts + 1 or not ascends or (boundaries[0], boundaries[-1]) != (0, layers):
        raise UsageError(f"partition_method: got the boundaries {list(boundaries)}; {layers} layers in {parts} stages take "
                         f"{parts + 1} ascending numbers from 0 to {layers}: stage k is layers b[k] to b[k+1]-1")
    return tuple(boundaries)
