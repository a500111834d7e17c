"""A section is resolved in four steps: rewrite legacy forms, check keys, validate values, check conflicts.

Each step continues after an error, so that one run finds every problem. A rejected value is replaced by its default for
the later steps. A conflict that involves a rejected value is not reported, because the value would change.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar, cast

from pydantic import ValidationError

from shoal.config.problem import Problem, from_pydantic, join, shown
from shoal.config.published import Fate, is_auto, published_problems, unknown
from shoal.config.section import Conflict, Section

__all__ = ["DEFAULT", "Findings", "Resolved", "leaves", "nested", "resolve"]

S = TypeVar("S", bound=Section)

GIVEN = "given"
DEFAULT = "default"
AUTO = "auto (default)"


@dataclass(slots=True, kw_only=True)
class Findings:
    """Problems, warnings and value origins found while a section was resolved."""

    problems: list[Problem] = field(default_factory=list[Problem])
    warnings: list[str] = field(default_factory=list[str])
    origins: dict[str, str] = field(default_factory=dict[str, str])  # by path; plain defaults have no entry

    def rejected(self, path: str) -> bool:
        """Whether a problem concerns `path`, a value inside it, or a section that contains it."""
        return any(_within(problem.path, path) or _within(path, problem.path) for problem in self.problems)


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolved(Generic[S]):
    """A section and its findings. The section is complete even when there are problems."""

    section: S
    findings: Findings


def resolve(kind: type[S], given: Mapping[str, object]) -> Resolved[S]:
    """Resolve the JSON object `given` to a section of type `kind` and report every problem in it."""
    findings = Findings()
    values = _known_keys(kind, dict(given), "", findings)
    section = _validated(kind, values, findings)
    for path, conflict in _conflicts(section, ""):
        keys = [join(path, key) for key in conflict.keys]
        if not any(findings.rejected(key) for key in keys):
            findings.problems.append(Problem(path=keys[0], message=conflict.message, kind=conflict.kind))
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


def _known_keys(kind: type[Section], given: dict[str, object], path: str, findings: Findings) -> dict[str, object]:
    """Return the items of `given` that are fields of `kind`, under canonical names, without "auto" values."""
    rewritten = kind.rewrite(given)
    findings.origins |= {join(path, key): origin for key, origin in rewritten.origins.items()}
    findings.problems += [Problem(path=join(path, each.keys[0]), message=each.message, kind=each.kind)
                          for each in rewritten.conflicts]
    inner = nested(kind)
    values: dict[str, object] = {}
    for key, value in _canonical(kind, rewritten.values, path, findings):
        where = join(path, key)
        if key in kind.published:
            _check_published(kind, key, value, where, findings)
        elif key not in kind.model_fields:
            findings.problems.append(_unknown(kind, key, where))
        elif is_auto(value):
            findings.origins[where] = AUTO
        elif key in inner and isinstance(value, Mapping):
            values[key] = _known_keys(inner[key], dict(cast(Mapping[str, object], value)), where, findings)
        elif key in inner:
            if value is not None:
                findings.problems.append(Problem(path=where, message=f"got {shown(value)}; give a JSON object"))
        else:
            values[key] = _without_auto(value, where, findings)
    return values


def _canonical(
    kind: type[Section], values: Mapping[str, object], path: str, findings: Findings
) -> Iterator[tuple[str, object]]:
    """Yield the items of `values` under their canonical names; two spellings of one key are a problem."""
    for key, value in values.items():
        name = kind.aliases.get(key)
        if name is None:
            yield str(key), value
        elif name in values or any(other in values for other in _earlier_aliases(kind, key)):
            message = f"is another spelling of '{name}', which is given too; keep '{name}'"
            findings.problems.append(Problem(path=join(path, key), message=message))
        else:
            findings.origins[join(path, name)] = f"given as '{key}'"
            yield name, value


def _earlier_aliases(kind: type[Section], key: str) -> list[str]:
    aliases = list(kind.aliases)
    return [other for other in aliases[: aliases.index(key)] if kind.aliases[other] == kind.aliases[key]]


def _check_published(kind: type[Section], key: str, value: object, where: str, findings: Findings) -> None:
    published = kind.published[key]
    for problem in published_problems(published, value, where):
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


def _validated(kind: type[S], values: dict[str, object], findings: Findings) -> S:
    """Return the section of `values`, with the default in place of each rejected value."""
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        for location, problem in from_pydantic(error).items():
            findings.problems.append(problem)
            _remove(values, location)
        return kind.model_validate(values)


def _remove(values: dict[str, object], location: tuple[int | str, ...]) -> None:
    """Remove the value at `location`, or the whole list that contains it."""
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
