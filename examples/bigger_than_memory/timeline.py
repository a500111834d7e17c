"""The lanes of one step as sets of intervals, with union, intersection, difference, length, and a text rendering.

    forward, backward    compute, without waits
    wait                 forward or backward blocked
    step                 the optimizer, concurrent with the next forward
    read, write          disk I/O
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from shoal.tier import Event

Interval = tuple[float, float]
"""Start and stop in seconds."""

COMPUTE = ("forward", "backward", "step")
WAITING = ("forward", "backward")
"""Lanes whose events include those of `wait`."""

DISK = ("read", "write")
LANES = ("read", *COMPUTE, "wait", "write")
LEVELS = " ▁▂▃▄▅▆▇█"


def union(times: Iterable[Interval], *, gap: float = 0.0) -> list[Interval]:
    """Return the intervals sorted and merged where they touch, or are at most `gap` apart."""
    joined: list[Interval] = []
    for start, stop in sorted(times):
        if joined and start <= joined[-1][1] + gap:
            joined[-1] = (joined[-1][0], max(joined[-1][1], stop))
        elif start < stop:
            joined.append((start, stop))
    return joined


def intersection(some: Sequence[Interval], others: Sequence[Interval]) -> list[Interval]:
    """Return the intersection of two unions."""
    shared: list[Interval] = []
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


def difference(some: Sequence[Interval], others: Sequence[Interval]) -> list[Interval]:
    """Return the part of one union that is not in another."""
    if not some:
        return []
    first, last = some[0][0], some[-1][1]
    edges = [first, *(edge for time in union(others) for edge in time), last]
    holes = [(start, stop) for start, stop in zip(edges[::2], edges[1::2], strict=True) if start < stop]
    return intersection(some, holes)


def length(times: Iterable[Interval]) -> float:
    """Return the total length of a union."""
    return sum(stop - start for start, stop in times)


def row(times: Sequence[Interval], start: float, stop: float, width: int) -> str:
    """Render a union between `start` and `stop` as `width` characters, each as high as the fraction that is covered."""
    pitch = (stop - start) / width
    covered = [0.0] * width
    for begin, end in intersection(times, [(start, stop)]):
        first, last = (min(width - 1, int((moment - start) / pitch)) for moment in (begin, end))
        for cell in range(first, last + 1):
            covered[cell] += max(0.0, min(end, start + (cell + 1) * pitch) - max(begin, start + cell * pitch))
    return "".join(LEVELS[min(len(LEVELS) - 1, math.ceil(time / pitch * (len(LEVELS) - 1) - 1e-9))] for time in covered)


def short(name: str) -> str:
    """Return the name of the unit in an event's name."""
    match = re.search(r"unit '([^']*)'", name)
    return match[1] if match else name


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """The lanes of one step; times are those of `time.perf_counter`."""

    lanes: dict[str, list[Interval]]
    start: float
    stop: float
    read: int
    written: int

    @classmethod
    def of(cls, events: Sequence[Event], start: float, stop: float) -> Timeline:
        """Sort the events into lanes, clipped to the time between `start` and `stop`."""
        whole = [(start, stop)]
        lanes = {lane: intersection(union((event.start, event.stop) for event in events if event.lane == lane), whole)
                 for lane in LANES}
        lanes |= {lane: difference(lanes[lane], lanes["wait"]) for lane in WAITING}
        moved = {lane: sum(event.bytes for event in events if event.lane == lane) for lane in DISK}
        return cls(lanes=lanes, start=start, stop=stop, read=moved["read"], written=moved["write"])

    @property
    def seconds(self) -> float:
        return self.stop - self.start

    @property
    def compute(self) -> list[Interval]:
        """The intervals of compute."""
        return union(time for lane in COMPUTE for time in self.lanes[lane])

    @property
    def disk(self) -> list[Interval]:
        """The intervals of disk I/O."""
        return union(time for lane in DISK for time in self.lanes[lane])

    @property
    def overlap(self) -> float:
        """The fraction of the step in which disk I/O and compute overlap."""
        return length(intersection(self.disk, self.compute)) / self.seconds

    @property
    def hidden(self) -> float:
        """The fraction of disk I/O that overlaps with compute; 1 without disk I/O."""
        return length(intersection(self.disk, self.compute)) / length(self.disk) if self.disk else 1.0

    def share(self, *lanes: str) -> float:
        """Return the fraction of the step in which any of `lanes` is busy."""
        return length(union(time for lane in lanes for time in self.lanes[lane])) / self.seconds
