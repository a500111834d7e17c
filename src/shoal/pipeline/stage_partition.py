"""Divides a list of layers into stages: contiguous parts of at least one layer, the heaviest part as light as possible.

Every rank computes the same partition of the whole model before it builds any layer.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

from shoal.errors import UsageError
from shoal.pipeline.layer import Contents, Layer, contents_of
from shoal.pipeline.profile import measured
from shoal.pipeline.tying import Tie, refuse_shared, ties_of

__all__ = ["StagePartition", "balanced", "checked_boundaries", "divide"]

Method = str | Sequence[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePartition:
    """The layers of each stage, and the weights that layers share."""

    boundaries: tuple[int, ...]
    """Stage k is layers b[k] to b[k+1]-1."""
    ties: tuple[Tie, ...]
    described: tuple[str, ...]
    """A description of each layer, to compare between ranks."""

    def of(self, stage: int) -> slice:
        """Return the layers of a stage."""
        return slice(self.boundaries[stage], self.boundaries[stage + 1])


def divide(layers: Sequence[Layer], stages: int, method: Method, *, sample: Any = None,
           loss_fn: Callable[..., Any] | None = None) -> StagePartition:
    """Divide `layers` into `stages` by a `partition_method`. With "profile" this is a collective.

    Raises `UsageError` for fewer layers than stages, an unknown method, a pattern that matches no layer, a stage without
    parameters, and tied weights that disagree in shape or dtype.
    """
    if sample is not None and (not isinstance(method, str) or method.lower() != "profile"):
        raise UsageError(f"PipelineModule: sample: got one with partition_method={method!r}; only 'profile' measures on it")
    _require_layers(len(layers), stages)
    contents = [contents_of(layer) for layer in layers]
    if isinstance(method, str):
        boundaries = balanced(_weights(layers, contents, method, sample, loss_fn), stages)
    else:
        boundaries = checked_boundaries(method, len(layers), stages)
    _refuse_empty(layers, contents, boundaries, method)
    stage_of = [stage for stage, (start, stop) in enumerate(pairwise(boundaries)) for _ in range(start, stop)]
    refuse_shared(layers, stage_of)
    return StagePartition(boundaries=boundaries, ties=tuple(ties_of(layers, contents, stage_of)), described=tuple(
        f"{layer} of {held.parameters} parameters, {held.trainable} of them trainable"
        for layer, held in zip(layers, contents, strict=True)))


def _weights(layers: Sequence[Layer], contents: Sequence[Contents], method: str, sample: Any,
             loss_fn: Callable[..., Any] | None) -> Sequence[float]:
    """Return the weight of each layer by a method."""
    kind, _, pattern = method.partition(":")
    match kind.lower():
        case "parameters" | "best" if not pattern:
            return [held.trainable for held in contents]
        case "uniform" if not pattern:
            return [1] * len(layers)
        case "type" if pattern:
            return _matches(layers, pattern)
        case "profile" if not pattern:
            if sample is None:
                raise UsageError("partition_method 'profile': give sample=, one microbatch (inputs, labels) to measure on")
            return measured(layers, contents, sample, loss_fn)
        case _:
            raise UsageError(f"partition_method: got {method!r}; choose 'parameters', 'uniform', 'type:REGEX', 'profile', "
                             f"or a list of boundaries")


def _matches(layers: Sequence[Layer], pattern: str) -> list[int]:
    try:
        found = [int(re.search(pattern, layer.kind, re.IGNORECASE) is not None) for layer in layers]
    except re.error as error:
        raise UsageError(f"partition_method: got 'type:{pattern}', which is no regular expression: {error}") from error
    if not any(found):
        raise UsageError(f"partition_method: 'type:{pattern}' matches no layer; their classes are "
                         f"{', '.join(dict.fromkeys(layer.kind for layer in layers))}")
    return found


def _refuse_empty(layers: Sequence[Layer], contents: Sequence[Contents], boundaries: Sequence[int], method: Method) -> None:
    """Raise `UsageError` for a stage without parameters."""
    for stage, (start, stop) in enumerate(pairwise(boundaries)):
        if not any(held.parameters for held in contents[start:stop]):
            raise UsageError(f"pipeline stage {stage} of {len(boundaries) - 1} has no parameters: its layers are "
                             f"{', '.join(map(str, layers[start:stop]))} by partition_method={method!r}; choose "
                             f"'parameters', give other boundaries as a list, or have fewer stages")


def balanced(weights: Sequence[float], parts: int) -> tuple[int, ...]:
    """Return the boundaries of `parts` contiguous parts of the layers of `weights` (each >= 0): part k is b[k] to b[k+1]-1.

    The heaviest part is as light as possible. Among such partitions the sum of squared weights is least, so that the other
    parts are even and no part weighs 0 if that can be avoided; among equals, early parts are heavier and longer. Raises
    `UsageError` for fewer layers than parts.
    """
    _require_layers(len(weights), parts)
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
            for first in range(stop - 1, part - 2, -1):  # shortest last part first: of equals, the later start
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


def _require_layers(layers: int, parts: int) -> None:
    """Raise `UsageError` for fewer layers than parts."""
    if not 1 <= parts <= layers:
        raise UsageError(f"pipeline: {layers} layers cannot be split over {parts} stages: each stage takes one layer or "
                         f"more; give more layers, or fewer stages")


def _heaviest(sums: Sequence[float], parts: int) -> float:
    """Return the least possible weight of the heaviest part; `sums` are those of the first 0, 1, 2 ... layers.

    For a growing start of the last part, the optimum of the parts before it grows and the weight of the last part shrinks:
    the best start is where the two cross.
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


def checked_boundaries(boundaries: Sequence[int], layers: int, parts: int) -> tuple[int, ...]:
    """Return the given boundaries. Raises `UsageError` unless they make `parts` parts of at least one layer."""
    ascends = all(start < stop for start, stop in pairwise(boundaries))
    if len(boundaries) != parts + 1 or not ascends or (boundaries[0], boundaries[-1]) != (0, layers):
        raise UsageError(f"partition_method: got the boundaries {list(boundaries)}; {layers} layers in {parts} stages take "
                         f"{parts + 1} ascending numbers from 0 to {layers}: stage k is layers b[k] to b[k+1]-1")
    return tuple(boundaries)
