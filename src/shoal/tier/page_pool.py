"""Pages of memory that was given up move to where memory is needed next: the system need not clear them for their new use.

Clearing costs more of a processor than reading the same bytes from a disk does. Pages stay where they were until somebody
takes them; so does what is in them, and whoever takes them overwrites all of it.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

from shoal.tier.pages import LARGE, Pages

__all__ = ["PagePool"]

_Kind = tuple[int, int]
"""Bytes, and where they begin within a large page, if they hold one: it stays whole between memory of one kind."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    """Bytes [start, stop) of `pages`."""

    pages: Pages
    start: int
    stop: int

    @property
    def bytes(self) -> int:
        return self.stop - self.start

    @property
    def address(self) -> int:
        return self.pages.address + self.start

    @property
    def kind(self) -> _Kind:
        return self.bytes, self.address % LARGE if self.bytes >= LARGE else 0

    def drop(self) -> None:
        self.pages.drop(self.start, self.stop)


class PagePool:
    """At most `most` bytes of pages whose memory nobody uses."""

    def __init__(self, most: int):
        self.bytes = 0
        self._most = most
        self._kept: dict[int, _Place] = {}
        """By address, the oldest first."""
        self._alike: dict[_Kind, dict[int, _Place]] = {}
        """The same, those of each kind by themselves."""
        self._lock = threading.Lock()

    def keep(self, pages: Pages, start: int, stop: int) -> None:
        """Keep bytes [start, stop), which nobody uses any more; the oldest go back to the system for it."""
        place = _Place(pages=pages, start=start, stop=stop)
        with self._lock:
            while self._kept and self.bytes + place.bytes > self._most:
                self._take(next(iter(self._kept.values()))).drop()
            if place.bytes > self._most:
                place.drop()
                return
            self._kept[place.address] = self._alike.setdefault(place.kind, {})[place.address] = place
            self.bytes += place.bytes

    def lend(self, pages: Pages, start: int, stop: int) -> None:
        """Let bytes [start, stop) have pages, if any are there; what is in them is undefined."""
        wanted = _Place(pages=pages, start=start, stop=stop)
        with self._lock:
            alike = self._alike.get(wanted.kind)
            if not alike:
                return
            source = self._take(alike.get(wanted.address) or next(iter(alike.values())))
            if source.address != wanted.address and not source.pages.give(source.start, source.bytes, pages, start):
                source.drop()

    def forget(self, pages: Pages, start: int, stop: int) -> None:
        """Give bytes [start, stop) back to the system, if they are kept: they are zeros then."""
        with self._lock:
            if (place := self._kept.get(pages.address + start)) is not None:
                self._take(place).drop()

    def _take(self, place: _Place) -> _Place:
        """Keep a place no longer."""
        del self._kept[place.address]
        alike = self._alike[place.kind]
        del alike[place.address]
        if not alike:
            del self._alike[place.kind]
        self.bytes -= place.bytes
        return place
