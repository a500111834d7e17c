"""A step that is taken before it is known whether it should be: it can be undone until it is accepted.

    begin    unit by unit, before its state is stepped: what is written goes to a second place on the disk
    accept   what was written is the state
    undo     the state is what it was, bit for bit

Only what rests on a disk has room for both, so units of which anything that the step writes rests elsewhere are not
attempted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from shoal.optim.views import View
from shoal.tier import Swapped, on_disk
from shoal.zero.unit import Unit

__all__ = ["Attempt"]


class Attempt:
    """Steps of units by `optimizer` that may yet be undone."""

    def __init__(self, optimizer: Optimizer):
        self._optimizer = optimizer
        self._spans: list[Swapped] = []
        self._moments: dict[Unit, set[str]] = {}
        self._scalars: list[tuple[View, dict[str, Any]]] = []

    @property
    def begun(self) -> bool:
        """Whether steps were begun that are neither accepted nor undone."""
        return bool(self._moments)

    def begin(self, unit: Unit, views: Sequence[View]) -> bool:
        """Prepare for a step of `views`, all that `unit` has; return whether it can be undone.

        Raises `TierError` when the disk has no room for both states.
        """
        assert unit.state is not None
        written = [unit.state.master, *unit.state.moments.values()]
        spans = [on_disk(span) for span in (*written, *([] if unit.state.rounded is None else [unit.state.rounded]))]
        if any(span is None for span in spans) or unit.state.store.granule is None:
            return False
        self._moments[unit] = {*unit.state.moments}
        for span in spans:
            assert span is not None
            span.attempt()
            self._spans.append(span)
        for view in views:
            state = self._optimizer.state.get(view.parameter, {})
            self._scalars.append((view, {name: _copied(value) for name, value in state.items()}))
        return True

    def accept(self) -> None:
        """Let what was stepped stand."""
        for span in self._spans:
            span.accept()
        self._forget()

    def undo(self) -> None:
        """Bring back the state of before; nobody steps or reads any of it now."""
        for span in self._spans:
            span.undo()
        for unit, kinds in self._moments.items():
            assert unit.state is not None
            for kind in unit.state.moments.keys() - kinds:  # made by the step: zeros again
                made = on_disk(unit.state.moments[kind])
                assert made is not None
                made.discard()
        for view, state in self._scalars:
            self._optimizer.state.pop(view.parameter, None)
            if state:
                self._optimizer.state[view.parameter] = state
        self._forget()

    def _forget(self) -> None:
        self._spans, self._moments, self._scalars = [], {}, []


def _copied(value: object) -> object:
    """Return `value` as it is now: a scalar changes in place, and what has elements rests where it can be brought back."""
    return value.clone() if isinstance(value, Tensor) and not value.dim() else value
