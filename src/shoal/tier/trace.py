"""A trace of one training step: timed events of named lanes, recorded by any thread.

    forward, backward     compute, including the next two lanes
    wait                  compute blocked on a transfer or a step
    step                  the optimizer, concurrent with compute where a unit's step can be deferred
    fetch, commit         the optimizer blocked on a transfer
    read, write           disk requests
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from time import perf_counter

__all__ = ["Event", "Lanes", "Trace"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """An interval of a lane; times are those of `time.perf_counter`, in seconds."""

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
        """Add one event; safe in any thread."""
        self._events.append(Event(lane=lane, name=name, start=start, stop=stop, bytes=bytes))  # append is atomic

    @property
    def events(self) -> list[Event]:
        """The events so far, in the order in which they were recorded."""
        return list(self._events)


_NOT_TRACED = nullcontext()


class Lanes:
    """Records events of lanes while a `trace` is set."""

    def __init__(self) -> None:
        self.trace: Trace | None = None

    def record_to(self, trace: Trace | None) -> None:
        """Record events in `trace` from now on; None: in no trace."""
        self.trace = trace

    def during(self, lane: str, name: str) -> AbstractContextManager[None]:
        """Return a context whose duration is recorded as an event of `lane`."""
        return _NOT_TRACED if self.trace is None else self._timed(self.trace, lane, name)

    @contextmanager
    def _timed(self, trace: Trace, lane: str, name: str) -> Generator[None]:
        start = perf_counter()
        try:
            yield
        finally:
            trace.record(lane, name, start, perf_counter())
