"""Spans in use: a part of one, several that travel together, one that is held for a while, or until its user leaves it."""

from __future__ import annotations

from collections.abc import Generator, Iterable
from contextlib import contextmanager

from torch import Tensor

from shoal.tier.disk_span import DiskSpan
from shoal.tier.span import DONE, Span, Transfer

__all__ = ["InUse", "JoinedTransfers", "SubSpan", "held", "on_disk"]


class SubSpan:
    """The elements `part` of a span, counted from 0."""

    def __init__(self, span: Span, part: range):
        self.whole = span
        self._start = part.start
        self.tensor = span.tensor[part.start:part.stop]

    def fetch(self, start: int = 0, stop: int | None = None, *, fresh: bool = False) -> Transfer:
        return self.whole.fetch(*self._shifted(start, stop), fresh=fresh)

    def commit(self, start: int = 0, stop: int | None = None, *, changed: bool = True) -> Transfer:
        return self.whole.commit(*self._shifted(start, stop), changed=changed)

    def close(self) -> None:
        self.whole.close()

    def _shifted(self, start: int, stop: int | None) -> tuple[int, int]:
        stop = self.tensor.numel() if stop is None else stop
        return self._start + start, self._start + stop


class JoinedTransfers:
    """Several transfers as one."""

    def __init__(self, transfers: Iterable[Transfer]):
        self._transfers = [transfer for transfer in transfers if transfer is not DONE]

    @property
    def done(self) -> bool:
        return all(transfer.done for transfer in self._transfers)

    def wait(self) -> None:
        for transfer in self._transfers:
            transfer.wait()


class InUse:
    """A span whose users bring it when they need it, however often, and leave it once."""

    def __init__(self, span: Span):
        self.here = False
        """Whether it is in memory."""
        self._span = span

    def bring(self, *, fresh: bool = False) -> None:
        """Have it in memory; if `fresh`, its values do not matter."""
        if not self.here:
            self.here = True
            self._span.fetch(fresh=fresh).wait()

    def leave(self, *, changed: bool = True) -> None:
        """Let it rest, if it is in memory."""
        if self.here:
            self.here = False
            self._span.commit(changed=changed)


@contextmanager
def held(span: Span, start: int = 0, stop: int | None = None, *, changed: bool) -> Generator[Tensor]:
    """Have elements [start, stop) of a span in memory for a while; `changed` says that they are written."""
    arriving, written = span.fetch(start, stop), False
    try:
        arriving.wait()
        written = changed
        yield span.tensor[start:stop]
    finally:
        span.commit(start, stop, changed=written)


def on_disk(span: Span) -> DiskSpan | None:
    """Return what rests on a disk of which `span` is all or a part; None if it rests elsewhere."""
    while isinstance(span, SubSpan):
        span = span.whole
    return span if isinstance(span, DiskSpan) else None
