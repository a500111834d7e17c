"""Optimizers that let gradients and weights travel as signs, and say when.

Every rank counts the steps that were applied, so that all ranks change the way of travel at the same step. The count is an
option of every group, and so a part of every checkpoint.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

from torch.optim import Optimizer

__all__ = ["EXACT", "Compressing", "Wire"]

_COUNT = "applied_steps"


@dataclass(frozen=True, slots=True, kw_only=True)
class Wire:
    """Whether the gradient of a step and the weights after it travel as signs."""

    gradient: bool
    weights: bool


EXACT = Wire(gradient=False, weights=False)


class Compressing(Optimizer):
    """An elementwise optimizer whose slices may be stepped by gradients that came as signs."""

    @property
    def applied(self) -> int:
        """The steps that were applied."""
        return self.param_groups[0].get(_COUNT, 0)

    def advance(self) -> None:
        """Count a step that was applied."""
        applied = self.applied + 1
        for group in self.param_groups:
            group[_COUNT] = applied

    @abstractmethod
    def wire(self) -> Wire:
        """Return how the next step travels."""
