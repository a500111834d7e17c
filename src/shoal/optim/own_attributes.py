"""Attributes of an optimizer that are neither its groups nor its state: options, and counts of steps.

A script's optimizer and the copy of it that steps have the same attributes. Those that the script sets reach the copy before
a step, and those that a step sets reach the script's after it. A step may be taken in several calls, each for some of the
slices, or in none where a rank has no slice; so every call begins with the numbers that the step began with, and a rank
without a slice makes one call for the count alone.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from types import MethodType
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

__all__ = ["OwnAttributes", "copied", "own_attributes"]

_TORCHS = frozenset({"defaults", "param_groups", "state", "step", "_handed_over", "_opt_called",
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
    _take(other, optimizer)
    return other


def _take(to: Optimizer, of: Optimizer) -> None:
    """Give `to` the attributes of `of`; a method that is bound to one is bound to the other."""
    vars(to).update({name: MethodType(value.__func__, to) if isinstance(value, MethodType) and value.__self__ is of
                     else value for name, value in own_attributes(of).items()})


def _number(value: object) -> object:
    """Return a plain value, or a copy of a tensor, which a step may change in place."""
    return value.clone() if isinstance(value, Tensor) else value


class OwnAttributes:
    """The attributes that the optimizer which steps has in common with that of the script."""

    def __init__(self, inner: Optimizer):
        self._inner = inner
        self._given: Optimizer | None = None
        self._first: dict[str, Any] = {}
        """The numbers with which the step began."""
        self._called = False

    def share(self, optimizer: Optimizer) -> None:
        """Have the attributes of the script's `optimizer` from now on."""
        self._given = optimizer

    def begin_step(self) -> None:
        """Take over what the script has set."""
        if self._given is not None:
            _take(self._inner, self._given)
        self._called = False
        self._first = {name: _number(value) for name, value in own_attributes(self._inner).items()
                       if isinstance(value, _PLAIN) or (isinstance(value, Tensor) and value.dim() == 0)}

    def begin_call(self) -> None:
        """Begin a call of `step` for some of the slices."""
        self._called = True
        vars(self._inner).update({name: _number(value) for name, value in self._first.items()})

    def count_call(self, call: Callable[[], None]) -> None:
        """Make the `call` for no slices, if the step has attributes to count on and was not called."""
        if self._first and not self._called:
            self.begin_call()
            call()

    def end_step(self) -> None:
        """Let the script see what the step has set."""
        if self._given is not None:
            _take(self._given, self._inner)
