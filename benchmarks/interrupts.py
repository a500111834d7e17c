"""Signals that end a process leave it as an exception does, through every `finally`, and never in the middle of one."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Generator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

ENDING = (signal.SIGTERM, signal.SIGHUP)


@contextmanager
def leaving() -> Generator[None, None, None]:
    """Have SIGTERM and SIGHUP raise SystemExit meanwhile, where no other handler is set; in other threads do nothing."""
    mine = [number for number in ENDING if _here() and signal.getsignal(number) is signal.SIG_DFL]
    try:
        for number in mine:
            signal.signal(number, _leave)
        yield
    finally:
        for number in mine:
            signal.signal(number, signal.SIG_DFL)


@contextmanager
def deferred() -> Generator[None, None, None]:
    """Keep the signals that end a process, a Ctrl-C too, until the block is through."""
    came: list[int] = []
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, *ENDING) if _here()}
    try:
        for number in before:
            signal.signal(number, lambda number, frame: came.append(number))
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
        for number in came[:1]:
            signal.raise_signal(number)


def _here() -> bool:
    """Whether this is the thread that Python handles signals in."""
    return threading.current_thread() is threading.main_thread()


def _leave(number: int, frame: FrameType | None) -> NoReturn:
    sys.exit(128 + number)
