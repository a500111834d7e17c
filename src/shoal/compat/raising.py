"""Errors under a published name are also of the types that published scripts catch.

Shoal raises its own error tree. Where the published call raises an `AssertionError`, a `ValueError` or another of Python's
errors, it is of that type as well, with the same name and the same message.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import cache, wraps
from types import TracebackType
from typing import Any, ParamSpec, TypeVar

from shoal.errors import CheckpointError, ConfigError, DataEnded, NotSupportedYet, ShoalError, UsageError

__all__ = ["as_published", "published_errors"]

P = ParamSpec("P")
R = TypeVar("R")

ALSO: tuple[tuple[type[ShoalError], tuple[type[Exception], ...]], ...] = (
    (NotSupportedYet, (NotImplementedError, AssertionError)),
    (ConfigError, (AssertionError, TypeError)),
    (DataEnded, (StopIteration,)),
    (UsageError, (AssertionError, ValueError)),
    (CheckpointError, (AssertionError, ValueError)),
)
"""An error of the first type is also of the others; the first row that fits counts."""


class _PublishedErrors(AbstractContextManager[None, None]):
    """Not a generator: one cannot raise `StopIteration`."""

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if isinstance(error, ShoalError) and (both := _with_published_types(type(error))) is not type(error):
            raise both(*error.args).with_traceback(trace) from error.__cause__


def published_errors() -> AbstractContextManager[None, None]:
    """Give the errors that leave the context their published types as well."""
    return _PublishedErrors()


def as_published(call: Callable[P, R]) -> Callable[P, R]:
    """Return `call` with its errors in their published types as well."""
    @wraps(call)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        with published_errors():
            return call(*args, **kwargs)

    return wrapped


@cache
def _with_published_types(kind: type[ShoalError]) -> type[ShoalError]:
    for known, more in ALSO:
        if issubclass(kind, known):
            missing = tuple(each for each in more if not issubclass(kind, each))
            namespace: dict[str, Any] = {name: getattr(kind, name) for name in ("__module__", "__doc__", "__qualname__")}
            return type(kind.__name__, (kind, *missing), namespace) if missing else kind
    return kind
