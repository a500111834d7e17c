"""The step of all units as one stream of pieces: while one is stepped, the next are fetched and the last on their way back.

    fetch    | 1 | 2 | 3 | 4 |
    step         | 1 | 2 | 3 | 4 |
    commit           | 1 | 2 | 3 | 4 |
    publish                  unit a          unit b

A piece is what the optimizer steps at once: views that are always there go together, up to a number of elements; a view
whose state rests elsewhere goes alone. A unit is published as soon as its last piece is stepped, on every rank in one order.

Nobody sees the weights of a released unit before it is gathered. So units whose weights and state both come and go are
*owed*: a thread takes their step while the next forward computes, and whoever asks for the weights of one waits for it.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch

from shoal.errors import TierError
from shoal.optim.stepping import Options, Stepping
from shoal.optim.views import View
from shoal.tier import Lanes, Together, Transfer
from shoal.tier.span import DONE
from shoal.zero.placement import SHARD
from shoal.zero.unit import Unit

__all__ = ["Pipeline"]


@dataclass(slots=True, kw_only=True)
class _Piece:
    """Views that are stepped together, and the units that are whole once they are."""

    views: list[View] = field(default_factory=list[View])
    units: list[Unit] = field(default_factory=list[Unit])
    arriving: Transfer = DONE

    @property
    def name(self) -> str:
        return self.views[0].unit.name if self.views else "nothing"

    @property
    def away(self) -> bool:
        return any(view.unit.state is not None and view.unit.state.granule is not None for view in self.views)


class Pipeline:
    """Takes steps, piece by piece; `ahead` are fetched while one is stepped, and `behind` may be on their way back."""

    def __init__(self, step: Stepping, *, at_once: int, ahead: int, behind: int, lanes: Lanes):
        self._step = step
        self._at_once = at_once
        self._ahead = ahead
        self._behind = behind
        self._lanes = lanes
        self._leaving: deque[Transfer] = deque()  # the last of a step are still on their way when the next forward begins
        self._owed: deque[Unit] = deque()
        self._stepped = 0  # how many of these the thread has stepped
        self._failure: BaseException | None = None
        self._thread: threading.Thread | None = None
        self._owner = os.getpid()
        self._changed = threading.Condition()

    def run(self, touched: Mapping[Unit, int], views: Sequence[View], factor: float, options: Options, *,
            wait: bool) -> None:
        """Step `views`, those of the units of `touched` that received a gradient on some rank, and publish these units.

        With `wait`, units that can are stepped later, by the `options` that the optimizer's groups have now.
        """
        self.settle()
        if self._thread is not None:
            self._thread.join()
        units = [unit for unit, mask in touched.items() if mask]
        later = [unit for unit in units if wait and _can_wait(unit)]
        try:
            for unit in self._stream([unit for unit in units if unit not in later], views, factor, options):
                _finish(unit)
        except BaseException as error:
            self._failure = error
            raise
        if later:
            self._owed.extend(later)
            self._stepped = 0
            for unit in later:
                unit.owed = partial(self.settle, unit)
            stream = self._stream(later, views, factor, options)
            self._thread = threading.Thread(target=self._serve, args=(stream,), name="shoal-step")
            self._thread.start()

    def settle(self, unit: Unit | None = None) -> None:
        """Wait until the step of `unit` is taken, or of all units; raises what went wrong with it, from then on always."""
        if self._owed and os.getpid() != self._owner:
            raise TierError(f"unit '{self._owed[0].name}' is stepped by process {self._owner}, from which this one was "
                            f"forked; read weights in the process that trains")
        while self._owed and (unit is None or unit.owed is not None):
            with self._changed, self._lanes.during("wait", self._owed[0].name):
                self._changed.wait_for(lambda: self._stepped or self._failure is not None)
            if not self._stepped:
                break
            _finish(self._owed[0])
            self._owed.popleft()
            with self._changed:
                self._stepped -= 1
        if self._failure is not None and (unit is None or unit.owed is not None):
            raise TierError(f"a step was taken in part, and its weights are of no use: load a checkpoint into a new engine. "
                            f"What went wrong: {self._failure}") from self._failure

    @property
    def failed(self) -> bool:
        """Whether a step was taken in part."""
        return self._failure is not None

    def _serve(self, stream: Iterable[Unit]) -> None:
        """Take the steps that are owed; the thread's body."""
        try:
            with torch.no_grad():
                for _ in stream:
                    with self._changed:
                        self._stepped += 1
                        self._changed.notify_all()
        except BaseException as error:  # whoever waits raises it
            with self._changed:
                self._failure = error
                self._changed.notify_all()

    def _stream(self, units: Sequence[Unit], views: Sequence[View], factor: float, options: Options) -> Iterator[Unit]:
        """Step `units`, and yield each when it is stepped."""
        pieces = deque(self._pieces(units, views))
        fetched: deque[_Piece] = deque()
        while pieces or fetched:
            while pieces and len(fetched) <= self._ahead:
                fetched.append(_fetch(pieces.popleft()))
            piece = fetched.popleft()
            with self._lanes.during("fetch", piece.name):
                piece.arriving.wait()
            if piece.views:
                with self._lanes.during("step", piece.name):
                    self._step(piece.views, factor, options)
            self._leaving.append(_commit(piece))
            yield from piece.units
            while len(self._leaving) > self._behind:
                with self._lanes.during("commit", piece.name):
                    self._leaving.popleft().wait()

    def _pieces(self, units: Sequence[Unit], views: Sequence[View]) -> Iterator[_Piece]:
        of_unit: dict[Unit, list[View]] = {unit: [] for unit in units}
        for view in views:
            if view.unit in of_unit:
                of_unit[view.unit].append(view)
        piece, elements = _Piece(), 0
        for unit, some in of_unit.items():
            for view in some:
                size = view.stop - view.start
                alone = unit.state is not None and unit.state.granule is not None
                if piece.views and (alone or piece.away or elements + size > self._at_once):
                    yield piece
                    piece, elements = _Piece(), 0
                piece.views.append(view)
                elements += size
            piece.units.append(unit)
        if piece.views or piece.units:
            yield piece


def _can_wait(unit: Unit) -> bool:
    """Whether nobody sees the unit's weights or state before asking for them."""
    alone = unit.stage.weight is SHARD or unit.stage.master is not SHARD or unit.communicator.ranks == 1  # to publish it
    return alone and unit.is_released and unit.away and unit.state is not None and unit.state.granule is not None


def _finish(unit: Unit) -> None:
    """Forget the gradient that the step has consumed, and let the others see the weights."""
    if unit.gradient is not None:
        unit.gradient.reset()
    unit.owed = None
    unit.publish()


def _fetch(piece: _Piece) -> _Piece:
    piece.arriving = Together([view.unit.state.fetch(view.part) for view in piece.views if view.unit.state is not None])
    return piece


def _commit(piece: _Piece) -> Transfer:
    return Together([view.unit.state.commit(view.part) for view in piece.views if view.unit.state is not None])
