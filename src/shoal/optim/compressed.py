"""Optimizers with 1-bit communication: the optimizer decides at each step how gradients and weights are sent.

At a *variance step* gradients are sent uncompressed, because the variance takes their squares. An uncompressed step also
flushes the compression error of earlier steps. The flushed error would bias the variance, so the step before a variance step
is uncompressed too.

A step that *skips communication* sends nothing. Its whole gradient remains as compression error, and the next step that
communicates sends both.

Every rank counts the applied steps, so all ranks change the wire format at the same step. The count is an option of every
parameter group and therefore part of every checkpoint.
"""

from __future__ import annotations

import sys
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch.optim import Optimizer

__all__ = ["EXACT", "CompressedOptimizer", "WireFormat", "next_step_number", "step_number"]

_COUNT = "applied_steps"


@dataclass(frozen=True, slots=True, kw_only=True)
class WireFormat:
    """Whether the gradient of a step and the weights after it are sent compressed to one bit an element."""

    gradient: bool
    weights: bool
    skip_sync: bool = False
    """Nothing is sent and nothing is stepped: the gradient accumulates in the compression error for a later step."""


EXACT = WireFormat(gradient=False, weights=False)


class CompressedOptimizer(Optimizer):
    """An optimizer that can step slices of parameters by 1-bit compressed gradients."""

    communicates = False
    """Whether gradients are sent between ranks."""

    def set_communicates(self, communicates: bool) -> None:
        """Set whether gradients are sent between ranks: several ranks shard the state."""
        self.communicates = communicates

    @property
    def applied_steps(self) -> int:
        """The number of applied steps."""
        return self.param_groups[0].get(_COUNT, 0)

    def count_step(self) -> None:
        """Count a step that was applied."""
        applied = self.applied_steps + 1
        for group in self.param_groups:
            group[_COUNT] = applied

    @abstractmethod
    def warmup_steps(self, group: Mapping[str, Any]) -> int:
        """Return the length of the warm-up, whose steps are all variance steps."""

    def updates_variance(self, group: Mapping[str, Any], time: int) -> bool:
        """Whether step number `time`, counted from 1, is a variance step."""
        return time <= self.warmup_steps(group)

    def steps_to_send(self, group: Mapping[str, Any]) -> int:
        """Return the number of steps whose gradients the next step sends; 0 if it skips communication."""
        return 1

    def unsent_steps(self, group: Mapping[str, Any]) -> int:
        """Return the number of steps whose gradients have not been sent yet."""
        return 0

    def drop_unsent(self) -> None:
        """Note that an overflow has discarded the unsent gradients."""

    def steps_in_gradient(self, group: Mapping[str, Any]) -> int:
        """Return the number of steps whose gradients the next step consumes; 0 if it skips communication."""
        return self.steps_to_send(group) if self.communicates else self.unsent_steps(group) + 1

    def max_joint_steps(self, group: Mapping[str, Any]) -> int:
        """Return the largest number of steps that one joint step may stand for."""
        return sys.maxsize

    def wire_format(self) -> WireFormat:
        """Return the next step's wire format: 1-bit once every group is past its warm-up, except near variance steps."""
        time = self.applied_steps + 1
        if not all(map(self.steps_in_gradient, self.param_groups)):
            return WireFormat(gradient=True, weights=True, skip_sync=True)
        if any(time <= self.warmup_steps(group) for group in self.param_groups):
            return EXACT
        exact = any(self.updates_variance(group, step) for group in self.param_groups for step in (time, time + 1))
        return WireFormat(gradient=not exact, weights=True)


def step_number(group: Mapping[str, Any], state: Mapping[str, Any]) -> int:
    """Return the number of the present step: the engine's count, or that of a tensor's `state` if it is larger."""
    return max(int(state["step"].item()), next_step_number(group))


def next_step_number(group: Mapping[str, Any]) -> int:
    """Return the number of the engine's next step, counted from 1."""
    return group.get(_COUNT, 0) + 1
