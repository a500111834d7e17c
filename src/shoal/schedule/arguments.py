"""The parameters of the named schedules as flags of a command line, one each, under the published names.

    parser = shoal.add_tuning_arguments(parser)
    scheduler, problem = get_config_from_args(parser.parse_args())      # the section `scheduler` of a configuration
"""

from __future__ import annotations

import argparse
import inspect
from typing import Any

from shoal.schedule.base import Schedule
from shoal.schedule.cycle import OneCycle
from shoal.schedule.range_test import LRRangeTest
from shoal.schedule.warmup import WarmupCosineLR, WarmupDecayLR, WarmupLR

__all__ = ["add_tuning_arguments", "get_config_from_args"]

_KINDS: dict[str, type[Schedule]] = {
    kind.__name__: kind for kind in (LRRangeTest, OneCycle, WarmupLR, WarmupDecayLR, WarmupCosineLR)}
_WITHOUT = ("self", "optimizer", "last_batch_iteration")


def add_tuning_arguments(parser: Any) -> Any:
    """Add `--lr_schedule` and a flag for each parameter of each named schedule to an argparse parser; return it."""
    group = parser.add_argument_group("Convergence tuning", "the learning-rate schedule and its parameters")
    group.add_argument("--lr_schedule", choices=_KINDS, help="the schedule that the flags below are of")
    users: dict[str, list[str]] = {}
    for name, kind in _KINDS.items():
        for parameter in _parameters(kind):
            users.setdefault(parameter.name, []).append(name)
    for flag, names in users.items():
        group.add_argument(f"--{flag}", type=_value, default=None, help=f"of {', '.join(names)}")
    return parser


def get_config_from_args(args: argparse.Namespace) -> tuple[dict[str, Any] | None, str | None]:
    """Return the section `scheduler` that parsed flags ask for and None, or None and what is missing.

    Parameters that were not given have the schedule's defaults; flags of other schedules are not taken.
    """
    given = vars(args)
    chosen = given.get("lr_schedule")
    if chosen is None:
        return None, f"--lr_schedule is not given; choose one of {', '.join(_KINDS)}"
    params: dict[str, Any] = {}
    for parameter in _parameters(_KINDS[chosen]):
        if (value := given.get(parameter.name)) is not None:
            params[parameter.name] = value
        elif parameter.default is inspect.Parameter.empty:
            return None, f"--{parameter.name} is not given; {chosen} needs it"
    return {"type": chosen, "params": params}, None


def _parameters(kind: type[Schedule]) -> list[inspect.Parameter]:
    return [parameter for parameter in inspect.signature(kind.__init__).parameters.values()
            if parameter.name not in _WITHOUT]


def _value(word: str) -> object:
    """Read a flag as JSON would: a number, true or false, a list of numbers for several groups; else the word itself."""
    known: dict[str, object] = {"true": True, "false": False}
    if word.lower() in known:
        return known[word.lower()]
    if "," in word or word.startswith("["):
        return [_value(part.strip()) for part in word.strip("[]").split(",")]
    for kind in (int, float):
        try:
            return kind(word)
        except ValueError:
            continue
    return word
