"""A case is a function that uses `deepspeed` and returns what it observed: numbers, texts, tensors, the names of errors.

Nothing here, nor in the families, imports Shoal: the published package runs the same files.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One program: its name, how many ranks run it, and the arguments it is called with."""

    name: str
    run: Callable[..., Any]
    ranks: int
    arguments: Mapping[str, Any] = field(default_factory=dict[str, Any])


CASES: dict[str, Case] = {}


def case(ranks: int = 1, **choices: Sequence[Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a function as one case for each combination of the choices."""

    def register(run: Callable[..., Any]) -> Callable[..., Any]:
        family = run.__module__.rpartition(".")[2]
        for values in itertools.product(*choices.values()):
            label = ",".join(_label(value) for value in values)
            name = f"{family}.{run.__name__}" + (f"[{label}]" if label else "")
            assert name not in CASES, name
            CASES[name] = Case(name=name, run=run, ranks=ranks, arguments=dict(zip(choices, values, strict=True)))
        return run

    return register


def _label(value: Any) -> str:
    return value if isinstance(value, str) and " " not in value else repr(value).replace("torch.", "")


def raised(run: Callable[[], object]) -> dict[str, Any]:
    """Call `run`; return the names of the classes of what it raised, or that it returned."""
    try:
        run()
    except BaseException as error:
        return {"raised": [kind.__name__ for kind in type(error).__mro__]}
    return {"raised": []}


def plain(value: Any) -> Any:
    """Return an observation as JSON holds it."""
    if isinstance(value, torch.Tensor):
        held = value.detach().cpu()
        return {"dtype": str(held.dtype), "shape": list(held.shape), "values": held.double().flatten().tolist()}
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set):
        return [plain(item) for item in (sorted(value) if isinstance(value, set) else value)]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return str(value)


def differences(found: Any, expected: Any, at: str = "") -> Iterator[str]:
    """Yield where an observation differs from the expected one; numbers may differ by rounding."""
    if isinstance(expected, dict) and isinstance(found, dict):
        if set(found) == set(expected) == {"raised"}:
            names = expected["raised"]
            if (names[0] if names else None) not in (found["raised"] or [None]):
                yield f"{at}: raised {found['raised'][:1]}, not {names[:1]}"
            return
        if list(found) != list(expected) and set(found) != set(expected):
            yield f"{at}: keys {sorted(set(found) ^ set(expected))} on one side alone"
            return
        for key in expected:
            yield from differences(found[key], expected[key], f"{at}.{key}")
    elif isinstance(expected, list) and isinstance(found, list):
        if len(found) != len(expected):
            yield f"{at}: {len(found)} values, not {len(expected)}: {str(found)[:100]} / {str(expected)[:100]}"
            return
        for index, (one, other) in enumerate(zip(found, expected, strict=True)):
            yield from differences(one, other, f"{at}[{index}]")
    elif isinstance(expected, float) and isinstance(found, float | int) and not isinstance(found, bool):
        both_nan = expected != expected and found != found
        if not both_nan and found != expected and not abs(found - expected) <= 1e-5 + 2e-3 * abs(expected):
            yield f"{at}: {found}, not {expected}"
    elif found != expected or isinstance(found, bool) != isinstance(expected, bool):
        yield f"{at}: {str(found)[:160]}, not {str(expected)[:160]}"


def verdict(ours: Mapping[str, Any], expected: Any) -> list[str]:
    """Return how what a case showed here differs from what it showed on the published package."""
    if "error" in ours:
        return [ours["error"], *ours.get("trace", [])]
    return list(differences(ours["found"], expected))


def chosen(words: Sequence[str] = (), most: int | None = None) -> list[str]:
    """Return the cases whose names have one of the words, at most so many of each function, spread over its arguments."""
    by_function: dict[str, list[str]] = {}
    for name in CASES:
        if not words or any(word in name for word in words):
            by_function.setdefault(name.partition("[")[0], []).append(name)
    if most is None:
        return [name for names in by_function.values() for name in names]
    return [
        names[index * len(names) // min(most, len(names))]
        for names in by_function.values()
        for index in range(min(most, len(names)))
    ]


SLOW = ("on_zero", "on_engine", "on_half", "on_optimizers", "on_checkpoint", "on_comm")
"""Families that the suite leaves to `python -m tests.published`: other tests of the suite train at every stage."""


def quick(case: Case) -> bool:
    """Whether the suite runs the case, against what was recorded."""
    return case.ranks == 1 and not case.name.startswith(SLOW)


def rounded(value: Any) -> Any:
    """Return an observation with seven digits of each number."""
    if isinstance(value, float):
        return float(f"{value:.7g}")
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    return [rounded(item) for item in value] if isinstance(value, list) else value
