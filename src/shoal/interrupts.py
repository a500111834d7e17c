"""Ctrl-C does not interrupt a critical section: its handler runs when the section ends.

Python runs the handler of SIGINT wherever the main thread is. Functions marked `unbroken` are critical sections: they change
the state of a model in several steps. Between them the handler runs at once, and the training call ends as by any other
exception. A second interrupt does not wait, and may leave a section half done. Within the context `sigint_handler` a handler
of this file is installed, which calls the former one; a call of it after the context has ended does the same.
"""

from __future__ import annotations

import _signal  # pyright: ignore[reportMissingImports]  what signal.py wraps; typeshed does not list it
import signal
import threading
from collections.abc import Callable
from functools import wraps
from types import FrameType
from typing import Any, ParamSpec, TypeVar

__all__ = ["HANDLER_CODES", "sigint_handler", "unbroken", "uninterrupted"]

P = ParamSpec("P")
T = TypeVar("T")
_MAIN = threading.main_thread().ident
_NEAR = 8  # frames that the standard library needs to install a handler
_get_handler: Callable[[int], Any] = _signal.getsignal
_set_handler: Callable[[int, Any], Any] = _signal.signal
"""Those of `signal` also try to turn a handler into a member of an enumeration, which takes most of their time."""


class _Handler:
    """A handler of SIGINT in the place of `former`, which it calls as soon as no critical section runs."""

    def __init__(self, former: Any):
        self.former = former
        self.busy = 0
        """Nested critical sections that are running."""
        self.caught: list[FrameType | None] = []

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.caught.append(frame)
        if self.caught[1:] or not (self.busy or _is_own(frame)):
            self.hand_on()

    def hand_on(self) -> None:
        """Call the former handler for an interrupt that was caught."""
        caught, self.caught = self.caught, []
        if caught and callable(self.former):
            self.former(signal.SIGINT, caught[0])


class _Current:
    """The handler that this process has installed."""

    handler: _Handler | None = None


class sigint_handler:
    """A context that installs the handler once, so that `unbroken` functions within it cost a fraction of a microsecond.

    An interrupt during the code of this context waits for the end of that code, so that the handler is always restored.
    """

    def __init__(self) -> None:
        self._begun: _Handler | None = None

    def __enter__(self) -> None:
        if threading.get_ident() == _MAIN and _Current.handler is None:
            begun = _Handler(_get_handler(signal.SIGINT))
            if callable(begun.former):  # else the system handles SIGINT, or it is ignored
                _set_handler(signal.SIGINT, begun)
            _Current.handler = self._begun = begun

    def __exit__(self, *error: object) -> None:
        if (ended := self._begun) is not None:
            _Current.handler = self._begun = None
            if _get_handler(signal.SIGINT) is ended:  # no other handler was installed meanwhile
                _set_handler(signal.SIGINT, ended.former)
            ended.hand_on()


class uninterrupted:
    """A critical section as a context: an interrupt waits for its end, and for the end of those around it."""

    def __init__(self) -> None:
        self._context = sigint_handler()
        self._within: _Handler | None = None

    def __enter__(self) -> None:
        self._context.__enter__()
        if threading.get_ident() == _MAIN and (within := _Current.handler) is not None:
            within.busy += 1
            self._within = within

    def __exit__(self, *error: object) -> None:
        if (within := self._within) is not None:
            within.busy -= 1
            self._within = None
            try:
                self._context.__exit__()
            finally:
                if not within.busy:
                    within.hand_on()


_OWN = {function.__code__ for each in (sigint_handler, uninterrupted) for function in (each.__enter__, each.__exit__)}
_OTHERS = (sigint_handler.__init__, _Handler.__init__, _Handler.__call__, _Handler.hand_on)
HANDLER_CODES = (*_OWN, *(function.__code__ for function in _OTHERS))
"""The code that installs and runs the handler, which torch.compile is to leave as it is."""


def _is_own(frame: FrameType | None) -> bool:
    """Whether `frame` was called by the contexts above, which install handlers."""
    for _ in range(_NEAR):
        if frame is None or frame.f_code in _OWN:
            break
        frame = frame.f_back
    return frame is not None and frame.f_code in _OWN


def unbroken(function: Callable[P, T]) -> Callable[P, T]:
    """Make `function` a critical section, whose end an interrupt waits for."""
    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        if threading.get_ident() != _MAIN:
            return function(*args, **kwargs)
        if (handler := _Current.handler) is None:
            with uninterrupted():
                return function(*args, **kwargs)
        handler.busy += 1  # the same as the context, in a fraction of a microsecond
        try:
            return function(*args, **kwargs)
        finally:
            handler.busy -= 1
            if handler.caught and not handler.busy:
                handler.hand_on()

    return run
