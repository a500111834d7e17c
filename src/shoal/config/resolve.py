"""A section's values pass four steps: today's spelling, known keys, valid values, no conflicts.

Every step goes on past what it refuses, so that one run finds every problem: a refused value is replaced by its default
for the later steps, and a conflict that involves a refused value is not reported, for it may not be one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar, cast

from pydantic import ValidationError

from shoal.config.problem import Problem, from_pydantic, join, shown
from shoal.config.published import Fate, complaints, is_auto, unknown
from shoal.config.section import Conflict, Section

__all__ = ["DEFAULT", "Findings", "Resolved", "leaves", "nested", "resolve"]

S = TypeVar("S", bound=Section)

GIVEN = "given"
DEFAULT = "default"
AUTO = "auto (default)"


@dataclass(slots=True, kw_only=True)
class Findings:
    """What reading a section found beside its values."""

    problems: list[Problem] = field(default_factory=list[Problem])
    warnings: list[str] = field(default_factory=list[str])
    origins: dict[str, str] = field(default_factory=dict[str, str])  # of values that are not plain defaults

    def refused(self, path: str) -> bool:
        """Whether a problem is about `path`, something in it, or something that it is in."""
        return any(_within(problem.path, path) or _within(path, problem.path) for problem in self.problems)


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolved(Generic[S]):
    """A section and what was found on the way to it. The section is whole even when there are problems."""

    section: S
    findings: Findings


def resolve(kind: type[S], given: Mapping[str, object]) -> Resolved[S]:
    """Return the section of type `kind` that the JSON object `given` describes, and every problem in it."""
    findings = Findings()
    values = _known(kind, dict(given), "", findings)
    section = _valid(kind, values, findings)
    for path, conflict in _conflicts(section, ""):
        keys = [join(path, key) for key in conflict.keys]
        if not any(findings.refused(key) for key in keys):
            findings.problems.append(Problem(path=keys[0], message=conflict.message))
    return Resolved(section=section, findings=findings)


def leaves(values: Mapping[str, object], path: str = "") -> Iterator[tuple[str, object]]:
    """Yield the path and the value of every leaf; an empty object is a leaf."""
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from leaves(cast(Mapping[str, object], value), join(path, key))
        else:
            yield join(path, key), value


def nested(kind: type[Section]) -> Mapping[str, type[Section]]:
    """Return the sections that are fields of `kind`, by field."""
    types = {name: info.annotation for name, info in kind.model_fields.items()}
    return {name: type_ for name, type_ in types.items() if isinstance(type_, type) and issubclass(type_, Section)}


def _known(kind: type[Section], given: dict[str, object], path: str, findings: Findings) -> dict[str, object]:
    """Return the keys of `given` that are fields of `kind`, in today's spelling, without "auto"."""
    rewritten = kind.rewrite(given)
    findings.origins |= {join(path, key): origin for key, origin in rewritten.origins.items()}
    findings.problems += [Problem(path=join(path, each.keys[0]), message=each.message) for each in rewritten.conflicts]
    inner = nested(kind)
    values: dict[str, object] = {}
    for key, value in _canonical(kind, rewritten.values, path, findings):
        where = join(path, key)
        if key in kind.published:
            _publish(kind, key, value, where, findings)
        elif key not in kind.model_fields:
            findings.problems.append(_unknown(kind, key, where))
        elif is_auto(value):
            findings.origins[where] = AUTO
        elif key in inner and isinstance(value, Mapping):
            values[key] = _known(inner[key], dict(cast(Mapping[str, object], value)), where, findings)
        elif key in inner:
            if value is not None:
                findings.problems.append(Problem(path=where, message=f"got {shown(value)}; give a JSON object"))
        else:
            values[key] = _without_auto(value, where, findings)
    return values


def _canonical(
    kind: type[Section], values: Mapping[str, object], path: str, findings: Findings
) -> Iterator[tuple[str, object]]:
    """Yield the items of `values` under their one name; two spellings of one key are a problem."""
    for key, value in values.items():
        name = kind.aliases.get(key)
        if name is None:
            yield str(key), value
        elif name in values or any(other in values for other in _earlier_aliases(kind, key)):
            message = f"another spelling of '{name}' stands beside it; keep '{name}'"
            findings.problems.append(Problem(path=join(path, key), message=message))
        else:
            findings.origins[join(path, name)] = f"given as '{key}'"
            yield name, value


def _earlier_aliases(kind: type[Section], key: str) -> list[str]:
    aliases = list(kind.aliases)
    return [other for other in aliases[: aliases.index(key)] if kind.aliases[other] == kind.aliases[key]]


def _publish(kind: type[Section], key: str, value: object, where: str, findings: Findings) -> None:
    published = kind.published[key]
    for problem in complaints(published, value, where):
        if published.fate is Fate.INERT:
            findings.warnings.append(f"{problem.path}: {problem.message}; it has no effect")
        else:
            findings.problems.append(problem)


def _unknown(kind: type[Section], key: str, where: str) -> Problem:
    allowed = [*kind.model_fields, *kind.published, *kind.aliases]
    homes = [f"{name}.{key}" for name, inner in nested(kind).items() if key in {*inner.model_fields, *inner.published}]
    return unknown(where, key, allowed, elsewhere=homes[0] if len(homes) == 1 else None)


def _without_auto(value: object, where: str, findings: Findings) -> object:
    if isinstance(value, Mapping):
        items = cast(Mapping[str, object], value).items()
        findings.origins |= {join(where, key): AUTO for key, inner in items if is_auto(inner)}
        return {key: _without_auto(inner, join(where, key), findings) for key, inner in items if not is_auto(inner)}
    findings.origins.setdefault(where, GIVEN)
    return value


def _valid(kind: type[S], values: dict[str, object], findings: Findings) -> S:
    """Return the section of `values`, with the default where a value is refused."""
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        for location, problem in from_pydantic(error).items():
            findings.problems.append(problem)
            _drop(values, location)
        return kind.model_validate(values)


def _drop(values: dict[str, object], location: tuple[int | str, ...]) -> None:
    """Remove what stands at `location`, or the whole list that it is in."""
    inner = cast(dict[int | str, object], values)
    for key in location[:-1]:
        if not isinstance(inner[key], dict):
            inner.pop(key)
            return
        inner = cast(dict[int | str, object], inner[key])
    inner.pop(location[-1], None)


def _conflicts(section: Section, path: str) -> Iterator[tuple[str, Conflict]]:
    for conflict in section.conflicts():
        yield path, conflict
    for name in nested(type(section)):
        yield from _conflicts(cast(dict[str, Section], section.__dict__)[name], join(path, name))


def _within(path: str, outer: str) -> bool:
    return path == outer or path.startswith((f"{outer}.", f"{outer}["))
