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

import torch

from shoal.errors import TierError
from shoal.optim.step_pass import StepPass
from shoal.optim.views import MasterView
from shoal.tier import JoinedTransfers, Lanes, Transfer
from shoal.tier.span import DONE
from shoal.zero.optimizer_state import OptimizerState
from shoal.zero.placement import SHARD
from shoal.zero.trainable_unit import TrainableUnit

__all__ = ["DeferredStep", "MomentPrefetcher", "StepScheduler", "began_in_backward"]


@dataclass(slots=True, kw_only=True)
class _StepPiece:
    """Views that are stepped together, and the units that are whole once they are."""

    sweep: StepPass
    views: list[MasterView] = field(default_factory=list[MasterView])
    units: list[TrainableUnit] = field(default_factory=list[TrainableUnit])
    arriving: Transfer = DONE

    @property
    def name(self) -> str:
        return self.views[0].unit.name if self.views else "nothing"

    @property
    def away(self) -> bool:
        return any(_is_offloaded(view.unit) for view in self.views)


_Source = Callable[[int], _StepPiece | None]
"""Gives the next piece, if there is one now; it is told how many others are left to do."""


class DeferredStep:
    """The step of one unit that the scheduler's thread takes, or that backward has taken (a `PendingStep` of the unit)."""

    def __init__(self, scheduler: StepScheduler, unit: TrainableUnit, *, in_backward: bool = False):
        self._scheduler, self._unit = scheduler, unit
        self._in_backward = in_backward
        self._is_taken = False
        self.keeps_weights = False
        """Whether the step leaves the weights in memory: the next pass needs the unit."""

    @property
    def is_taken(self) -> bool:
        return self._is_taken

    @property
    def in_backward(self) -> bool:
        return self._in_backward

    def request(self) -> None:
        if not (self._in_backward or self._is_taken):
            self._scheduler.settle(self._unit, wait=False)  # it may have been taken long ago, and its weights been given up
        self.keeps_weights = not self._is_taken

    def finish(self) -> None:
        if not self._is_taken:
            self._scheduler.settle(self._unit)

    def mark_taken(self) -> None:
        """Note that the weights show the step."""
        self._is_taken = True

    def leave_backward(self) -> None:
        """Note that `engine.step()` has begun: from now on the weights may be asked for."""
        self._in_backward = False


