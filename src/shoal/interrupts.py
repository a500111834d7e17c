"""Ctrl-C falls between the changes of what is known about a model, and never within one: it waits until that is over.

Python runs the handler of an interrupt wherever the main thread is. Between parts that are `unbroken` it does what it always
does, and what was under way ends as by any other exception. A second interrupt does not wait: what then was half done, stays
so. While a watch lasts it is the handler itself, and hands on to the one that was there; who calls it later calls that one.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from functools import wraps
from types import FrameType
from typing import Any, ParamSpec, TypeVar

__all__ = ["unbroken", "uninterrupted", "watched"]

P = ParamSpec("P")
T = TypeVar("T")
_MAIN = threading.main_thread().ident
_NEAR = 8  # frames: what the standard library needs to set a handler


class _Watch:
    """A handler of interrupts, in the place of `former`, which it calls as soon as it may."""

    def __init__(self, former: Any):
        self.former = former
        self.busy = 0
        """How many unbroken parts are under way, one within the other."""
        self.caught: list[FrameType | None] = []

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.caught.append(frame)
        if self.caught[1:] or not (self.busy or _is_own(frame)):
            self.hand_on()

    def hand_on(self) -> None:
        """Let the interrupt that was caught do what it does."""
        caught, self.caught = self.caught, []
        if caught and callable(self.former):
            self.former(signal.SIGINT, caught[0])


class _Now:
    """The watch that lasts."""

    watch: _Watch | None = None


class watched:
    """A context that watches for interrupts: what is `unbroken` within takes next to no time for it.

    Interrupts that fall into its own code wait for the end of that: it always ends as it should.
    """

    def __init__(self) -> None:
        self._begun: _Watch | None = None

    def __enter__(self) -> None:
        if threading.get_ident() == _MAIN and _Now.watch is None:
            begun = _Watch(signal.getsignal(signal.SIGINT))
            if callable(begun.former):  # else the system handles them, or nobody does
                signal.signal(signal.SIGINT, begun)
            _Now.watch = self._begun = begun

    def __exit__(self, *error: object) -> None:
        if (ended := self._begun) is not None:
            _Now.watch = self._begun = None
            if signal.getsignal(signal.SIGINT) is ended:  # nobody has taken them over meanwhile
                signal.signal(signal.SIGINT, ended.former)
            ended.hand_on()


class uninterrupted:
    """A context whose end an interrupt waits for, and that of those around it."""

    def __init__(self) -> None:
        self._watched = watched()
        self._within: _Watch | None = None

    def __enter__(self) -> None:
        self._watched.__enter__()
        if threading.get_ident() == _MAIN and (within := _Now.watch) is not None:
            within.busy += 1
            self._within = within

    def __exit__(self, *error: object) -> None:
        if (within := self._within) is not None:
            within.busy -= 1
            self._within = None
            try:
                self._watched.__exit__()
            finally:
                if not within.busy:
                    within.hand_on()


_OWN = {function.__code__ for each in (watched, uninterrupted) for function in (each.__enter__, each.__exit__)}


def _is_own(frame: FrameType | None) -> bool:
    """Whether `frame` runs for the code above, which sets handlers."""
    for _ in range(_NEAR):
        if frame is None or frame.f_code in _OWN:
            break
        frame = frame.f_back
    return frame is not None and frame.f_code in _OWN


def unbroken(function: Callable[P, T]) -> Callable[P, T]:
    """Return `function` as a part that no interrupt falls into."""
    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        if threading.get_ident() != _MAIN:
            return function(*args, **kwargs)
        if (watch := _Now.watch) is None:
            with uninterrupted():
                return function(*args, **kwargs)
        watch.busy += 1  # the same, in a fraction of a microsecond
        try:
            return function(*args, **kwargs)
        finally:
            watch.busy -= 1
            if watch.caught and not watch.busy:
                watch.hand_on()

    return run
