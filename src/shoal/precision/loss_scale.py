"""Loss scaling: backward differentiates `value * loss`, so that small gradients do not underflow in fp16.

The dynamic scale searches for the largest value that does not overflow (mixed precision training, Micikevicius et al.
2018, section 3.2), with patience in both directions:

    overflow, patience left     patience -= 1
    overflow, patience used up  value = max(value / 2, smallest); at the smallest already: LossScaleError
    the clean step that follows `window` clean steps, and every window later
                                value *= 2, and patience is full again
    one clean step              with `consecutive_hysteresis`, patience is full again

These are DeepSpeed's rule and counts. `update` is called once a step with the same `overflow` on every rank, so the value
is the same on every rank.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Protocol

from shoal.errors import CheckpointError, ConfigError, LossScaleError

__all__ = ["DynamicScale", "LossScale", "StaticScale", "make_loss_scale"]


class LossScale(Protocol):
    """The interface of a loss scale."""

    @property
    def value(self) -> float:
        """The factor on the next loss."""
        ...

    def update(self, overflow: bool) -> None:
        """Adapt to whether the gradients of the last step overflowed."""
        ...

    def state_dict(self) -> dict[str, int | float]:
        """Return the state that changes in training, as JSON values."""
        ...

    def load_state_dict(self, state: Mapping[str, int | float]) -> None:
        """Continue from a `state_dict`."""
        ...


class StaticScale:
    """A scale that never changes; 1 is no scaling at all."""

    def __init__(self, value: float = 1.0) -> None:
        self._value = _positive("fp16.loss_scale", value)

    @property
    def value(self) -> float:
        return self._value

    def update(self, overflow: bool) -> None:
        """Do nothing: a step that overflowed is skipped, and the next one runs at the same scale."""

    def state_dict(self) -> dict[str, int | float]:
        """Return no state: the scale comes from the configuration."""
        return {}

    def load_state_dict(self, state: Mapping[str, int | float]) -> None:
        """Ignore the checkpoint: keep the configured scale."""


class DynamicScale:
    """A scale that halves when gradients overflow and doubles after a window of clean steps.

    The first value is `2 ** initial_scale_power`. Overflow at `min_loss_scale` raises `LossScaleError`, unless
    `stays_at_minimum`.
    """

    def __init__(self, *, initial_scale_power: int = 16, loss_scale_window: int = 1000, hysteresis: int = 2,
                 consecutive_hysteresis: bool = False, min_loss_scale: float = 1.0, stays_at_minimum: bool = False) -> None:
        self.smallest = _positive("fp16.min_loss_scale", min_loss_scale)
        self.window = _count("fp16.loss_scale_window", loss_scale_window)
        self.hysteresis = _count("fp16.hysteresis", hysteresis)
        self.consecutive = consecutive_hysteresis
        self.stays_at_minimum = stays_at_minimum
        self._value = 2.0**initial_scale_power
        if self._value < self.smallest:
            raise ConfigError(f"fp16.initial_scale_power: got {initial_scale_power}, a scale of {self._value:g}; it "
                              f"must be at least fp16.min_loss_scale ({self.smallest:g})")
        self._patience = self.hysteresis
        self._clean = 0
        self._steps = 0

    @property
    def value(self) -> float:
        return self._value

    def update(self, overflow: bool) -> None:
        """Apply the rule above to one step; raises `LossScaleError` when the scale cannot shrink further."""
        if overflow:
            self._overflowed()
        else:
            self._passed()
        self._steps += 1

    def _overflowed(self) -> None:
        self._clean = 0
        if self._patience > 1:
            self._patience -= 1
        elif self._value > self.smallest:
            self._value = max(self._value / 2, self.smallest)
        elif not self.stays_at_minimum:
            raise LossScaleError(
                f"step {self._steps}: the gradients overflow at loss scale {self._value:g}, the smallest that "
                f"fp16.min_loss_scale allows; the weights are as before this step. The loss itself is probably inf or "
                f"nan: look for a bad sample or a division by zero, lower the learning rate or lengthen its warm-up, "
                f"or train in bf16, which needs no loss scale")

    def _passed(self) -> None:
        grow = self._clean > 0 and self._clean % self.window == 0
        self._clean += 1
        if grow:
            self._value *= 2
        if grow or self.consecutive:
            self._patience = self.hysteresis

    def state_dict(self) -> dict[str, int | float]:
        """Return the value, the remaining patience, and the counts of consecutive clean steps and of all steps."""
        return {"value": self._value, "patience": self._patience, "clean": self._clean, "steps": self._steps}

    def load_state_dict(self, state: Mapping[str, int | float]) -> None:
        """Continue from `state`; a static scale's state (empty) leaves this one at its start."""
        if not state:
            return
        missing = self.state_dict().keys() - state.keys()
        if missing:
            raise CheckpointError(f"loss scale: the checkpoint lacks {', '.join(sorted(missing))}; it has "
                                  f"{', '.join(sorted(state))}; was it saved by another class of loss scale?")
        self._value = max(float(state["value"]), self.smallest)
        self._patience = min(int(state["patience"]), self.hysteresis)
        self._clean = int(state["clean"])
        self._steps = int(state["steps"])


def make_loss_scale(*, loss_scale: float = 0.0, initial_scale_power: int = 16, loss_scale_window: int = 1000,
                    hysteresis: int = 2, consecutive_hysteresis: bool = False,
                    min_loss_scale: float = 1.0) -> LossScale:
    """Build the scale that the `fp16` section describes: static for a positive `loss_scale`, dynamic for 0."""
    if loss_scale != 0:
        return StaticScale(loss_scale)
    return DynamicScale(initial_scale_power=initial_scale_power, loss_scale_window=loss_scale_window,
                        hysteresis=hysteresis, consecutive_hysteresis=consecutive_hysteresis,
                        min_loss_scale=min_loss_scale)


def _positive(key: str, value: float) -> float:
    if isinstance(value, bool) or not math.isfinite(value) or value <= 0:
        raise ConfigError(f"{key}: got {value!r}; it must be a finite number above 0")
    return float(value)


def _count(key: str, value: int) -> int:
    if isinstance(value, bool) or value < 1:
        raise ConfigError(f"{key}: got {value!r}; it must be an integer of 1 or more")
    return value
