"""The step of all units as one stream of pieces: while one is stepped, the next are fetched and the last on their way back.

    fetch    | 1 | 2 | 3 | 4 |
    step         | 1 | 2 | 3 | 4 |
    commit           | 1 | 2 | 3 | 4 |
    publish                  unit a          unit b

A piece is what the optimizer steps at once: views that are always there go together, up to a number of elements; a view
whose state rests elsewhere goes alone. A unit is published as soon as its last piece is stepped, on every rank in one order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from shoal.optim.stepping import Stepping
from shoal.optim.views import View
from shoal.tier import Lanes, Together, Transfer
from shoal.tier.span import DONE
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


class Pipeline:
    """Takes a step, piece by piece."""

    def __init__(self, step: Stepping, *, at_once: int, ahead: int, behind: int, lanes: Lanes):
        self._step = step
        self._at_once = at_once
        self._ahead = ahead
        self._behind = behind
        self._lanes = lanes
        self._leaving: deque[Transfer] = deque()  # the last of a step are still on their way when the next forward begins

    def run(self, touched: Mapping[Unit, int], views: Sequence[View], factor: float) -> None:
        """Step `views`, those of the units of `touched` that received a gradient on some rank, and publish these units."""
        pieces = deque(self._pieces([unit for unit, mask in touched.items() if mask], views))
        fetched: deque[_Piece] = deque()
        while pieces or fetched:
            while pieces and len(fetched) <= self._ahead:
                fetched.append(_fetch(pieces.popleft()))
            piece = fetched.popleft()
            with self._lanes.during("wait", piece.name):
                piece.arriving.wait()
            if piece.views:
                with self._lanes.during("step", piece.name):
                    self._step(piece.views, factor)
            self._leaving.append(_commit(piece))
            for unit in piece.units:
                unit.publish()
            while len(self._leaving) > self._behind:
                with self._lanes.during("wait", "commit"):
                    self._leaving.popleft().wait()

    def _pieces(self, units: Sequence[Unit], views: Sequence[View]) -> Iterator[_Piece]:
        of_unit: dict[Unit, list[View]] = {unit: [] for unit in units}
        for view in views:
            of_unit[view.unit].append(view)
        piece, elements = _Piece(), 0
        for unit, some in of_unit.items():
            assert unit.state is not None
            for view in some:
                size = view.stop - view.start
                if piece.views and (unit.state.granule is not None or elements + size > self._at_once):
                    yield piece
                    piece, elements = _Piece(), 0
                piece.views.append(view)
                elements += size
            piece.units.append(unit)
            if unit.state.granule is not None:
                yield piece
                piece, elements = _Piece(), 0
        if piece.views or piece.units:
            yield piece


def _fetch(piece: _Piece) -> _Piece:
    piece.arriving = Together([view.unit.state.fetch(view.part) for view in piece.views if view.unit.state is not None])
    return piece


def _commit(piece: _Piece) -> Transfer:
    return Together([view.unit.state.commit(view.part) for view in piece.views if view.unit.state is not None])
