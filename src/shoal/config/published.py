"""Every published DeepSpeed key that Shoal does not implement has a stated fate, applied when the key requests something.

    later    raises NotSupportedYet: a later version will implement it
    inert    warns once: it has no effect here; the message gives the reason
    old      raises ConfigError: it is obsolete; the message says what to write instead

A value requests nothing when it is null, "auto", the published default, or a block that is switched off. Unknown keys
inside such a block are rejected like any other unknown key.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import cast

from shoal.config.problem import Problem, join, nearest, one_of, shown
from shoal.errors import NotSupportedYet

__all__ = ["Fate", "Published", "inert", "is_auto", "later", "later_block", "old", "published_problems", "unknown"]

_JSON = (bool, int, float, str, list, dict, type(None))


class Fate(Enum):
    """The treatment of a key whose value requests something."""

    LATER = "not yet"
    INERT = "no effect"
    OLD = "old form"


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """One published key: its meaning, the values that request nothing, and its fate for any other value."""

    fate: Fate
    meaning: str
    accepts: tuple[object, ...] = ()  # the published default first
    reason: str = ""
    keys: Mapping[str, object] = field(default_factory=dict[str, object])  # of a block: a default or Published per key
    switch: str | None = None  # the key of the block that enables it
    off: tuple[object, ...] = (None, False, "none")  # the values of the switch that disable the block
    open: bool = False  # the block accepts keys that are not listed
    instead: str = ""  # of a later block: how to do without it

    @property
    def switched_off(self) -> object:
        """The value of `switch` that disables the block."""
        default = self.keys.get(self.switch or "")
        return default if default in self.off[1:] else next(value for value in self.off if value is not None)


def later(meaning: str, *accepts: object) -> Published:
    """Return a key of a later version. The values in `accepts` request nothing; the published default comes first."""
    return Published(fate=Fate.LATER, meaning=meaning, accepts=accepts)


def later_block(
    meaning: str,
    keys: Mapping[str, object] | None = None,
    *,
    switch: str | None = None,
    off: tuple[object, ...] = (None, False, "none"),
    instead: str = "",
) -> Published:
    """Return a block of a later version with its keys' published defaults; without `keys` it accepts any key.

    `instead` says how to do without the block.
    """
    listed = dict(keys or {})
    return Published(fate=Fate.LATER, meaning=meaning, keys=listed, switch=switch, off=off, open=not keys, instead=instead)


def inert(meaning: str, *accepts: object, reason: str) -> Published:
    """Return a key that has no effect here because of `reason`; without `accepts` every value passes silently."""
    return Published(fate=Fate.INERT, meaning=meaning, accepts=accepts, reason=reason)


def old(meaning: str, *accepts: object, reason: str) -> Published:
    """Return an obsolete key; `reason` says what to write instead."""
    return Published(fate=Fate.OLD, meaning=meaning, accepts=accepts, reason=reason)


def published_problems(key: Published, value: object, path: str) -> Iterator[Problem]:
    """Yield a problem for everything that `value` of `key` at `path` requests; unsupported keys give a `later` problem."""
    if value is None or is_auto(value) or _contains(value, key.accepts):
        return
    if key.fate is Fate.INERT and not key.accepts:
        return
    if isinstance(value, Mapping) and (key.keys or key.open):
        yield from _block_problems(key, cast(Mapping[str, object], value), path)
    elif not (key.switch is not None and value is False):
        yield _requested(key, value, path)


def _block_problems(key: Published, block: Mapping[str, object], path: str) -> Iterator[Problem]:
    if not key.open:
        for name in block:
            if name not in key.keys:
                yield unknown(join(path, name), name, key.keys)
    if key.switch is not None:
        if not _contains(block.get(key.switch, key.keys.get(key.switch, False)), (*key.off, "auto")):
            yield Problem(path=path, message=f"not supported yet ({key.meaning}); {_without(key)}", kind=NotSupportedYet)
    elif key.open:
        if block:
            yield Problem(path=path, message=f"not supported yet ({key.meaning}); remove it", kind=NotSupportedYet)
    else:
        for name, default in key.keys.items():
            if name in block:
                inner = default if isinstance(default, Published) else later(key.meaning, default)
                yield from published_problems(inner, block[name], join(path, name))


def _requested(key: Published, value: object, path: str) -> Problem:
    if key.fate is Fate.LATER:
        fix = f"remove it or give {one_of(key.accepts)}" if key.accepts else "remove it"
        return Problem(path=path, message=f"got {shown(value)}; not supported yet ({key.meaning}); {fix}",
                       kind=NotSupportedYet)
    return Problem(path=path, message=f"got {shown(value)}; {key.reason}")


def _without(key: Published) -> str:
    fix = f"remove the block or give {shown(key.switch)}: {shown(key.switched_off)}"
    return f"{fix}, and {key.instead}" if key.instead else fix


def is_auto(value: object) -> bool:
    """Whether `value` is "auto", which leaves the choice to Shoal."""
    return isinstance(value, str) and value == "auto"  # a numpy array would compare element by element


def _contains(value: object, values: tuple[object, ...]) -> bool:
    # JSON comparison: in Python `1 == True`, and a numpy array compares element by element.
    return isinstance(value, _JSON) and any(
        value == other and isinstance(value, bool) == isinstance(other, bool) for other in values
    )


def unknown(path: str, name: str, allowed: Mapping[str, object] | list[str], elsewhere: str | None = None) -> Problem:
    """Return the problem of an unknown key, with the most similar allowed key, or the section that has the key."""
    match = nearest(name, allowed)
    if elsewhere is not None and (match is None or elsewhere.endswith(f".{name}")):
        return Problem(path=path, message=f"unknown key here; did you mean '{elsewhere}'?")
    if match is not None:
        return Problem(path=path, message=f"unknown key; did you mean '{match}'?")
    if len(allowed) <= 12:
        return Problem(path=path, message=f"unknown key; choose {', '.join(allowed)}")
    return Problem(path=path, message="unknown key; `shoal config reference` lists them all")
