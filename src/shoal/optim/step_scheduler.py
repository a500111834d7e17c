"""The step of all units as one stream of pieces: while one is stepped, the next are fetched and the last on their way back.

    fetch    | 1 | 2 | 3 | 4 |
    step         | 1 | 2 | 3 | 4 |
    commit           | 1 | 2 | 3 | 4 |
    publish                  unit a          unit b

A piece is what the optimizer steps at once: views that are always there go together, up to a number of elements; a view
whose state rests elsewhere goes alone. A unit is published as soon as its last piece is stepped, on every rank in one order.
A step that must know something of all pieces before it changes a weight sweeps over them twice: `measure`, and then `run`.

Nobody sees the weights of a released unit before it is gathered. So units whose weights and state both come and go are
*owed*: a thread takes their step while the next forward computes, and whoever asks for the weights of one waits for it.
Where nothing about a step is decided after backward, that thread takes a unit as soon as its gradient is there, and the
gradient never rests: `take`. `run` then finishes the step, and publishes, for the order in which ranks do that is one.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch

from shoal.errors import TierError
from shoal.optim.moment_prefetch import MomentPrefetcher
from shoal.optim.step_pass import StepPass
from shoal.optim.views import MasterView
from shoal.tier import JoinedTransfers, Lanes, Transfer
from shoal.tier.span import DONE
from shoal.zero.placement import SHARD
from shoal.zero.unit import Unit

__all__ = ["StepScheduler"]


@dataclass(slots=True, kw_only=True)
class _StepPiece:
    """Views that are stepped together, and the units that are whole once they are."""

    sweep: StepPass
    views: list[MasterView] = field(default_factory=list[MasterView])
    units: list[Unit] = field(default_factory=list[Unit])
    arriving: Transfer = DONE

    @property
    def name(self) -> str:
        return self.views[0].unit.name if self.views else "nothing"

    @property
    def away(self) -> bool:
        return any(_is_away(view.unit) for view in self.views)


_Source = Callable[[int], _StepPiece | None]
"""Gives the next piece, if there is one now; it is told how many others are left to do."""


class StepScheduler:
    """Takes steps, piece by piece; `ahead` are fetched while one is stepped, and `behind` may be on their way back.

    Of all `units` those that are taken in backward hold at most `waiting` bytes in memory together, or one does more.
    """

    def __init__(self, units: Sequence[Unit], *, at_once: int, ahead: int, behind: int, waiting: int, lanes: Lanes):
        self._units = units
        self._at_once = at_once
        self._ahead = ahead
        self._behind = behind
        self._waiting = waiting
        self._lanes = lanes
        self._leaving: deque[Transfer] = deque()  # the last of a step are still on their way when the next forward begins
        self._owed: deque[Unit] = deque()
        self._stepped = 0  # how many of these the thread has stepped
        self._queue: deque[_StepPiece] = deque()  # of these, for the thread
        self._held: dict[Unit, int] = {}  # bytes
        self._foresight = MomentPrefetcher()
        self._failure: BaseException | None = None
        self._thread: threading.Thread | None = None
        self._idle = True  # whether the thread has ended, or will without taking another piece
        self._owner = os.getpid()
        self._lock = threading.RLock()  # and not the condition: its entrance is no place for an interrupt
        self._changed = threading.Condition(self._lock)

    def measure(self, touched: Mapping[Unit, int], views: Sequence[MasterView], sweep: StepPass,
                agree: Callable[[], None]) -> None:
        """Take `sweep` over the `views` that `run` will step, and let the ranks `agree` on what it found.

        It consumes the gradients, and changes moments but no weights.
        """
        self.settle()
        self._join()
        try:
            pieces = self._pieces([unit for unit, mask in touched.items() if mask], views, sweep)
            deque(self._stream(_given(pieces)), maxlen=0)
            agree()
        except BaseException as error:
            self.fail(error)
            raise

    def run(self, touched: Mapping[Unit, int], views: Sequence[MasterView], sweep: StepPass, *, wait: bool) -> None:
        """Step `views`, those of the units of `touched` that received a gradient on some rank, and publish these units.

        With `wait`, units that can are stepped later. Units that backward has taken are only published.
        """
        units = [unit for unit, mask in touched.items() if mask]
        taken = any(unit.stepped for unit in units)
        self.check() if taken else self.settle()
        later = [unit for unit in units if wait and not unit.stepped and _can_wait(unit)]
        now = [unit for unit in units if not unit.stepped and unit not in later]
        if now or not taken:
            self._join()
        try:
            for unit in self._stream(_given(self._pieces(now, views, sweep))):
                unit.stepped = taken
                _finish(unit)
            for unit in units:
                self._conclude(unit)
        except BaseException as error:
            self.fail(error)
            raise
        self._owe(later, self._pieces(later, views, sweep))

    @torch.no_grad()
    def take(self, unit: Unit, views: Sequence[MasterView], sweep: StepPass, *, beside: bool) -> None:
        """Step the `views` of `unit`, all that it has, while backward goes on with others; at once unless `beside`."""
        self.check()
        unit.stepped = True
        pieces = self._pieces([unit], views, sweep)
        if beside:
            self._admit(unit)
            self._owe([unit], pieces)
        else:
            self._join()
            deque(self._stream(_given(pieces)), maxlen=0)

    def expect(self, views: Iterable[MasterView]) -> None:
        """Bring moments before their units are taken, those of `views` in their order; without any, nothing more will be."""
        self._foresight.expect(view for view in views if _is_away(view.unit))
        self._foresight.bring(self._ahead + 1)

    def fail(self, error: BaseException) -> None:
        """Note that a step was taken in part: nobody reads the weights of any unit any more."""
        self._failure = self._failure or error
        self._owed.clear()  # nobody takes note of what the thread has still stepped
        for unit in self._units:
            unit.spoil(partial(self.settle, unit))

    def settle(self, unit: Unit | None = None, *, wait: bool = True) -> None:
        """Wait until the step of `unit` is taken, or of all units; raises what went wrong with it, from then on always.

        Unless `wait`, only take note of what is taken already: whoever asks for weights is told the rest.
        """
        if self._owed and os.getpid() != self._owner:
            raise TierError(f"unit '{self._owed[0].name}' is stepped by process {self._owner}, from which this one was "
                            f"forked; read weights in the process that trains")
        while self._owed and (unit is None or unit.owed is not None):
            if wait:
                with self._lock, self._lanes.during("wait", self._owed[0].name):
                    self._changed.wait_for(lambda: self._stepped or self._failure is not None)
            if not self._stepped:
                break
            _finish(self._owed[0])
            self._owed.popleft()
            with self._lock:
                self._stepped -= 1
        if wait and (unit is None or unit.owed is not None):
            self.check()

    def close(self) -> None:
        """Take no more steps, and let the one that is being taken end."""
        with self._lock:
            self._queue.clear()
        self._join()

    def check(self) -> None:
        """Raise `TierError` once a step was taken in part."""
        if self._failure is not None:
            self.fail(self._failure)  # which may have been the thread's
            said = str(self._failure) or type(self._failure).__name__
            raise TierError(f"a step was taken in part, and its weights are of no use: load a checkpoint into a new engine. "
                            f"What went wrong: {said}") from self._failure

    @property
    def failed(self) -> bool:
        """Whether a step was taken in part."""
        return self._failure is not None

    def _conclude(self, unit: Unit) -> None:
        """End the step of a unit that was taken in backward, or that waits for one to be published in its turn."""
        if unit.stepped:
            if not _can_wait(unit):
                self.settle(unit)
            unit.stepped = False
            if unit.owed is None:
                _finish(unit)

    def _admit(self, unit: Unit) -> None:
        """Wait until what `unit` holds in memory before its step is taken may be there too."""
        assert unit.gradient is not None and unit.state is not None
        size = unit.gradient.bytes * (2 if unit.state.rounded is None else 1) if _is_away(unit) else 0
        with self._lock, self._lanes.during("wait", unit.name):
            self._changed.wait_for(lambda: self.failed or not (held := sum(self._held.values()))
                                   or held + size <= self._waiting)
            self._held[unit] = size
        self.check()

    def _owe(self, units: list[Unit], pieces: Iterable[_StepPiece]) -> None:
        """Let the thread step `units`; whatever interrupts this leaves a step that was taken in part."""
        if not units:
            return
        try:
            for unit in units:
                unit.owed = partial(self.settle, unit)
            with self._lock:
                self._owed.extend(units)
                self._queue.extend(pieces)
                idle, self._idle = self._idle, False
            if idle:
                self._join()
                self._thread = threading.Thread(target=self._serve, name="shoal-step")
                self._thread.start()
        except BaseException as error:
            self.fail(error)
            raise

    def _join(self) -> None:
        """Wait until the thread has stepped all that it was given."""
        if self._thread is not None:
            self._thread.join()

    def _serve(self) -> None:
        """Take the steps that are owed; the thread's body."""
        try:
            with torch.no_grad():
                for unit in self._stream(self._next):
                    with self._lock:
                        self._stepped += 1
                        self._held.pop(unit, None)
                        self._changed.notify_all()
        except BaseException as error:  # whoever waits raises it
            with self._lock:
                self._failure = error
                self._changed.notify_all()

    def _next(self, left: int) -> _StepPiece | None:
        """Return the thread's next piece; it ends if there is none, and none are `left` of those it has."""
        with self._lock:
            if self._queue:
                return self._queue.popleft()
            self._foresight.bring(self._ahead + 1 - left)
            self._idle = not left
            return None

    def _fetch(self, piece: _StepPiece) -> _StepPiece:
        piece.arriving = JoinedTransfers([view.unit.state.fetch(view.part, piece.sweep.use)
                                   for view in piece.views if view.unit.state is not None])
        self._foresight.met(piece.views)
        return piece

    def _stream(self, source: _Source) -> Iterator[Unit]:
        """Step what `source` gives, and yield each unit when it is stepped."""
        fetched: deque[_StepPiece] = deque()
        while True:
            while len(fetched) <= self._ahead and (piece := source(len(fetched))) is not None:
                fetched.append(self._fetch(piece))
            if not fetched:
                return
            piece = fetched.popleft()
            with self._lanes.during("fetch", piece.name):
                piece.arriving.wait()
            if piece.views:
                with self._lanes.during("step", piece.name):
                    piece.sweep.step(piece.views, piece.sweep.factor, piece.sweep.options)
            self._leaving.append(_commit(piece))
            for unit in piece.units:
                _let_go(unit, piece.sweep)
                yield unit
            while len(self._leaving) > self._behind:
                with self._lanes.during("commit", piece.name):
                    self._leaving.popleft().wait()

    def _pieces(self, units: Sequence[Unit], views: Sequence[MasterView], sweep: StepPass) -> Iterator[_StepPiece]:
        of_unit: dict[Unit, list[MasterView]] = {unit: [] for unit in units}
        for view in views:
            if view.unit in of_unit:
                of_unit[view.unit].append(view)
        piece, elements = _StepPiece(sweep=sweep), 0
        for unit, some in of_unit.items():
            for view in some:
                size = view.stop - view.start
                if piece.views and (_is_away(unit) or piece.away or elements + size > self._at_once):
                    yield piece
                    piece, elements = _StepPiece(sweep=sweep), 0
                piece.views.append(view)
                elements += size
            piece.units.append(unit)
        if piece.views or piece.units:
            yield piece


