"""The prefetch window: units are gathered ahead of their use, in the order in which the last pass used them.

Every use of a unit starts the gathers of the units expected next, up to a number of elements (and at least one unit), so
that they travel while the present one computes. Weights that rest in another tier are fetched further ahead, so that
they have arrived when their gather starts. A pass that leaves the expected order only loses the prefetch.
"""

from __future__ import annotations

from collections.abc import Sequence

from shoal.tier import Lanes
from shoal.zero.unit import Unit
from shoal.zero.unit_state import Hold, Phase


class Window:
    """The order in which a pass uses units, and the gathers that run ahead of it."""

    def __init__(self, prefetch_elements: int, live_elements: int, reuse_elements: int = 0, *, fetch_units: int = 0,
                 fetch_elements: int = 0, lanes: Lanes | None = None, all_units: Sequence[Unit] = ()):
        """Gather at most `prefetch_elements` ahead of use, and no more than `live_elements`.

        A unit that is used again within `reuse_elements` stays gathered. Weights that rest in another tier are fetched
        `fetch_units` ahead, of at most `fetch_elements` together. `all_units` are those of all windows of the engine: when a
        pass begins, the window gives up resident weights of any of them that the pass does not begin with.
        """
        self._prefetch_elements = min(prefetch_elements, live_elements)
        self._reuse_elements = reuse_elements
        self._all_units = all_units
        self._fetch_units = fetch_units
        self._fetch_elements = fetch_elements
        self._lanes = lanes or Lanes()
        self._orders: dict[str, list[Unit]] = {}
        self._expected: list[Unit] = []
        self._seen: list[Unit] = []
        self._name = ""

    def begin(self, name: str) -> None:
        """Start the pass `name`; the window expects the order of the last pass of that name."""
        self._name, self._seen = name, []
        self._expected = self._orders.get(name, [])
        self._unpin_others(name)

    def end(self) -> None:
        """Keep the order of the pass that ends."""
        if self._seen:
            self._orders[self._name] = self._seen
        self._expected, self._seen = [], []

    def use(self, unit: Unit) -> None:
        """Gather `unit`, with the next ones on their way."""
        unit.end_hold(Hold.REUSE)
        unit.prefetch()
        if self._seen[-1:] != [unit]:
            self._seen.append(unit)
            if self._expected[len(self._seen) - 1:len(self._seen)] == [unit]:
                self._run_ahead(len(self._seen), self._prefetch_elements)
        if unit.phase is Phase.GATHERED:
            unit.memory.use()
            return
        with self._lanes.during("wait", unit.name):
            unit.gather()

    def reused(self, unit: Unit) -> bool:
        """Whether the rest of this forward or its backward uses `unit` within the reuse distance, as the last ones did."""
        between = self._between(unit) if self._reuse_elements else None
        return between is not None and sum(other.layout.size for other in between) <= self._reuse_elements

    def stays_for_backward(self, unit: Unit) -> bool:
        """Whether backward, in the order of the last one, uses `unit` within the units that are fetched ahead."""
        between = self._between(unit) if unit.can_stay_resident else None
        return between is not None and self._fit([unit, *between])

    def _between(self, unit: Unit) -> list[Unit] | None:
        """Return the units used between now and the next use of `unit`; None if no use comes before the next step."""
        coming = [*self._expected[len(self._seen):], *self._orders.get("backward", [])]
        return coming[:coming.index(unit)] if unit in coming else None

    def begins_with(self, name: str, unit: Unit) -> bool:
        """Whether the pass `name`, in the order of the last one, uses `unit` within the units that are fetched ahead."""
        order = self._orders.get(name, [])
        return unit.can_stay_resident and unit in order and self._fit(order[:order.index(unit) + 1])

    def _fit(self, units: list[Unit]) -> bool:
        """Whether the weights of `units` may be in memory together."""
        return len({*units}) <= self._fetch_units + 1 and sum(unit.layout.size for unit in {*units}) <= self._fetch_elements

    def prefetch_first(self, name: str) -> None:
        """Start the first gathers of the pass `name` before it begins: of no more elements than the largest unit has.

        More would take memory that the script uses between a step and the next forward.
        """
        self._unpin_others(name)
        self._expected = self._orders.get(name, [])
        largest = max((unit.layout.size for unit in self._expected), default=0)
        self._run_ahead(0, min(self._prefetch_elements, largest))

    def _unpin_others(self, name: str) -> None:
        """Give up resident weights that the pass `name` does not begin with."""
        for unit in self._all_units:
            if unit.residency and not unit.awaits_step and not self.begins_with(name, unit):
                unit.residency.unpin()

    def _run_ahead(self, position: int, ahead: int) -> None:
        elements, gathering, fetching = 0, ahead > 0, self._fetch_units > 0
        for count, unit in enumerate(self._expected[position:]):
            size = unit.layout.size
            gathering = gathering and (elements == 0 or elements + size <= ahead)
            fetching = fetching and count < self._fetch_units and (elements == 0 or elements + size <= self._fetch_elements)
            if gathering:
                unit.prefetch()
            elif fetching and unit.memory.is_offloaded:
                unit.fetch()
            elif not fetching:
                return
            elements += size
