"""A plan assigns a kind to the modules of a model by name: each pattern matches a module, no module is matched twice.

    Plan({"embed": Vocabulary(), "blocks.*.up": Column(), "blocks.*.down": Row(), "head": Head()})

A pattern is the end of a module's name, component by component, or with a leading dot (`.norm`) the whole name; `*` stands
for any text within a component, `a|b` for either. A module that no pattern matches stays whole on every rank. Within
repeated blocks, however, every weight of two dims or more must be matched: a forgotten one costs its whole memory on every
rank, and does not fit between sliced layers. Where sequences are split, every parameter of a block must be matched, because
a whole parameter sees only a part of the data there, and only `Norm` sums its gradient over the ranks.
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

__all__ = ["Match", "ModelInventory", "Plan", "inventory_of", "match_modules"]

_MAX_LISTED = 6
"""The most lines of one kind in an error."""

_MIN_SIMILARITY = 0.5
"""The least ratio of `SequenceMatcher` at which an error suggests a pattern."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The kinds of conversion by name pattern.

    With `sequence_dim`, tensors between regions are split along that dim (1 if the batch is dim 0), as the kinds `Norm`,
    `Dropout` and `Sequence` specify. Raises `UsageError` for anything but a mapping of patterns to kinds.
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
                                 f"{', '.join(sorted({each.__name__ for each in Kind.__subclasses__()}))}")

    def describe(self) -> list[str]:
        """Return the plan as lines of text, which must be equal on all ranks."""
        return [f"sequence_dim {self.sequence_dim}", *(f"{pattern!r}: {kind}" for pattern, kind in self.kinds.items())]


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """A module of a model, and its kind in the plan."""

    path: str
    module: nn.Module
    kind: Kind


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInventory:
    """The matched patterns and repeated blocks of a model, over all pipeline stages when summed."""

    patterns: Collection[str]
    """The patterns that match a module."""
    numbered: Mapping[tuple[str, str], int]
    """The number of children with a numeric name, by their parent's name and their class."""

    def __add__(self, other: ModelInventory) -> ModelInventory:
        return ModelInventory(patterns={*self.patterns, *other.patterns},
                              numbered=Counter(self.numbered) + Counter(other.numbered))


def inventory_of(model: nn.Module, plan: Plan) -> ModelInventory:
    """Return the inventory of this rank's modules."""
    paths = [path for path, _ in model.named_modules(remove_duplicate=False) if path]
    numbered = Counter((path, type(child).__name__) for path, module in model.named_modules(remove_duplicate=False)
                       for name, child in module.named_children() if name.isdigit())
    return ModelInventory(patterns={pattern for pattern in plan.kinds if any(matches(pattern, path) for path in paths)},
                          numbered=numbered)


def match_modules(plan: Plan, model: nn.Module, whole: ModelInventory) -> list[Match]:
    """Return the matched modules with their kinds, parents first.

    `whole` is the inventory of all stages: a pattern may match nothing here if it matches a module of another stage.
    Raises `UsageError` for a pattern that matches no module, a module that is matched twice, and unmatched parameters
    within repeated blocks.
    """
    paths = {path: module for path, module in model.named_modules(remove_duplicate=False) if path}
    patterns = {path: [pattern for pattern in plan.kinds if matches(pattern, path)] for path in paths}
    problems = [_unused(pattern, paths) for pattern in plan.kinds if pattern not in whole.patterns]
    problems += [f"{path} is matched by {' and by '.join(map(repr, several))}: make one of them longer (a dot before a "
                 "pattern makes it the whole name), so that it is matched once"
                 for path, several in patterns.items() if len(several) > 1]
    found = [Match(path=path, module=paths[path], kind=plan.kinds[several[0]])
             for path, several in patterns.items() if several]
    problems += [*_unpaired(plan), *_unbalanced_sequence(plan)]
    blocks = dict(_within_blocks(model, "", whole.numbered))
    problems += _limited(_unmatched_parameters(blocks, plan, found))
    if plan.sequence_dim is not None:
        problems += _limited(_wrong_in_split_sequence(blocks, found))
    if problems:
        raise UsageError("the plan does not fit the model:\n  " + "\n  ".join(problems))
    return found


