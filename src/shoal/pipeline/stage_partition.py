"""Which layers form which stage, for the whole model: every rank comes to the same answer before it builds anything."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from shoal.errors import UsageError
from shoal.pipeline import split
from shoal.pipeline.layer import Contents, Layer, contents_of
from shoal.pipeline.profile import measured
from shoal.pipeline.tying import Tie, refuse_shared, ties_of

__all__ = ["StagePartition", "divide"]

Method = str | Sequence[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePartition:
    """Stages as contiguous layers, and the weights that layers share."""

    boundaries: tuple[int, ...]
    """Stage k is layers b[k] to b[k+1]-1."""
    ties: tuple[Tie, ...]
    described: tuple[str, ...]
    """Each layer, in words that no other has."""

    def of(self, stage: int) -> slice:
        """Return the layers of a stage."""
        return slice(self.boundaries[stage], self.boundaries[stage + 1])


def divide(layers: Sequence[Layer], stages: int, method: Method, *, sample: Any = None,
           loss_fn: Callable[..., Any] | None = None) -> StagePartition:
    """Divide `layers` into `stages` by a `partition_method`. With "profile" it is a collective.

    Raises `UsageError` for fewer layers than stages, a method that is none or fits no layer, a stage without parameters,
    and weights that cannot be shared as they are.
    """
    if sample is not None and (not isinstance(method, str) or method.lower() != "profile"):
        raise UsageError(f"PipelineModule: sample: got one with partition_method={method!r}; only 'profile' measures on it")
    split.enough(len(layers), stages)
    contents = [contents_of(layer) for layer in layers]
    if isinstance(method, str):
        boundaries = split.balanced(_weights(layers, contents, method, sample, loss_fn), stages)
    else:
        boundaries = split.given(method, len(layers), stages)
    _refuse_empty(layers, contents, boundaries, method)
    stage_of = [stage for stage, (start, stop) in enumerate(pairwise(boundaries)) for _ in range(start, stop)]
    refuse_shared(layers, stage_of)
    return StagePartition(boundaries=boundaries, ties=tuple(ties_of(layers, contents, stage_of)), described=tuple(
        f"{layer} of {held.parameters} parameters, {held.trainable} of them trainable"
        for layer, held in zip(layers, contents, strict=True)))


def _weights(layers: Sequence[Layer], contents: Sequence[Contents], method: str, sample: Any,
             loss_fn: Callable[..., Any] | None) -> Sequence[float]:
    """Return what each layer weighs by a method."""
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
    """Raise `UsageError` for a stage in which there would be nothing to train."""
    for stage, (start, stop) in enumerate(pairwise(boundaries)):
        if not any(held.parameters for held in contents[start:stop]):
            raise UsageError(f"pipeline stage {stage} of {len(boundaries) - 1} has no parameters: its layers are "
                             f"{', '.join(map(str, layers[start:stop]))} by partition_method={method!r}; choose "
                             f"'parameters', give other boundaries as a list, or have fewer stages")
