"""Optimizers that let gradients and weights travel as signs, and say when.

A *measured* step's gradient travels as it is, all of it and nothing else, for a variance to take. What signs have left
before is sent with the next exact gradient, and would count as part of it: so the step before a measured one is exact too.

A *still* step sends nothing. Its gradient is what is left of it, all of it, and the next step that sends makes up for both.

Every rank counts the steps that were applied, so that all ranks change the way of travel at the same step. The count is an
option of every group, and so a part of every checkpoint.
"""

from __future__ import annotations

import sys
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch.optim import Optimizer

__all__ = ["EXACT", "CompressedOptimizer", "WireFormat", "next_time", "time_of"]

_COUNT = "applied_steps"


@dataclass(frozen=True, slots=True, kw_only=True)
class WireFormat:
    """Whether the gradient of a step and the weights after it travel as signs."""

    gradient: bool
    weights: bool
    still: bool = False
    """Nothing travels, and nothing is stepped: the gradient waits for a later step, as what signs did not say does."""


EXACT = WireFormat(gradient=False, weights=False)


class CompressedOptimizer(Optimizer):
    """An optimizer whose slices may be stepped by gradients that came as signs."""

    exchanging = False
    """Whether the optimizer steps for several ranks, so that gradients travel at all."""

    def set_exchanging(self, exchanging: bool) -> None:
        """Say whether the optimizer steps for several ranks."""
        self.exchanging = exchanging

    @property
    def applied(self) -> int:
        """The steps that were applied."""
        return self.param_groups[0].get(_COUNT, 0)

    def count_step(self) -> None:
        """Count a step that was applied."""
        applied = self.applied + 1
        for group in self.param_groups:
            group[_COUNT] = applied

    @abstractmethod
    def warm_up(self, group: Mapping[str, Any]) -> int:
        """Return how many steps are all measured before the first that is not."""

    def measures(self, group: Mapping[str, Any], time: int) -> bool:
        """Whether the variance takes the gradient of step number `time`, counted from 1."""
        return time <= self.warm_up(group)

    def joined(self, group: Mapping[str, Any]) -> int:
        """Return of how many steps the gradient is that travels at the next step; 0 where none does, a still step."""
        return 1

    def waiting(self, group: Mapping[str, Any]) -> int:
        """Return how many gradients wait to travel."""
        return 0

    def drop(self) -> None:
        """Take note that the gradients that waited are dropped, those of a step that is skipped."""

    def due(self, group: Mapping[str, Any]) -> int:
        """Return of how many steps the gradient is that the next step takes; 0 where that is still."""
        return self.joined(group) if self.exchanging else self.waiting(group) + 1

    def reach(self, group: Mapping[str, Any]) -> int:
        """Return how many steps may be taken at once, at most."""
        return sys.maxsize

    def wire(self) -> WireFormat:
        """Return how the next step travels: by signs once every group is past its warm-up, but near measured steps."""
        time = self.applied + 1
        if not all(map(self.due, self.param_groups)):
            return WireFormat(gradient=True, weights=True, still=True)
        if any(time <= self.warm_up(group) for group in self.param_groups):
            return EXACT
        exact = any(self.measures(group, step) for group in self.param_groups for step in (time, time + 1))
        return WireFormat(gradient=not exact, weights=True)


def time_of(group: Mapping[str, Any], state: Mapping[str, Any]) -> int:
    """Return the number of the step that `state` counts by now: the engine's, where a parameter was stepped less often."""
    return max(int(state["step"].item()), next_time(group))


def next_time(group: Mapping[str, Any]) -> int:
    """Return the number of an engine's next step."""
    return group.get(_COUNT, 0) + 1
