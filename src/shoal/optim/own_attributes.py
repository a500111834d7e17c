"""Attributes of an optimizer that are neither its groups nor its state: options, and counts of steps.

A script's optimizer and the copy of it that steps have the same attributes. Those that the script sets reach the copy before
a step, and those that a step sets reach the script's after it. A step may be taken in several calls, each for some of the
slices; every call begins with the plain values that the step began with, so that a count goes up by one.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from typing import Any

from torch.optim import Optimizer

__all__ = ["OwnAttributes", "copied", "own_attributes"]

_TORCHS = frozenset({"defaults", "param_groups", "state", "step", "_handed_over", "_opt_called", "_patched_step",
                     "_step_supports_amp_scaling", "_warned_capturable_if_run_uncaptured", "_zero_grad_profile_name"})
"""Attributes of every optimizer, but for those of hooks, whose names begin alike."""
_HOOKS = "_optimizer_"
_PLAIN = (bool, int, float, str, tuple, type(None))


def own_attributes(optimizer: Optimizer) -> dict[str, Any]:
    """Return the attributes of `optimizer` that are not torch's."""
    return {name: value for name, value in vars(optimizer).items() if name not in _TORCHS and not name.startswith(_HOOKS)}


def copied(optimizer: Optimizer) -> Optimizer:
    """Return a copy with the same groups, state and attributes, without hooks. (`copy.copy` drops attributes.)"""
    other = copy(optimizer)
    vars(other).update(own_attributes(optimizer))
    return other


class OwnAttributes:
    """The attributes that the optimizer which steps has in common with that of the script."""

    def __init__(self, inner: Optimizer):
        self._inner = inner
        self._given: Optimizer | None = None
        self._first: Mapping[str, Any] = {}
        """The plain values with which the step began."""

    def share(self, optimizer: Optimizer) -> None:
        """Have the attributes of the script's `optimizer` from now on."""
        self._given = optimizer

    def begin_step(self) -> None:
        """Take over what the script has set."""
        if self._given is not None:
            vars(self._inner).update(own_attributes(self._given))
        self._first = {name: value for name, value in own_attributes(self._inner).items() if isinstance(value, _PLAIN)}

    def begin_call(self) -> None:
        """Begin a call of `step` for some of the slices."""
        vars(self._inner).update(self._first)

    def end_step(self) -> None:
        """Let the script see what the step has set."""
        if self._given is not None:
            vars(self._given).update(own_attributes(self._inner))
