"""A step that is taken before it is known whether it should be: it can be undone until it is accepted.

    begin    unit by unit, before its state is stepped: what is written goes to a second place on the disk
    accept   what was written is the state
    undo     the state is what it was, bit for bit

Only what rests on a disk has room for both, so units of which anything that the step writes rests elsewhere are not
attempted; nor is any more once the disk has none. What the optimizer itself holds of a view, step counts and the like, is
changed in a copy until then.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from shoal.errors import TierError
from shoal.log import logger
from shoal.optim.step_pass import same_options
from shoal.optim.views import MasterView
from shoal.tier import DiskSpan, StoragePlan, on_disk
from shoal.zero.unit import Unit

__all__ = ["SpeculativeStep"]


class SpeculativeStep:
    """Steps of units by `optimizer` that may yet be undone."""

    def __init__(self, optimizer: Optimizer, place: StoragePlan):
        self._optimizer = optimizer
        self._place = place
        self._spans: list[DiskSpan] = []
        self._moments: dict[Unit, set[str]] = {}
        self._states: dict[Tensor, _HeldState] = {}  # by the views' parameters
        self._changing = threading.Lock()  # of states, which the thread that steps changes too
        self._no_room: bool | None = None  # not known before the first attempt

    @property
    def begun(self) -> bool:
        """Whether steps were begun that are neither accepted nor undone."""
        return bool(self._moments)

    def begin(self, unit: Unit, undo: Callable[[], None]) -> bool:
        """Prepare for a step of all of `unit`; return whether it can be undone.

        Whoever asks for the unit's weights before `accept` calls `undo`.
        """
        assert unit.state is not None
        written = [unit.state.master, *unit.state.moments.values()]
        found = [on_disk(span) for span in (*written, *([] if unit.state.rounded is None else [unit.state.rounded]))]
        spans = [span for span in found if span is not None]
        if len(spans) < len(found) or unit.state.store.granule is None or not self._have_room(spans):
            return False
        self._moments[unit], unit.undo = {*unit.state.moments}, undo
        for span in spans:
            span.attempt()
            self._spans.append(span)
        return True

    def _have_room(self, spans: Sequence[DiskSpan]) -> bool:
        """Have a second place for what `spans` hold, until the disk has none once; return whether it is there."""
        if self._no_room is None:  # others may have filled the disk since training began
            self._no_room = not self._place.has_room
            if self._no_room:
                logger.info("steps wait for the end of backward: what one writes within it would take more than half of "
                            "what is free on the disk; offload_optimizer.step_in_backward true asks for it")
        try:
            for span in () if self._no_room else spans:
                span.double()
        except TierError as error:
            self._no_room = True
            for span in spans:
                span.single()
            self._give_back()
            logger.warning("from now on steps wait for the end of backward: there is no room for what one writes within it "
                           "beside what is there: %s", error)
        return not self._no_room

    @contextmanager
    def states(self, view: MasterView) -> Generator[dict[str, Any]]:
        """Give what the optimizer holds of `view` to a step of it: a copy, if that may be undone."""
        with self._changing:
            if view.unit not in self._moments:
                yield self._optimizer.state[view.parameter]
                return
            if view.parameter not in self._states:
                held = self._optimizer.state.get(view.parameter, {})
                self._states[view.parameter] = _HeldState(view=view, before=_copied(held), since=_copied(held))
            yield self._states[view.parameter].since

    @property
    def untouched(self) -> bool:
        """Whether what the optimizer holds is what it was when the attempt was made."""
        with self._changing:
            return all(same_options([held.before], [self._optimizer.state.get(parameter, {})])
                       for parameter, held in self._states.items())

    def accept(self) -> None:
        """Let what was stepped stand, and what is still to be stepped of it."""
        for span in self._spans:
            span.accept()
        with self._changing:
            for held in sorted(self._states.values(), key=lambda held: (held.view.unit.index, held.view.start)):
                _take_over(held.since, self._optimizer.state[held.view.parameter])
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
        self._forget()

    def _forget(self) -> None:
        for unit in self._moments:
            unit.undo = None
        self._spans, self._moments, self._states = [], {}, {}
        if self._no_room:
            self._give_back()

    def _give_back(self) -> None:
        """Let others have the second places: where there is no room for all of them, somebody may need it."""
        for swap in self._place.swaps:
            swap.reclaim()


@dataclass(frozen=True, slots=True, kw_only=True)
class _HeldState:
    """What the optimizer held of a view before the attempt, and since."""

    view: MasterView
    before: dict[str, Any]
    since: dict[str, Any]


def _copied(held: dict[str, Any]) -> dict[str, Any]:
    """Return `held` as it is now: a scalar changes in place, and what has elements rests where it can be brought back."""
    return {name: value.clone() if isinstance(value, Tensor) and not value.dim() else value for name, value in held.items()}


def _take_over(found: dict[str, Any], held: dict[str, Any]) -> None:
    """Have `held` be what was `found`: scalars in place, as a step leaves them."""
    for name, value in found.items():
        there = held.get(name)
        if isinstance(there, Tensor) and isinstance(value, Tensor) and not value.dim():
            there.copy_(value)
        else:
            held[name] = value
