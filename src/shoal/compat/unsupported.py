"""Published names without a counterpart: importing them works; using one raises `NotSupportedYet` with an alternative."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from shoal.compat.raising import published_errors
from shoal.errors import NotSupportedYet

__all__ = ["unsupported_class", "unsupported_function"]


def unsupported_function(name: str, instead: str) -> Callable[..., NoReturn]:
    """Return a function called `name` that raises, and says what to do `instead`."""
    def raising(*args: Any, **kwargs: Any) -> NoReturn:
        with published_errors():
            raise NotSupportedYet(f"{name}: not supported yet; {instead}")
        raise AssertionError(name)

    raising.__name__ = raising.__qualname__ = name
    raising.__doc__ = f"Raise `NotSupportedYet`: {instead}."
    return raising


def unsupported_class(name: str, instead: str) -> type:
    """Return a class called `name` that raises when it is built, and says what to do `instead`."""
    raising = unsupported_function(name, instead)

    def build(cls: type, *args: Any, **kwargs: Any) -> NoReturn:
        raising()

    return type(name, (), {"__new__": build, "__doc__": raising.__doc__})