class StepScheduler:
    """Takes steps, piece by piece; `ahead` are fetched while one is stepped, and `behind` may be on their way back.

    Of all `units` those that are taken in backward hold at most `waiting` bytes in memory together, or one does more.
    """

    def __init__(self, units: Sequence[TrainableUnit], *, at_once: int, ahead: int, behind: int, waiting: int, lanes: Lanes):
        self._units = units
        self._at_once = at_once
        self._ahead = ahead
        self._behind = behind
        self._waiting = waiting
        self._lanes = lanes
        self._leaving: deque[Transfer] = deque()  # the last of a step are still on their way when the next forward begins
        self._deferred: deque[TrainableUnit] = deque()
        self._stepped = 0  # how many of these the thread has stepped
        self._queue: deque[_StepPiece] = deque()  # of these, for the thread
        self._held: dict[TrainableUnit, int] = {}  # bytes
        self._prefetcher = MomentPrefetcher()
        self._failure: BaseException | None = None
        self._thread: threading.Thread | None = None
        self._idle = True  # whether the thread has ended, or will without taking another piece
        self._owner = os.getpid()
        self._lock = threading.RLock()  # and not the condition: its entrance is no place for an interrupt
        self._changed = threading.Condition(self._lock)

    def measure(self, touched: Mapping[TrainableUnit, int], views: Sequence[MasterView], sweep: StepPass,
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

    def run(self, touched: Mapping[TrainableUnit, int], views: Sequence[MasterView], sweep: StepPass, *, wait: bool) -> None:
        """Step `views`, those of the units of `touched` that received a gradient on some rank, and publish these units.

        With `wait`, units that can are stepped later. Units that backward has taken are only published.
        """
        units = [unit for unit, mask in touched.items() if mask]
        begun = {unit for unit in units if began_in_backward(unit)}
        self.check() if begun else self.settle()
        later = [unit for unit in units if wait and unit not in begun and _can_wait(unit)]
        now = [unit for unit in units if unit not in begun and unit not in later]
        if now or not begun:
            self._join()
        try:
            for unit in self._stream(_given(self._pieces(now, views, sweep))):
                if not begun:
                    _publish(unit)
            for unit in units if begun else ():  # all ranks publish in one order, whichever units backward has stepped
                if unit in begun:
                    self._end_backward_step(unit)
                elif unit in now:
                    _publish(unit)
        except BaseException as error:
            self.fail(error)
            raise
        self._defer(later, self._pieces(later, views, sweep))

    @torch.no_grad()
    def take(self, unit: TrainableUnit, views: Sequence[MasterView], sweep: StepPass, *, beside: bool) -> None:
        """Step the `views` of `unit`, all that it has, while backward goes on with others; at once unless `beside`."""
        self.check()
        step = DeferredStep(self, unit, in_backward=True)
        unit.begin_step(step)
        pieces = self._pieces([unit], views, sweep)
        if beside:
            self._admit(unit)
            self._defer([unit], pieces)
        else:
            self._join()
            deque(self._stream(_given(pieces)), maxlen=0)
            step.mark_taken()

    def expect(self, views: Iterable[MasterView]) -> None:
        """Bring moments before their units are taken, those of `views` in their order; without any, nothing more will be."""
        self._prefetcher.expect(view for view in views if _is_offloaded(view.unit))
        self._prefetcher.bring(self._ahead + 1)

    def fail(self, error: BaseException) -> None:
        """Note that a step was taken in part: nobody reads the weights of any unit any more."""
        self._failure = self._failure or error
        self._deferred.clear()  # nobody takes note of what the thread has still stepped
        for unit in self._units:
            unit.poison(DeferredStep(self, unit))

    def settle(self, unit: TrainableUnit | None = None, *, wait: bool = True) -> None:
        """Wait until the step of `unit` is taken, or of all units; raises what went wrong with it, from then on always.

        Unless `wait`, only take note of what is taken already: whoever asks for weights is told the rest.
        """
        if self._deferred and os.getpid() != self._owner:
            raise TierError(f"unit '{self._deferred[0].name}' is stepped by process {self._owner}, from which this one was "
                            f"forked; read weights in the process that trains")
        while self._deferred and (unit is None or unit.is_owed):
            if wait:
                with self._lock, self._lanes.during("wait", self._deferred[0].name):
                    self._changed.wait_for(lambda: self._stepped or self._failure is not None)
            if not self._stepped:
                break
            _end(self._deferred[0])
            self._deferred.popleft()
            with self._lock:
                self._stepped -= 1
        if wait and (unit is None or unit.is_owed):
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

    def _end_backward_step(self, unit: TrainableUnit) -> None:
        """Publish a unit that backward has stepped, or let the thread's step of it be an ordinary deferred one."""
        step = unit.pending
        assert isinstance(step, DeferredStep)
        if not _can_wait(unit):
            step.finish()
        step.leave_backward()
        if step.is_taken:
            _publish(unit)

    def _admit(self, unit: TrainableUnit) -> None:
        """Wait until what `unit` holds in memory before its step is taken may be there too."""
        size = unit.gradient.bytes * (2 if unit.state.rounded is None else 1) if _is_offloaded(unit) else 0
        with self._lock, self._lanes.during("wait", unit.name):
            self._changed.wait_for(lambda: self.failed or not (held := sum(self._held.values()))
                                   or held + size <= self._waiting)
            self._held[unit] = size
        self.check()

    def _defer(self, units: list[TrainableUnit], pieces: Iterable[_StepPiece]) -> None:
        """Let the thread step `units`; whatever interrupts this leaves a step that was taken in part."""
        if not units:
            return
        try:
            for unit in units:
                if unit.pending is None:
                    unit.begin_step(DeferredStep(self, unit))
            with self._lock:
                self._deferred.extend(units)
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
            self._prefetcher.bring(self._ahead + 1 - left)
            self._idle = not left
            return None

    def _fetch(self, piece: _StepPiece) -> _StepPiece:
        piece.arriving = JoinedTransfers([view.unit.state.fetch(view.part, piece.sweep.use) for view in piece.views])
        self._prefetcher.met(piece.views)
        return piece

    def _stream(self, source: _Source) -> Iterator[TrainableUnit]:
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
                _release_gradient(unit, piece.sweep)
                yield unit
            while len(self._leaving) > self._behind:
                with self._lanes.during("commit", piece.name):
                    self._leaving.popleft().wait()

    def _pieces(self, units: Sequence[TrainableUnit], views: Sequence[MasterView], sweep: StepPass) -> Iterator[_StepPiece]:
        of_unit: dict[TrainableUnit, list[MasterView]] = {unit: [] for unit in units}
        for view in views:
            if view.unit in of_unit:
                of_unit[view.unit].append(view)
        piece, elements = _StepPiece(sweep=sweep), 0
        for unit, some in of_unit.items():
            for view in some:
                size = view.stop - view.start
                if piece.views and (_is_offloaded(unit) or piece.away or elements + size > self._at_once):
                    yield piece
                    piece, elements = _StepPiece(sweep=sweep), 0
                piece.views.append(view)
                elements += size
            piece.units.append(unit)
        if piece.views or piece.units:
            yield piece


class MomentPrefetcher:
    """Brings moments ahead of the steps that are expected; any thread may call it."""

    def __init__(self) -> None:
        self._expected: dict[int, MasterView] = {}  # by identity, in their order
        self._foreseen: dict[int, MasterView] = {}  # of these, whose moments are in memory or on their way already
        self._lock = threading.Lock()

    def expect(self, views: Iterable[MasterView]) -> None:
        """Expect steps of `views`, whose state comes and goes, in that order; those of before do not come."""
        with self._lock:
            for view in self._foreseen.values():
                _state(view).expect_no_more(view.part)
            self._expected, self._foreseen = {id(view): view for view in views}, {}

    def bring(self, room: int) -> None:
        """Start bringing the moments of what is expected next, of `room` views at most."""
        with self._lock:
            while self._expected and len(self._foreseen) < room:
                key = next(iter(self._expected))
                view = self._foreseen[key] = self._expected.pop(key)
                _state(view).expect(view.part)

    def met(self, views: Iterable[MasterView]) -> None:
        """Leave `views` to their step, which has fetched what it needs."""
        with self._lock:
            for view in views:
                self._expected.pop(id(view), None)
                if self._foreseen.pop(id(view), None) is not None:
                    _state(view).expect_no_more(view.part)


def _state(view: MasterView) -> OptimizerState:
    return view.unit.state


def _given(pieces: Iterator[_StepPiece]) -> _Source:
    return lambda left: next(pieces, None)


def began_in_backward(unit: TrainableUnit) -> bool:
    """Whether backward has begun the step of `unit`, which `engine.step()` has yet to end."""
    return unit.pending is not None and unit.pending.in_backward


def _is_offloaded(unit: TrainableUnit) -> bool:
    """Whether the step of `unit` fetches its state."""
    return unit.state.granule is not None


def _can_wait(unit: TrainableUnit) -> bool:
    """Whether every reader of the unit's weights or state asks for them first."""
    alone = unit.stage.weight is SHARD or unit.stage.master is not SHARD or unit.communicator.ranks == 1  # to publish it
    return alone and unit.is_released and not unit.is_exposed and unit.offloaded and _is_offloaded(unit)


def _keeps_weights(unit: TrainableUnit, sweep: StepPass) -> bool:
    return sweep.use.weights and isinstance(unit.pending, DeferredStep) and unit.pending.keeps_weights


def _release_gradient(unit: TrainableUnit, sweep: StepPass) -> None:
    """Discard the gradient that `sweep` has consumed, and weights that stayed in memory for it."""
    unit.gradient.discard()
    if sweep.use.weights and not _keeps_weights(unit, sweep):
        unit.residency.unpin()


def _end(unit: TrainableUnit) -> None:
    """Note that the thread has stepped `unit`; `run` publishes in its turn a unit that backward has begun."""
    step = unit.pending
    assert isinstance(step, DeferredStep)
    step.mark_taken()
    if not step.in_backward:
        _publish(unit)


@torch.no_grad()
def _publish(unit: TrainableUnit) -> None:
    """Forget the gradient that the step has consumed, and let the other ranks see the weights."""
    unit.end_step()
    unit.gradient.reset()
    unit.publish()


def _commit(piece: _StepPiece) -> Transfer:
    for view in piece.views:
        if _keeps_weights(view.unit, piece.sweep):
            view.unit.keep_part_resident(view.part, by_step=True)
    return JoinedTransfers([view.unit.state.commit(view.part, piece.sweep.use) for view in piece.views])
