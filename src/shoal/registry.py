"""The configuration names optimizers and schedules by `type` and `params`; a registry builds the object, or raises.

Registered names are matched in any case. A registry may also offer the classes of a library under their exact names.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Generic, TypeVar

from shoal.config.problem import nearest
from shoal.errors import ConfigError, NotSupportedYet, ShoalError, UsageError

__all__ = ["Registry"]

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., object])
_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


class Registry(Generic[T]):
    """Factories by name. `section` is where the configuration names them: `section.type` and `section.params`.

    `library` holds a library's factories by exact name; `later` are published names (in lower case) that a later version
    will honour.
    """

    def __init__(self, section: str, *, library: Mapping[str, Callable[..., T]], later: frozenset[str]) -> None:
        self._section = section
        self._library = library
        self._later = later
        self._own: dict[str, Callable[..., T]] = {}
        self._spelling: dict[str, str] = {}

    def names(self) -> list[str]:
        """Return every name that `make` accepts, the registered ones as they were spelled, sorted."""
        library = [name for name in self._library if name.lower() not in self._own]
        return sorted([*self._spelling.values(), *library], key=str.lower)

    def register(self, name: str, factory: F) -> F:
        """Add `factory` under `name`. Its first argument is the `subject` of `make`, its keywords are the `params`.

        Raises `UsageError` for a name that another factory has already.
        """
        known = self._own.get(name.lower())
        if known is not None and _identity(known) != _identity(factory):
            raise UsageError(f"{self._section}: the name {name!r} is taken by {'.'.join(_identity(known))}; "
                             f"register {'.'.join(_identity(factory))} under another name")
        self._own[name.lower()] = factory  # pyright: ignore[reportArgumentType]  a class or function that returns a T
        self._spelling[name.lower()] = name
        return factory

    def make(self, type: str, params: Mapping[str, object] | None, subject: object, *,
             replaced_by: Mapping[str, Callable[..., T]] | None = None) -> T:
        """Return `factory(subject, **params)` of the factory called `type`, or of the one that replaces it.

        Raises `ConfigError` for an unknown name or keyword, a missing keyword, and for values that the factory refuses;
        `NotSupportedYet` for a published name of a later version.
        """
        replacements = {name.lower(): factory for name, factory in (replaced_by or {}).items()}
        factory = replacements.get(type.lower()) or self._find(type)
        keywords = dict(params or {})
        self._check(type, factory, keywords)
        try:
            return factory(subject, **keywords)
        except ShoalError:
            raise
        except (TypeError, ValueError, LookupError, AssertionError) as error:
            raise ConfigError(f"{self._section}: {type} with {_shown(keywords)}: {error}") from error

    def check_name(self, type: str) -> None:
        """Raise `ConfigError` for an unknown name, `NotSupportedYet` for a published name of a later version."""
        self._find(type)

    def _find(self, type: str) -> Callable[..., T]:
        factory = self._own.get(type.lower()) or self._library.get(type)
        if factory is not None:
            return factory
        if type.lower() in self._later:
            raise NotSupportedYet(f"{self._section}.type: {type!r} is not supported yet; choose one of "
                                  f"{', '.join(self.names())}")
        raise ConfigError(f"{self._section}.type: got {type!r}; {_choices(type, self.names())}")

    def _check(self, type: str, factory: Callable[..., T], keywords: Mapping[str, object]) -> None:
        for keyword, value in keywords.items():
            if value == "auto":
                raise ConfigError(f"{self._section}.params.{keyword}: got 'auto', which only a trainer that writes "
                                  f"this section can fill in; give a value, or leave it out for {type}'s default")
        _, *parameters = inspect.signature(factory).parameters.values()
        allowed = [parameter.name for parameter in parameters if parameter.kind in _NAMED]
        if not any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters):
            for keyword in keywords:
                if keyword not in allowed:
                    raise ConfigError(f"{self._section}.params.{keyword}: {type} has no such keyword; "
                                      f"{_choices(keyword, allowed)}")
        for parameter in parameters:
            required = parameter.kind in _NAMED and parameter.default is inspect.Parameter.empty
            if required and parameter.name not in keywords:
                raise ConfigError(f"{self._section}.params.{parameter.name}: missing; {type} needs it")


def _identity(factory: Callable[..., object]) -> tuple[str, str]:
    return factory.__module__, factory.__qualname__


def _choices(word: str, allowed: list[str]) -> str:
    close = nearest(word, allowed)
    question = f"did you mean {close!r}? It is one of" if close else "choose one of"
    return f"{question} {', '.join(allowed)}"


def _shown(keywords: Mapping[str, object]) -> str:
    return ", ".join(f"{keyword}={value!r}" for keyword, value in keywords.items()) or "no params"