def matches(pattern: str, path: str) -> bool:
    """Return whether the last components of `path` match the pattern."""
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


def _unmatched_parameters(blocks: Mapping[str, nn.Module], plan: Plan, matched: list[Match]) -> dict[str, list[str]]:
    """Return error lines for unmatched parameters within blocks, each with the names of the modules that it is about."""
    known = {match.path for match in matched}
    whole = tuple(f"{match.path}." for match in matched if isinstance(match.kind, Whole))
    least, fix = (2, "say how to slice it, or that it is Whole()") if plan.sequence_dim is None else (
        0, "each rank would compute on its part of the sequence, and get its part of the gradient: say Norm() where it runs "
           "between regions, how to slice it, or Whole() where sequences are not split")
    found: dict[str, list[str]] = defaultdict(list)
    for path, module in blocks.items():
        held = any(parameter.ndim >= least for parameter in module.parameters(recurse=False))
        if held and path not in known and not path.startswith(whole):
            close = _nearest_pattern(_starred(path), plan)
            found[f"no pattern matches {_starred(path)} ({type(module).__name__}), {{}} of them" +
                  (f"; the nearest is {close!r}" if close else "") + f": {fix}"].append(path)
    return found


def _unpaired(plan: Plan) -> list[str]:
    """Return an error line if the plan has column layers without row layers, or row layers without column layers."""
    columns = [pattern for pattern, kind in plan.kinds.items()
               if isinstance(kind, Heads) or (isinstance(kind, Column) and not kind.gather_output)]
    rows = [pattern for pattern, kind in plan.kinds.items() if isinstance(kind, Row)]
    if columns and not rows:
        return [f"outputs are sliced by {', '.join(map(repr, columns))}, and no Row() takes them: name the layer that comes "
                f"after them Row(), or gather them by Column(gather_output=True)"]
    if rows and not columns:
        return [f"inputs are sliced by {', '.join(map(repr, rows))}, and no Column() or Heads() leaves them so: name the "
                f"layer that comes before Column()"]
    return []


def _unbalanced_sequence(plan: Plan) -> list[str]:
    """Return an error line if the plan splits sequences and never gathers them, or the other way round."""
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


def _wrong_in_split_sequence(blocks: Mapping[str, nn.Module], matched: list[Match]) -> dict[str, list[str]]:
    """Return error lines for modules whose kind is wrong where sequences are split, each with the modules' names."""
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
                  f"sequences are split: its gradient would be a part on each rank: say Norm(), or how to slice it, or "
                  f"leave sequence_dim out"].append(match.path)
    return found


def _limited(found: Mapping[str, list[str]]) -> list[str]:
    """Fill in the counts, and return at most `_MAX_LISTED` of the lines."""
    lines = [line.format(len(paths)) for line, paths in found.items()]
    return lines if len(lines) <= _MAX_LISTED else [*lines[:_MAX_LISTED], f"... and {len(lines) - _MAX_LISTED} more"]


def _nearest_pattern(path: str, plan: Plan) -> str | None:
    """Return the pattern most similar to the last components of a name."""
    likeness = {pattern: SequenceMatcher(None, pattern, _end(path, pattern)).ratio() for pattern in plan.kinds}
    best = max(likeness, key=likeness.__getitem__, default=None)
    return best if best is not None and likeness[best] >= _MIN_SIMILARITY else None


def _end(path: str, pattern: str) -> str:
    return ".".join(path.split(".")[-pattern.removeprefix(".").count(".") - 1:])


def _within_blocks(module: nn.Module, prefix: str, numbered: Mapping[tuple[str, str], int],
                   inside: bool = False) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules of repeated blocks: children of a ModuleList, of one class in a Sequential, or of one class with
    numeric names in any other module, also if they are on several ranks.
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
