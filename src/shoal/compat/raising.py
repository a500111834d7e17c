"""Errors under a published name are also of the types that published scripts catch.

Shoal raises its own error tree. Where the published call raises an `AssertionError`, a `ValueError` or a `TypeError`, the
error is of that type as well, with the same name and the same message.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import cache, wraps
from typing import Any, ParamSpec, TypeVar

from shoal.errors import CheckpointError, ConfigError, NotSupportedYet, ShoalError, UsageError

__all__ = ["as_published", "published_errors"]

P = ParamSpec("P")
R = TypeVar("R")

ALSO: tuple[tuple[type[ShoalError], tuple[type[Exception], ...]], ...] = (
    (NotSupportedYet, (NotImplementedError, AssertionError)),
    (ConfigError, (AssertionError, TypeError)),
    (UsageError, (AssertionError, ValueError)),
    (CheckpointError, (AssertionError, ValueError)),
)
"""An error of the first type is also of the others; the first row that fits counts."""


@contextmanager
def published_errors() -> Generator[None]:
    """Give the errors that leave the context their published types as well."""
    try:
        yield
    except ShoalError as error:
        both = _with_published_types(type(error))
        if both is type(error):
            raise
        raise both(*error.args).with_traceback(error.__traceback__) from error.__cause__


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
