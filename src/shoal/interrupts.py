"""Ctrl-C falls between the changes of what is known about a model, and never within one: it waits until that is over.

Python runs the handler of an interrupt wherever the main thread is. Between parts that are `unbroken` it does what it always
does, and what was under way ends as by any other exception. A second interrupt does not wait: what then was half done, stays
so.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import wraps
from types import FrameType
from typing import Any, ParamSpec, TypeVar

__all__ = ["unbroken", "uninterrupted", "watched"]

P = ParamSpec("P")
T = TypeVar("T")
_MAIN = threading.main_thread().ident


class _Watch:
    """Who is to be told of interrupts, and whether they may be now; only the main thread sees any."""

    def __init__(self) -> None:
        self.on = False
        self._busy = 0
        """How many unbroken parts are under way, one within the other."""
        self._handler: Callable[[int, FrameType | None], Any] | None = None
        """None where the system handles interrupts, or nobody does."""
        self._caught: list[FrameType | None] = []

    def begin(self) -> None:
        """Take over interrupts from whoever handles them, if it is Python code."""
        handler = signal.getsignal(signal.SIGINT)
        self.on, self._caught, self._handler = True, [], handler if callable(handler) else None
        if self._handler is not None:
            signal.signal(signal.SIGINT, self._catch)

    def end(self) -> None:
        """Give them back, unless somebody else has taken them over meanwhile."""
        self.on, handler, self._handler = False, self._handler, None  # what falls here is caught, and handed on below
        if signal.getsignal(signal.SIGINT) == self._catch:
            signal.signal(signal.SIGINT, handler)
        if self._caught and handler is not None:
            handler(signal.SIGINT, self._caught.pop())

    def enter(self) -> None:
        """Let interrupts wait from here on, if they are watched for."""
        self._busy += 1

    def leave(self) -> None:
        """Let them wait no more, as often as they were let wait."""
        self._busy -= 1
        if not self._busy:
            self._hand_on()

    def _hand_on(self) -> None:
        """Let the interrupt that was caught do what it does."""
        if self._caught and self._handler is not None:
            caught, self._caught = self._caught, []
            self._handler(signal.SIGINT, caught[0])

    def _catch(self, number: int, frame: FrameType | None) -> None:
        self._caught.append(frame)
        if not self._busy or self._caught[1:]:
            self._hand_on()


_WATCH = _Watch()


@contextmanager
def watched() -> Generator[None]:
    """Watch for interrupts: then what is `unbroken` within takes next to no time for it."""
    if threading.get_ident() != _MAIN or _WATCH.on:
        yield
        return
    try:
        _WATCH.begin()
        yield
    finally:
        _WATCH.end()


@contextmanager
def uninterrupted() -> Generator[None]:
    """Let an interrupt wait for the end of the context, and of those around it."""
    if threading.get_ident() != _MAIN:
        yield
        return
    with watched():
        _WATCH.enter()
        try:
            yield
        finally:
            _WATCH.leave()


def unbroken(function: Callable[P, T]) -> Callable[P, T]:
    """Return `function` as a part that no interrupt falls into."""
    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        if threading.get_ident() != _MAIN:
            return function(*args, **kwargs)
        if not _WATCH.on:
            with uninterrupted():
                return function(*args, **kwargs)
        _WATCH.enter()  # the same, in a fraction of a microsecond
        try:
            return function(*args, **kwargs)
        finally:
            _WATCH.leave()

    return run
