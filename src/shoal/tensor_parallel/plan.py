"""A plan says by name what becomes of the modules of a model: each pattern matches some, and no module is matched twice.

    Plan({"embed": Vocabulary(), "blocks.*.up": Column(), "blocks.*.down": Row(), "head": Head()})

A pattern is the end of a module's name, component by component, or with a dot before it (`.norm`) the whole name: `*` stands
for any text within a component, `a|b` for either. What no pattern matches stays whole on every rank; but within repeated
blocks every weight of two dims or more must be matched, for one that was forgotten would cost its memory on every rank, and
between cut layers would not fit. Where sequences are split every parameter of a block must be: what is whole there sees a
part of the data, and only `Norm` sums its gradient over the ranks.
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

from shoal.config.problem import nearest
from shoal.errors import UsageError
from shoal.tensor_parallel.plan_rules import Column, Dropout, Heads, Kind, Norm, Region, Row, Sequence, Whole

__all__ = ["Elsewhere", "Match", "Plan", "assign", "found_in"]

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

    def __post_init__(self) -> None:
        if not isinstance(self.kinds, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]  a script's object
            raise UsageError(f"Plan: got a {type(self.kinds).__name__}; give a mapping of name patterns to kinds, such as "
                             f"{{'blocks.*.up': Column()}}")
        for pattern, kind in self.kinds.items():
            if not isinstance(kind, Kind):  # pyright: ignore[reportUnnecessaryIsInstance]
                raise UsageError(f"Plan: {pattern!r}: got {kind!r}; give a kind as a value, such as Column(): one of "
                                 f"{', '.join(sorted(each.__name__ for each in Kind.__subclasses__()))}")

    def describe(self) -> list[str]:
        """Return a line for each thing that must be the same on all ranks."""
        return [f"sequence_dim {self.sequence_dim}", *(f"{pattern!r}: {kind}" for pattern, kind in self.kinds.items())]


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """A module of a model, and what the plan does with it."""

    path: str
    module: nn.Module
    kind: Kind


@dataclass(frozen=True, slots=True, kw_only=True)
class Elsewhere:
    """What a model has, some of whose layers may be on other ranks: in other stages of a pipeline."""

    patterns: Collection[str]
    """The patterns that match something."""
    numbered: Mapping[tuple[str, str], int]
    """How many children called by a number there are of a class, by the name of the module around them and of the class."""

    def __add__(self, other: Elsewhere) -> Elsewhere:
        return Elsewhere(patterns={*self.patterns, *other.patterns},
                         numbered=Counter(self.numbered) + Counter(other.numbered))


def found_in(model: nn.Module, plan: Plan) -> Elsewhere:
    """Return what this rank has of the model."""
    paths = [path for path, _ in model.named_modules(remove_duplicate=False) if path]
    numbered = Counter((path, type(child).__name__) for path, module in model.named_modules(remove_duplicate=False)
                       for name, child in module.named_children() if name.isdigit())
    return Elsewhere(patterns={pattern for pattern in plan.kinds if any(matches(pattern, path) for path in paths)},
                     numbered=numbered)


def assign(plan: Plan, model: nn.Module, whole: Elsewhere) -> list[Match]:
    """Return what the plan does with which module, those around others first.

    Patterns that match something in the `whole` model, of which this rank may have some stages, may match nothing here.
    Raises `UsageError` for a pattern that matches nothing, a module that is matched twice, and parameters within repeated
    blocks that nothing takes care of.
    """
    paths = {path: module for path, module in model.named_modules(remove_duplicate=False) if path}
    patterns = {path: [pattern for pattern in plan.kinds if matches(pattern, path)] for path in paths}
    problems = [_unused(pattern, paths) for pattern in plan.kinds if pattern not in whole.patterns]
    problems += [f"{path} is matched by {' and by '.join(map(repr, several))}: make one of them longer (a dot before a "
                 "pattern makes it the whole name), so that it is matched once"
                 for path, several in patterns.items() if len(several) > 1]
    found = [Match(path=path, module=paths[path], kind=plan.kinds[several[0]])
             for path, several in patterns.items() if several]
    problems += [*_lonely(plan), *_endless(plan)]
    blocks = dict(_within_blocks(model, "", whole.numbered))
    problems += _shown(_forgotten(blocks, plan, found))
    if plan.sequence_dim is not None:
        problems += _shown(_halfway(blocks, found))
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


def _forgotten(blocks: Mapping[str, nn.Module], plan: Plan, matched: list[Match]) -> dict[str, list[str]]:
    """Return what to say of the parameters within blocks that no pattern matches, and the names of their modules."""
    known = {match.path for match in matched}
    whole = tuple(f"{match.path}." for match in matched if isinstance(match.kind, Whole))
    least, fix = (2, "say how to cut it, or that it is Whole()") if plan.sequence_dim is None else (
        0, "each rank would compute on its part of the sequence, and get its part of the gradient: say Norm() where it runs "
           "between regions, how to cut it, or Whole() where sequences are not split")
    found: dict[str, list[str]] = defaultdict(list)
    for path, module in blocks.items():
        held = any(parameter.ndim >= least for parameter in module.parameters(recurse=False))
        if held and path not in known and not path.startswith(whole):
            close = _nearest_pattern(_starred(path), plan)
            found[f"no pattern matches {_starred(path)} ({type(module).__name__}), {{}} of them" +
                  (f"; the nearest is {close!r}" if close else "") + f": {fix}"].append(path)
    return found


def _lonely(plan: Plan) -> list[str]:
    """Return a line if the plan cuts outputs that nothing sums up, or inputs that nothing has cut."""
    columns = [pattern for pattern, kind in plan.kinds.items()
               if isinstance(kind, Heads) or (isinstance(kind, Column) and not kind.gather_output)]
    rows = [pattern for pattern, kind in plan.kinds.items() if isinstance(kind, Row)]
    if columns and not rows:
        return [f"outputs are cut by {', '.join(map(repr, columns))}, and no Row() takes them: name the layer that comes "
                f"after them Row(), or gather them by Column(gather_output=True)"]
    if rows and not columns:
        return [f"inputs are cut by {', '.join(map(repr, rows))}, and no Column() or Heads() leaves them so: name the layer "
                f"that comes before Column()"]
    return []


def _endless(plan: Plan) -> list[str]:
    """Return a line if the plan splits sequences and never gathers them, or the other way round."""
    if plan.sequence_dim is None:
        return []
    begins = [pattern for pattern, kind in plan.kinds.items() if isinstance(kind, Sequence) and kind.split is not None]
    ends = [pattern for pattern, kind in plan.kinds.items() if isinstance(kind, Sequence | Norm) and kind.gather_output]
    if begins and not ends:
        return [f"sequences are split at {', '.join(map(repr, begins))}, and nothing gathers them: say "
                f"Norm(gather_output=True) of the norm behind the last block, or Sequence(gather_output=True) of that block"]
    if ends and not begins:
        return [f"sequences are gathered behind {', '.join(map(repr, ends))}, and nothing splits them: say "
                f"Sequence(split=ARGUMENT) of the first block, with the name of the argument of its forward"]
    return []


def _halfway(blocks: Mapping[str, nn.Module], matched: list[Match]) -> dict[str, list[str]]:
    """Return what to say of parameters where sequences are split that their kind leaves as they are."""
    begins = {match.path.rpartition(".")[0] for match in matched
              if isinstance(match.kind, Sequence) and match.kind.split is not None and match.path in blocks}
    around = tuple(f"{path}." if path else "" for path in begins)
    handled = {match.path for match in matched}
    apart = tuple(f"{match.path}." for match in matched
                  if isinstance(match.kind, Whole) or (isinstance(match.kind, Region) and match.kind.dropout))
    found: dict[str, list[str]] = defaultdict(list)
    for path, module in blocks.items():
        if (isinstance(module, nn.Dropout) and module.p > 0 and path not in handled and not path.startswith(apart)
                and around and path.startswith(around)):
            found[f"no pattern matches {_starred(path)} (Dropout), {{}} of them: it would drop alike from every part: say "
                  f"Dropout() where it runs between regions, or Region(dropout=True) around it"].append(path)
    for match in matched:
        kind, module = type(match.kind).__name__, match.module
        if isinstance(match.kind, Region | Sequence | Dropout) and any(True for _ in module.parameters(recurse=False)):
            found[f"{_starred(match.path)} ({type(module).__name__}), {{}} of them, has parameters of its own, of which "
                  f"{kind}() takes no care where sequences are split: put them into a module within it, and say Norm() of "
                  f"that"].append(match.path)
        elif isinstance(match.kind, Whole) and around and match.path in blocks and match.path.startswith(around) and any(
                True for path, within in module.named_modules(prefix=match.path) if path == match.path or path not in handled
                for _ in within.parameters(recurse=False)):
            found[f"{_starred(match.path)} ({type(module).__name__}), {{}} of them, is Whole() in a list of blocks whose "
                  f"sequences are split: its gradient would be a part on each rank: say Norm(), or how to cut it, or leave "
                  f"sequence_dim out"].append(match.path)
    return found


def _shown(found: Mapping[str, list[str]]) -> list[str]:
    """Return a line for each of what was found, up to `_SHOWN` of them."""
    lines = [line.format(len(paths)) for line, paths in found.items()]
    return lines if len(lines) <= _SHOWN else [*lines[:_SHOWN], f"... and {len(lines) - _SHOWN} more"]


def _nearest_pattern(path: str, plan: Plan) -> str | None:
    """Return the pattern that is most like the end of a name of as many components."""
    likeness = {pattern: SequenceMatcher(None, pattern, _end(path, pattern)).ratio() for pattern in plan.kinds}
    best = max(likeness, key=likeness.__getitem__, default=None)
    return best if best is not None and likeness[best] >= _LIKE else None


def _end(path: str, pattern: str) -> str:
    return ".".join(path.split(".")[-pattern.removeprefix(".").count(".") - 1:])


def _within_blocks(module: nn.Module, prefix: str, numbered: Mapping[tuple[str, str], int],
                   inside: bool = False) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules of repeated blocks: children of a ModuleList, of one class in a Sequential, or called by numbers and
    of one class anywhere else, be it on several ranks.
    """
    children = dict(module.named_children())
    kinds = Counter(type(child) for child in children.values())
    for name, child in children.items():
        listed = (isinstance(module, nn.ModuleList) or (isinstance(module, nn.Sequential) and kinds[type(child)] > 1) or
                  (name.isdigit() and numbered.get((prefix.removesuffix("."), type(child).__name__), 0) > 1))
        path = f"{prefix}{name}"
        if inside or listed:
            yield path, child
        yield from _within_blocks(child, f"{path}.", numbered, inside or listed)


def _starred(path: str) -> str:
    return ".".join("*" if component.isdigit() else component for component in path.split("."))
