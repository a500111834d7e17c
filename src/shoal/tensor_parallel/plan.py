"""A plan says by name what becomes of the modules of a model: each pattern matches some, and no module is matched twice.

    Plan({"embed": Vocabulary(), "blocks.*.up": Column(), "blocks.*.down": Row(), "head": Head()})

A pattern is the end of a module's name, component by component, or with a dot before it (`.norm`) the whole name: `*` stands
for any text within a component, `a|b` for either. What no pattern matches stays whole on every rank; but within repeated
blocks every weight of two dims or more must be matched, for one that was forgotten would cost its memory on every rank, and
between cut layers would not fit.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from fnmatch import translate
from functools import cache

from torch import nn

from shoal.config.suggest import nearest
from shoal.errors import UsageError
from shoal.tensor_parallel.kinds import Kind, Whole

__all__ = ["Match", "Plan", "assign", "used"]

_SHOWN = 6
"""How many names an error lists."""

_LIKE = 0.5
"""The least ratio of `SequenceMatcher` that makes a pattern worth naming."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What becomes of which modules: kinds by the pattern of names.

    With `sequence_dim`, what lies between regions is split along that dim (1 where batches come first), as the kinds
    `Norm`, `Dropout` and `Sequence` say.
    """

    kinds: Mapping[str, Kind]
    sequence_dim: int | None = field(default=None, kw_only=True)

    def describe(self) -> list[str]:
        """Return a line for each thing that must be the same on all ranks."""
        return [f"sequence_dim {self.sequence_dim}", *(f"{pattern!r}: {kind}" for pattern, kind in self.kinds.items())]


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """A module of a model, and what the plan does with it."""

    path: str
    module: nn.Module
    kind: Kind


def used(plan: Plan, model: nn.Module) -> set[str]:
    """Return the patterns that match something in the model."""
    paths = [path for path, _ in model.named_modules(remove_duplicate=False) if path]
    return {pattern for pattern in plan.kinds if any(matches(pattern, path) for path in paths)}


def assign(plan: Plan, model: nn.Module, elsewhere: Collection[str] = ()) -> list[Match]:
    """Return what the plan does with which module, those around others first.

    Patterns that match something `elsewhere`, in other stages of a pipeline, may match nothing here. Raises `UsageError`
    for a pattern that matches nothing, a module that is matched twice, and weights within repeated blocks that nothing
    matches.
    """
    paths = {path: module for path, module in model.named_modules(remove_duplicate=False) if path}
    patterns = {path: [pattern for pattern in plan.kinds if matches(pattern, path)] for path in paths}
    known = {*elsewhere, *(pattern for several in patterns.values() for pattern in several)}
    problems = [_unused(pattern, paths) for pattern in plan.kinds if pattern not in known]
    problems += [f"{path} is matched by {' and by '.join(map(repr, several))}: make one of them longer (a dot before a "
                 "pattern makes it the whole name), so that it is matched once"
                 for path, several in patterns.items() if len(several) > 1]
    found = [Match(path=path, module=paths[path], kind=plan.kinds[several[0]])
             for path, several in patterns.items() if several]
    problems += list(_forgotten(model, plan, found))
    if problems:
        raise UsageError("the plan does not fit the model:\n  " + "\n  ".join(problems))
    return found


def matches(pattern: str, path: str) -> bool:
    """Whether the last components of `path` are those of the pattern."""
    return _compiled(pattern).fullmatch(path) is not None


@cache
def _compiled(pattern: str) -> re.Pattern[str]:
    components = ["|".join(translate(choice).removesuffix(r"\Z").replace(".*", "[^.]*") for choice in component.split("|"))
                  for component in pattern.removeprefix(".").split(".")]
    before = "" if pattern.startswith(".") else r"(?:.*\.)?"
    return re.compile(before + r"\.".join(f"(?:{component})" for component in components))


def _unused(pattern: str, paths: Mapping[str, nn.Module]) -> str:
    close = nearest(pattern, {_end(_starred(path), pattern) for path in paths})
    return f"{pattern!r} matches no module" + (f"; did you mean {close!r}?" if close else "; take it out")


def _forgotten(model: nn.Module, plan: Plan, matched: list[Match]) -> Iterator[str]:
    """Yield a line for the weights within repeated blocks that no pattern matches, by the names of their modules."""
    known = {match.path for match in matched}
    whole = tuple(f"{match.path}." for match in matched if isinstance(match.kind, Whole))
    found: dict[str, list[str]] = defaultdict(list)
    for path, module in _within_blocks(model, ""):
        large = any(parameter.ndim > 1 for parameter in module.parameters(recurse=False))
        if large and path not in known and not path.startswith(whole):
            found[f"{_starred(path)} ({type(module).__name__})"].append(path)
    for name, paths in list(found.items())[:_SHOWN]:
        close = _nearest_pattern(_starred(paths[0]), plan)
        yield (f"no pattern matches {name}, {len(paths)} of them" + (f"; the nearest is {close!r}" if close else "") +
               ": say how to cut it, or that it is Whole()")
    if len(found) > _SHOWN:
        yield f"... and {len(found) - _SHOWN} more"


def _nearest_pattern(path: str, plan: Plan) -> str | None:
    """Return the pattern that is most like the end of a name of as many components."""
    likeness = {pattern: SequenceMatcher(None, pattern, _end(path, pattern)).ratio() for pattern in plan.kinds}
    best = max(likeness, key=likeness.__getitem__, default=None)
    return best if best is not None and likeness[best] >= _LIKE else None


def _end(path: str, pattern: str) -> str:
    return ".".join(path.split(".")[-pattern.removeprefix(".").count(".") - 1:])


def _within_blocks(module: nn.Module, prefix: str, inside: bool = False) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules of repeated blocks, which are children of a ModuleList, or of one class in a Sequential."""
    children = dict(module.named_children())
    kinds = Counter(type(child) for child in children.values())
    for name, child in children.items():
        listed = isinstance(module, nn.ModuleList) or (isinstance(module, nn.Sequential) and kinds[type(child)] > 1)
        path = f"{prefix}{name}"
        if inside or listed:
            yield path, child
        yield from _within_blocks(child, f"{path}.", inside or listed)


def _starred(path: str) -> str:
    return ".".join("*" if component.isdigit() else component for component in path.split("."))
