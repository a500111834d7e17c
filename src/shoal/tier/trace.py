"""What happened when: events of named lanes, recorded by any thread, to be counted, drawn, or turned into overlap."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Event", "Trace"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """What a lane did; times are those of `time.perf_counter`, in seconds."""

    lane: str
    name: str
    start: float
    stop: float
    bytes: int = 0


class Trace:
    """Collects events."""

    def __init__(self) -> None:
        self._events: list[Event] = []

    def record(self, lane: str, name: str, start: float, stop: float, *, bytes: int = 0) -> None:
        """Add one event."""
        self._events.append(Event(lane=lane, name=name, start=start, stop=stop, bytes=bytes))  # appending is atomic

    @property
    def events(self) -> list[Event]:
        """The events so far, in the order in which they were recorded."""
        return list(self._events)
