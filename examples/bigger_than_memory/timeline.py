"""What happened when, as sets of time: their union, intersection and difference, their length, and a row of characters.

    forward, backward    computing, without the time in which they waited
    wait                 what they waited for
    step                 the optimizer, which works beside the next forward
    read, write          the disk at work
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from shoal.tier import Event

Time = tuple[float, float]
"""From when to when."""

COMPUTING = ("forward", "backward", "step")
WAITING = ("forward", "backward")
"""Lanes whose events hold those of `wait`."""

MOVING = ("read", "write")
LANES = ("read", *COMPUTING, "wait", "write")
LEVELS = " ▁▂▃▄▅▆▇█"


def union(times: Iterable[Time], *, gap: float = 0.0) -> list[Time]:
    """Return the same time as stretches in order, none of which touch; what is at most `gap` apart becomes one."""
    joined: list[Time] = []
    for start, stop in sorted(times):
        if joined and start <= joined[-1][1] + gap:
            joined[-1] = (joined[-1][0], max(joined[-1][1], stop))
        elif start < stop:
            joined.append((start, stop))
    return joined


def intersection(some: Sequence[Time], others: Sequence[Time]) -> list[Time]:
    """Return the time that is in both of two unions."""
    shared: list[Time] = []
    i = j = 0
    while i < len(some) and j < len(others):
        start, stop = max(some[i][0], others[j][0]), min(some[i][1], others[j][1])
        if start < stop:
            shared.append((start, stop))
        if some[i][1] < others[j][1]:
            i += 1
        else:
            j += 1
    return shared


def difference(some: Sequence[Time], others: Sequence[Time]) -> list[Time]:
    """Return the time of one union that is not in another."""
    if not some:
        return []
    first, last = some[0][0], some[-1][1]
    edges = [first, *(edge for time in union(others) for edge in time), last]
    holes = [(start, stop) for start, stop in zip(edges[::2], edges[1::2], strict=True) if start < stop]
    return intersection(some, holes)


def length(times: Iterable[Time]) -> float:
    """Return how long a union is."""
    return sum(stop - start for start, stop in times)


def row(times: Sequence[Time], start: float, stop: float, width: int) -> str:
    """Draw a union between `start` and `stop` in `width` characters, each as high as the share of its time that is taken."""
    pitch = (stop - start) / width
    taken = [0.0] * width
    for begin, end in intersection(times, [(start, stop)]):
        first, last = (min(width - 1, int((moment - start) / pitch)) for moment in (begin, end))
        for cell in range(first, last + 1):
            taken[cell] += max(0.0, min(end, start + (cell + 1) * pitch) - max(begin, start + cell * pitch))
    return "".join(LEVELS[min(len(LEVELS) - 1, math.ceil(time / pitch * (len(LEVELS) - 1) - 1e-9))] for time in taken)


def short(name: str) -> str:
    """Return the unit that an event's name speaks of."""
    found = re.search(r"unit '([^']*)'", name)
    return found[1] if found else name


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """The lanes of one step; times are those of `time.perf_counter`."""

    lanes: dict[str, list[Time]]
    start: float
    stop: float
    read: int
    written: int

    @classmethod
    def of(cls, events: Sequence[Event], start: float, stop: float) -> Timeline:
        """Sort the events into lanes; of time, what is between `start` and `stop` counts."""
        whole = [(start, stop)]
        lanes = {lane: intersection(union((event.start, event.stop) for event in events if event.lane == lane), whole)
                 for lane in LANES}
        lanes |= {lane: difference(lanes[lane], lanes["wait"]) for lane in WAITING}
        moved = {lane: sum(event.bytes for event in events if event.lane == lane) for lane in MOVING}
        return cls(lanes=lanes, start=start, stop=stop, read=moved["read"], written=moved["write"])

    @property
    def seconds(self) -> float:
        return self.stop - self.start

    @property
    def computing(self) -> list[Time]:
        """When something computed."""
        return union(time for lane in COMPUTING for time in self.lanes[lane])

    @property
    def moving(self) -> list[Time]:
        """When something was read or written."""
        return union(time for lane in MOVING for time in self.lanes[lane])

    @property
    def overlap(self) -> float:
        """The share of the step in which the disk worked while something computed."""
        return length(intersection(self.moving, self.computing)) / self.seconds

    @property
    def hidden(self) -> float:
        """The share of the disk's work during which something computed; 1 where it did nothing."""
        return length(intersection(self.moving, self.computing)) / length(self.moving) if self.moving else 1.0

    def share(self, *lanes: str) -> float:
        """Return the share of the step that any of `lanes` takes."""
        return length(union(time for lane in lanes for time in self.lanes[lane])) / self.seconds
