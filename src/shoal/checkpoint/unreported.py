"""A process that learns of no failed save until it ends exits with code 1, unless it fails for another reason.

The last save of a script often ends after the script. Nobody can catch its error then, and what a thread raises does not
change the exit code. Under `shoal run` the last exit handler of a rank asks for `failure` (`launch/rank.py`). Elsewhere the
code is set by an object that the interpreter destroys after all others: every exit handler has run by then, also those that
were registered before this file was imported, and files are flushed.
"""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Callable
from functools import cache

__all__ = ["failure", "forget", "note"]

_failures: dict[object, BaseException] = {}
"""The errors of the saves that failed, in order, without those that were raised to a caller."""


def note(save: object, error: BaseException) -> None:
    """Note that `save` failed with `error`, of which no caller has learned yet."""
    _watch_exit()
    _failures[save] = error


def forget(save: object) -> None:
    """Note that a caller has learned how `save` ended."""
    _failures.pop(save, None)


def failure() -> BaseException | None:
    """Return the last error that no caller has learned of, None if there is none."""
    return next(reversed(_failures.values()), None)


class _LastObject:
    """Ends the process with code 1 when it is destroyed, if a failure is left then."""

    def __init__(self) -> None:
        self._failures, self._end = _failures, os._exit  # modules are gone when it is destroyed
        self._flushes: list[Callable[[], None]] = [each.flush for each in (sys.stdout, sys.stderr) if each is not None]

    def __del__(self) -> None:
        if self._failures:
            for flush in self._flushes:
                try:  # noqa: SIM105  the names of this module are gone, `suppress` too
                    flush()
                except Exception:  # a closed stream, or no room: the code is what matters
                    pass
            self._end(1)


@cache
def _watch_exit() -> None:
    atexit.register(_set_code)
    os.register_at_fork(after_in_child=_failures.clear)  # the saves are those of the parent


def _set_code() -> None:
    """Have this process end with code 1, unless an exception ends it: that has a code of its own."""
    if _failures and "last_value" not in vars(sys):
        sys.__dict__["_shoal_last_object"] = _LastObject()  # the last module to be cleared
