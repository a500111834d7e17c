"""What the step will need soon comes before it is asked for: the moments of units whose gradient backward is making.

Backward gives the units to be stepped in the order in which it gave them the last time. While the step has nothing else to
bring, the moments of the next ones are brought, as many pieces as it has in memory anyway. A backward in another order
only loses by it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable

from shoal.optim.views import MasterView
from shoal.zero.optimizer_state import OptimizerState

__all__ = ["MomentPrefetcher"]


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