def _given(pieces: Iterator[_StepPiece]) -> _Source:
    return lambda left: next(pieces, None)


def _is_away(unit: Unit) -> bool:
    """Whether the step of `unit` brings what it needs."""
    return unit.state is not None and unit.state.granule is not None


def _can_wait(unit: Unit) -> bool:
    """Whether nobody sees the unit's weights or state before asking for them."""
    alone = unit.stage.weight is SHARD or unit.stage.master is not SHARD or unit.communicator.ranks == 1  # to publish it
    return alone and unit.is_released and unit.lent is None and unit.away and _is_away(unit)


def _let_go(unit: Unit, sweep: StepPass) -> None:
    """Give up what was there for `sweep` alone."""
    if unit.gradient is not None and unit.state is not None:
        unit.gradient.spend()
        if sweep.use.weights and not unit.expected:
            unit.stay.unpin()


@torch.no_grad()
def _finish(unit: Unit) -> None:
    """Forget the gradient that the step has consumed, and let the others see the weights, unless `run` has yet to do so."""
    unit.owed = None
    if not unit.stepped:
        if unit.gradient is not None:
            unit.gradient.reset()
        unit.publish()


def _commit(piece: _StepPiece) -> Transfer:
    for view in piece.views:
        if view.unit.expected and view.unit.state is not None and piece.sweep.use.weights:
            view.unit.keep(view.part)
    return JoinedTransfers([view.unit.state.commit(view.part, piece.sweep.use)
                     for view in piece.views if view.unit.state is not None])
