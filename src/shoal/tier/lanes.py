"""The lanes of training: each part says what it does and for how long, while somebody listens.

    forward, backward     what the processor or the device computes, the next two included
    wait                  what they waited for
    step                  the optimizer, beside them where its units can wait
    fetch, commit         what the step waited for
    read, write           what the disk did meanwhile
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from time import perf_counter

from shoal.tier.trace import Trace

__all__ = ["Lanes"]

_NOBODY = nullcontext()


class Lanes:
    """Passes on what is done to the trace that listens, if there is one."""

    def __init__(self) -> None:
        self.trace: Trace | None = None

    def during(self, lane: str, name: str) -> AbstractContextManager[None]:
        """Return a context whose time is an event of `lane`."""
        return _NOBODY if self.trace is None else self._timed(self.trace, lane, name)

    @contextmanager
    def _timed(self, trace: Trace, lane: str, name: str) -> Generator[None]:
        start = perf_counter()
        try:
            yield
        finally:
            trace.record(lane, name, start, perf_counter())
