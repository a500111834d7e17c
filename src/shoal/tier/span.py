"""A span is flat memory that may rest elsewhere: `fetch` brings it, `commit` lets it go, and its address never changes.

Between a fetch that has been waited for and the commit that ends it the memory holds what was committed last; at other
times it is undefined. `ResidentSpan` rests where it is, so that who fetches and commits need not ask where a tensor rests.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, Protocol

from torch import Tensor

__all__ = ["DONE", "Names", "PlacedSpan", "ResidentSpan", "Span", "Transfer", "behind", "unnamed"]

Names = Callable[[range], Sequence[str]]
"""Gives the names of the parameters that lie among some elements of a span, for errors."""


def unnamed(elements: range) -> Sequence[str]:
    """Name no parameter."""
    return ()


def behind(names: Names, first: int) -> Names:
    """Return the names of a span that begins at element `first` of the one that `names` is of."""
    return lambda elements: names(range(first + elements.start, first + elements.stop))


class Transfer(Protocol):
    """Bytes on their way."""

    @property
    def done(self) -> bool:
        """Whether nothing is under way any more; `wait` tells whether it went well."""
        ...

    def wait(self) -> None:
        """Block until all bytes have arrived; raises the TierError of the first part that failed, every time."""
        ...


class Span(Protocol):
    """A flat tensor that is there between `fetch` and `commit`."""

    tensor: Tensor

    def fetch(self, start: int = 0, stop: int | None = None, *, fresh: bool = False) -> Transfer:
        """Bring elements [start, stop), to be kept until they are committed as often as they were fetched.

        With `fresh` the caller overwrites all of them: what they held need not come.
        """
        ...

    def commit(self, start: int = 0, stop: int | None = None, *, changed: bool = True) -> Transfer:
        """Let elements [start, stop) go; without `changed` they are as they were fetched."""
        ...

    def close(self) -> None:
        """Give back the place on disk."""
        ...


class PlacedSpan(Span, Protocol):
    """A span that is all of what somebody placed, and no part or other side of it."""

    def discard(self) -> None:
        """Forget the contents, of which nothing may be fetched now: they are zeros from here on."""
        ...


class _CompletedTransfer:
    """Nothing is under way."""

    done = True

    def wait(self) -> None:
        pass


DONE: Final[Transfer] = _CompletedTransfer()
"""The transfer of nothing."""


class ResidentSpan:
    """A span that stays in memory."""

    def __init__(self, tensor: Tensor):
        self.tensor = tensor

    def fetch(self, start: int = 0, stop: int | None = None, *, fresh: bool = False) -> Transfer:
        return DONE

    def commit(self, start: int = 0, stop: int | None = None, *, changed: bool = True) -> Transfer:
        return DONE

    def discard(self) -> None:
        pass

    def close(self) -> None:
        pass
