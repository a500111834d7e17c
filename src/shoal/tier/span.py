"""A span is flat memory whose contents a tier may hold elsewhere: `fetch` brings them, `commit` returns them.

The tensor of a span keeps its address. Between a completed fetch and the commit that ends it, the memory holds what was
committed last; at other times it is undefined. `ResidentSpan` always stays in memory, so that callers fetch and commit
without asking for the tier.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Final, Protocol

from torch import Tensor

__all__ = ["DONE", "FetchOnce", "JoinedTransfers", "Names", "PlacedSpan", "ResidencyPin", "ResidentSpan", "Span", "SubSpan",
           "Transfer", "fetched", "no_names", "offset_names"]

Names = Callable[[range], Sequence[str]]
"""Returns the names of the parameters that a range of elements of a span belongs to; used in errors."""


def no_names(elements: range) -> Sequence[str]:
    """Return no names: the span has no parameters."""
    return ()


def offset_names(names: Names, first: int) -> Names:
    """Return the names of a span that begins at element `first` of the span of `names`."""
    return lambda elements: names(range(first + elements.start, first + elements.stop))


class Transfer(Protocol):
    """The handle of an asynchronous fetch or commit."""

    @property
    def done(self) -> bool:
        """Whether the transfer has ended; `wait` raises if it failed."""
        ...

    def wait(self) -> None:
        """Block until the transfer has ended; raises the TierError of the first part that failed, at every call.

        Of a copy to a device this makes the compute stream wait, and not the host.
        """
        ...

    def following(self) -> AbstractContextManager[object]:
        """Return a context whose work for a device follows the transfer; the compute stream does not wait for it."""
        ...


class _CompletedTransfer:
    """A transfer of no bytes."""

    done = True

    def wait(self) -> None:
        pass

    def following(self) -> AbstractContextManager[object]:
        return nullcontext()


DONE: Final[Transfer] = _CompletedTransfer()
"""The transfer of no bytes."""


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

    def following(self) -> AbstractContextManager[object]:
        self.wait()
        return nullcontext()


class Span(Protocol):
    """A flat tensor whose contents are in memory between `fetch` and `commit`."""

    tensor: Tensor

    def fetch(self, start: int = 0, stop: int | None = None, *, fresh: bool = False) -> Transfer:
        """Bring elements [start, stop) into memory, and keep them until they are committed as often as they were fetched.

        With `fresh` the caller overwrites all of them: their contents need not be read.
        """
        ...

    def commit(self, start: int = 0, stop: int | None = None, *, changed: bool = True) -> Transfer:
        """End one fetch of elements [start, stop); without `changed` they are as they were fetched, and are not written."""
        ...

    def close(self) -> None:
        """Free the extent on disk."""
        ...


class PlacedSpan(Span, Protocol):
    """A span that a store allocated: neither a part nor a mirror of another span."""

    def discard(self) -> None:
        """Reset the contents to zeros; no element may be fetched at the time."""
        ...


class ResidentSpan:
    """A span that stays in memory."""

    def __init__(self, tensor: Tensor):
        self.tensor = tensor

    def part(self, part: range) -> ResidentSpan:
        """Return the elements `part` as a span."""
        return ResidentSpan(self.tensor[part.start:part.stop])

    def fetch(self, start: int = 0, stop: int | None = None, *, fresh: bool = False) -> Transfer:
        return DONE

    def commit(self, start: int = 0, stop: int | None = None, *, changed: bool = True) -> Transfer:
        return DONE

    def discard(self) -> None:
        pass

    def close(self) -> None:
        pass


class SubSpan:
    """The elements `part` of a span, counted from 0."""

    def __init__(self, span: Span, part: range):
        self._span = span
        self._start = part.start
        self.tensor = span.tensor[part.start:part.stop]

    def fetch(self, start: int = 0, stop: int | None = None, *, fresh: bool = False) -> Transfer:
        return self._span.fetch(*self._shifted(start, stop), fresh=fresh)

    def commit(self, start: int = 0, stop: int | None = None, *, changed: bool = True) -> Transfer:
        return self._span.commit(*self._shifted(start, stop), changed=changed)

    def close(self) -> None:
        self._span.close()

    def _shifted(self, start: int, stop: int | None) -> tuple[int, int]:
        stop = self.tensor.numel() if stop is None else stop
        return self._start + start, self._start + stop


class FetchOnce:
    """Counts any number of fetches of a span as one, which one commit ends."""

    def __init__(self, span: Span):
        self.fetched = False
        """Whether the span is fetched."""
        self._span = span

    def fetch(self, *, fresh: bool = False) -> None:
        """Fetch the span unless it is fetched already, and wait; `fresh`: the caller overwrites all of it."""
        if not self.fetched:
            self.fetched = True
            self._span.fetch(fresh=fresh).wait()

    def commit(self, *, changed: bool = True) -> None:
        """Commit the span if it is fetched, without waiting."""
        if self.fetched:
            self.fetched = False
            self._span.commit(changed=changed)


class ResidencyPin:
    """Keeps parts of `span` in memory for their next use, beyond the commit of their present one; true while any part is."""

    def __init__(self, span: Span):
        self._span = span
        self._parts: list[range] = []
        self._stepped: list[range] = []  # of these, pinned by a step for a pass that has not come yet

    def __bool__(self) -> bool:
        return bool(self._parts)

    def pin(self, part: range, *, by_step: bool = False) -> None:
        """Keep the elements `part`, which must be in memory, when their user commits them."""
        self._parts.append(part)
        if by_step:
            self._stepped.append(part)
        self._span.fetch(part.start, part.stop)

    def unpin(self) -> None:
        """Release all parts: the next user has fetched them, or there is none."""
        self._stepped = []
        while self._parts:
            part = self._parts.pop()
            self._span.commit(part.start, part.stop, changed=False)

    def unpin_stepped(self) -> None:
        """Release the parts that a step has pinned: the pass that they were pinned for does not come."""
        while self._stepped:
            part = self._stepped.pop()
            self._parts.remove(part)
            self._span.commit(part.start, part.stop, changed=False)


@contextmanager
def fetched(span: Span, start: int = 0, stop: int | None = None, *, changed: bool) -> Generator[Tensor]:
    """Yield elements [start, stop) of a span, fetched within the context; `changed`: the caller writes to them."""
    arriving, written = span.fetch(start, stop), False
    try:
        arriving.wait()
        written = changed
        yield span.tensor[start:stop]
    finally:
        span.commit(start, stop, changed=written)
