"""The registry maps `scheduler.type` to a schedule class; users can register more classes.

Registered names match in any case. Every scheduler class of `torch.optim.lr_scheduler` is available under its exact name.
The parameters of the built-in schedules can also be command-line flags, under the published names:

    parser = shoal.add_tuning_arguments(parser)
    scheduler, problem = get_config_from_args(parser.parse_args())      # the section `scheduler` of a configuration
"""

from __future__ import annotations

import argparse
import inspect
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, Protocol, TypeVar

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from shoal.registry import Registry
from shoal.schedule.base import Schedule, torch_optimizer
from shoal.schedule.cycle import LRRangeTest, OneCycle
from shoal.schedule.warmup import WarmupCosineLR, WarmupDecayLR, WarmupLR

__all__ = ["AnySchedule", "add_tuning_arguments", "check_schedule_name", "get_config_from_args", "make_schedule",
           "register_schedule", "required_arguments"]


class AnySchedule(Protocol):
    """The interface that the engine needs of a schedule; torch's schedulers have it."""

    def step(self) -> None:
        """Move to the next step and write its learning rates."""
        ...

    def get_last_lr(self) -> list[Any]:
        """Return the learning rate of each group that was written last."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return the state that changes during training."""
        ...

    def load_state_dict(self, state_dict: Any) -> None:
        """Continue from a `state_dict`."""
        ...


F = TypeVar("F", bound=Callable[..., AnySchedule])

_TORCH: dict[str, Callable[..., AnySchedule]] = {
    name: member for name, member in vars(torch.optim.lr_scheduler).items()
    if inspect.isclass(member) and issubclass(member, LRScheduler) and member is not LRScheduler
    and not name.startswith("_")
}  # fmt: skip
_schedules: Registry[AnySchedule] = Registry("scheduler", library=_TORCH, later=frozenset())


def register_schedule(name: str) -> Callable[[F], F]:
    """Register a schedule class, or a function that returns a schedule, as `name` for `scheduler.type`.

    The factory is called with the torch optimizer and with `scheduler.params` as keywords. Raises `UsageError` if the
    name is taken.
    """
    def register(factory: F) -> F:
        return _schedules.register(name, factory)

    return register


def required_arguments(schedule: AnySchedule) -> list[str]:
    """Return the names of the arguments without which the schedule's `step` fails, such as `metrics`."""
    if "step" in getattr(schedule, "__dict__", ()) or not hasattr(type(schedule), "step"):
        return _required(schedule.step, 0)
    return _required_by(type(schedule))


@lru_cache(maxsize=64)
def _required_by(kind: type[AnySchedule]) -> list[str]:
    return _required(kind.step, 1) or (["metrics"] if issubclass(kind, ReduceLROnPlateau) else [])


def _required(step: Callable[..., object], first: int) -> list[str]:
    try:
        parameters = [*inspect.signature(step).parameters.values()][first:]
    except (TypeError, ValueError):  # a compiled function tells nothing of its arguments
        return []
    return [each.name for each in parameters
            if each.default is each.empty and each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)]


def check_schedule_name(type: str) -> None:
    """Raise `ConfigError` for a name that no schedule is registered under."""
    _schedules.check_name(type)


def make_schedule(type: str, params: Mapping[str, object] | None, optimizer: Optimizer, *,
                  replaced_by: Mapping[str, Callable[..., AnySchedule]] | None = None) -> AnySchedule:
    """Build the schedule named `type` for `optimizer` (or for its `.optimizer`) with keywords `params`.

    `replaced_by` are factories to use in place of those registered under their names. Raises `ConfigError`, with the
    allowed names, for an unknown name or keyword or an invalid value.
    """
    return _schedules.make(type, params, torch_optimizer(optimizer), replaced_by=replaced_by or {})


_BUILT_IN: dict[str, type[Schedule]] = {
    kind.__name__: kind for kind in (LRRangeTest, OneCycle, WarmupLR, WarmupDecayLR, WarmupCosineLR)}
for _name, _schedule in _BUILT_IN.items():
    register_schedule(_name)(_schedule)

_NOT_FLAGS = ("self", "optimizer", "last_batch_iteration")


def add_tuning_arguments(parser: Any) -> Any:
    """Add `--lr_schedule` and a flag for every parameter of the built-in schedules to an argparse parser; return it."""
    group = parser.add_argument_group("Convergence tuning", "the learning-rate schedule and its parameters")
    group.add_argument("--lr_schedule", choices=_BUILT_IN, help="the schedule that the flags below configure")
    users: dict[str, list[str]] = {}
    for name, kind in _BUILT_IN.items():
        for parameter in _parameters(kind):
            users.setdefault(parameter.name, []).append(name)
    for flag, names in users.items():
        group.add_argument(f"--{flag}", type=_parse_value, default=None, help=f"of {', '.join(names)}")
    return parser


def get_config_from_args(args: argparse.Namespace) -> tuple[dict[str, Any] | None, str | None]:
    """Return `(section, None)` with the section `scheduler` from parsed flags, or `(None, message)` if a flag is missing.

    Parameters without a flag keep the schedule's defaults. Flags of other schedules are ignored.
    """
    given = vars(args)
    name = given.get("lr_schedule")
    if name is None:
        return None, f"--lr_schedule is not given; choose one of {', '.join(_BUILT_IN)}"
    params: dict[str, Any] = {}
    for parameter in _parameters(_BUILT_IN[name]):
        if (value := given.get(parameter.name)) is not None:
            params[parameter.name] = value
        elif parameter.default is inspect.Parameter.empty:
            return None, f"--{parameter.name} is not given; {name} needs it"
    return {"type": name, "params": params}, None


def _parameters(kind: type[Schedule]) -> list[inspect.Parameter]:
    return [parameter for parameter in inspect.signature(kind.__init__).parameters.values()
            if parameter.name not in _NOT_FLAGS]


def _parse_value(word: str) -> object:
    """Parse a flag as JSON would: a number, true or false, a list of numbers (one per group); else return the word."""
    booleans: dict[str, object] = {"true": True, "false": False}
    if word.lower() in booleans:
        return booleans[word.lower()]
    if "," in word or word.startswith("["):
        return [_parse_value(part.strip()) for part in word.strip("[]").split(",")]
    for kind in (int, float):
        try:
            return kind(word)
        except ValueError:
            continue
    return word
