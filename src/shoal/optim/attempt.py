"""A step that is taken before it is known whether it should be: it can be undone until it is accepted.

    begin    unit by unit, before its state is stepped: what is written goes to a second place on the disk
    accept   what was written is the state
    undo     the state is what it was, bit for bit

Only what rests on a disk has room for both, so units of which anything that the step writes rests elsewhere are not
attempted; nor is any more once the disk has none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from shoal.errors import TierError
from shoal.log import logger
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
        self._no_room = False

    @property
    def begun(self) -> bool:
        """Whether steps were begun that are neither accepted nor undone."""
        return bool(self._moments)

    def begin(self, unit: Unit, views: Sequence[View], undo: Callable[[], None]) -> bool:
        """Prepare for a step of `views`, all that `unit` has; return whether it can be undone.

        Whoever asks for the unit's weights before `accept` calls `undo`.
        """
        assert unit.state is not None
        written = [unit.state.master, *unit.state.moments.values()]
        found = [on_disk(span) for span in (*written, *([] if unit.state.rounded is None else [unit.state.rounded]))]
        spans = [span for span in found if span is not None]
        if len(spans) < len(found) or unit.state.store.granule is None or not self._has_room(spans):
            return False
        self._moments[unit], unit.undo = {*unit.state.moments}, undo
        for span in spans:
            span.attempt()
            self._spans.append(span)
        for view in views:
            state = self._optimizer.state.get(view.parameter, {})
            self._scalars.append((view, {name: _copied(value) for name, value in state.items()}))
        return True

    def _has_room(self, spans: Sequence[Swapped]) -> bool:
        """Whether the disk has room for what `spans` hold and for what is written to them; asked until it has not."""
        try:
            for span in () if self._no_room else spans:
                span.double()
        except TierError as error:
            self._no_room = True
            logger.warning("from now on steps wait for the end of backward: there is no room for what one writes within it "
                           "beside what is there: %s", error)
        return not self._no_room

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
            if state:
                self._optimizer.state[view.parameter] = state
            else:
                self._optimizer.state.pop(view.parameter, None)
        self._forget()

    def _forget(self) -> None:
        for unit in self._moments:
            unit.undo = None
        self._spans, self._moments, self._scalars = [], {}, []


def _copied(value: object) -> object:
    """Return `value` as it is now: a scalar changes in place, and what has elements rests where it can be brought back."""
    return value.clone() if isinstance(value, Tensor) and not value.dim() else value
