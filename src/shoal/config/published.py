"""A published key that is no setting of ours has a stated fate; while it asks for nothing, it passes.

    later    raises NotSupportedYet: a later version will honour it
    inert    warns once: it cannot change anything here, and the reason is said
    old      raises ConfigError: it has gone, and what to write in its place is said

A value asks for nothing when it is null, "auto", the published default, or a block that is switched off. Unknown keys
inside such a block are refused like any others.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import cast

from shoal.config.problem import Problem, join, one_of, shown
from shoal.config.suggest import nearest

__all__ = ["Fate", "Published", "complaints", "inert", "is_auto", "later", "later_block", "old", "unknown"]

_JSON = (bool, int, float, str, list, dict, type(None))


class Fate(Enum):
    """What becomes of a key that asks for something."""

    LATER = "not yet"
    INERT = "no effect"
    OLD = "old form"


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """One published key: what it means, which values ask for nothing, and its fate when it asks for something."""

    fate: Fate
    meaning: str
    accepts: tuple[object, ...] = ()  # the published default first
    reason: str = ""
    keys: Mapping[str, object] = field(default_factory=dict[str, object])  # of a block: defaults, or Published
    switch: str | None = None  # the key of the block that turns it on
    off: tuple[object, ...] = (None, False, "none")  # the switch's values that leave the block off
    open: bool = False  # the block takes keys that are not listed

    @property
    def switched_off(self) -> object:
        """The value to write for `switch` to leave the block off."""
        default = self.keys.get(self.switch or "")
        return default if default in self.off[1:] else next(value for value in self.off if value is not None)


def later(meaning: str, *accepts: object) -> Published:
    """Return a key of a later version; the values in `accepts` ask for nothing, the published default first."""
    return Published(fate=Fate.LATER, meaning=meaning, accepts=accepts)


def later_block(
    meaning: str,
    keys: Mapping[str, object] | None = None,
    *,
    switch: str | None = None,
    off: tuple[object, ...] = (None, False, "none"),
) -> Published:
    """Return a block of a later version with its keys' published defaults; without `keys` it takes any key."""
    listed = dict(keys or {})
    return Published(fate=Fate.LATER, meaning=meaning, keys=listed, switch=switch, off=off, open=not keys)


def inert(meaning: str, *accepts: object, reason: str) -> Published:
    """Return a key that changes nothing here because of `reason`; without `accepts` every value passes in silence."""
    return Published(fate=Fate.INERT, meaning=meaning, accepts=accepts, reason=reason)


def old(meaning: str, *accepts: object, reason: str) -> Published:
    """Return a key of an older form; `reason` says what to write in its place."""
    return Published(fate=Fate.OLD, meaning=meaning, accepts=accepts, reason=reason)


def complaints(key: Published, value: object, path: str) -> Iterator[Problem]:
    """Yield what `value` of `key` at `path` asks for beyond nothing; a `later` problem says so."""
    if value is None or is_auto(value) or _among(value, key.accepts):
        return
    if key.fate is Fate.INERT and not key.accepts:
        return
    if isinstance(value, Mapping) and (key.keys or key.open):
        yield from _block_complaints(key, cast(Mapping[str, object], value), path)
    elif not (key.switch is not None and value is False):
        yield _asked(key, value, path)


def _block_complaints(key: Published, block: Mapping[str, object], path: str) -> Iterator[Problem]:
    if not key.open:
        for name in block:
            if name not in key.keys:
                yield unknown(join(path, name), name, key.keys)
    if key.switch is not None:
        if not _among(block.get(key.switch, key.keys.get(key.switch, False)), (*key.off, "auto")):
            yield Problem(path=path, message=f"not supported yet ({key.meaning}); {_without(key)}", later=True)
    elif key.open:
        if block:
            yield Problem(path=path, message=f"not supported yet ({key.meaning}); remove it", later=True)
    else:
        for name, default in key.keys.items():
            if name in block:
                inner = default if isinstance(default, Published) else later(key.meaning, default)
                yield from complaints(inner, block[name], join(path, name))


def _asked(key: Published, value: object, path: str) -> Problem:
    if key.fate is Fate.LATER:
        fix = f"remove it or give {one_of(key.accepts)}" if key.accepts else "remove it"
        return Problem(path=path, message=f"got {shown(value)}; not supported yet ({key.meaning}); {fix}", later=True)
    return Problem(path=path, message=f"got {shown(value)}; {key.reason}")


def _without(key: Published) -> str:
    return f"remove the block or give {shown(key.switch)}: {shown(key.switched_off)}"


def is_auto(value: object) -> bool:
    """Whether `value` is the word that leaves a value to us."""
    return isinstance(value, str) and value == "auto"  # an array would compare element by element


def _among(value: object, values: tuple[object, ...]) -> bool:
    # As JSON compares them: in Python `1 == True`, and an array compares element by element.
    return isinstance(value, _JSON) and any(
        value == other and isinstance(value, bool) == isinstance(other, bool) for other in values
    )


def unknown(path: str, name: str, allowed: Mapping[str, object] | list[str], elsewhere: str | None = None) -> Problem:
    """Return the problem of a key that does not exist, with the nearest that does, or where it does exist."""
    match = nearest(name, allowed)
    if elsewhere is not None and (match is None or elsewhere.endswith(f".{name}")):
        return Problem(path=path, message=f"unknown key here; did you mean '{elsewhere}'?")
    if match is not None:
        return Problem(path=path, message=f"unknown key; did you mean '{match}'?")
    if len(allowed) <= 12:
        return Problem(path=path, message=f"unknown key; choose {', '.join(allowed)}")
    return Problem(path=path, message="unknown key; `shoal config reference` lists them all")
