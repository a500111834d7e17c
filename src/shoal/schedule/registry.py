"""A schedule has a name in the configuration; the names are open to others.

Registered names are found in any case; every scheduler class of `torch.optim.lr_scheduler` is there under its exact name.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeVar

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from shoal.registry import Registry
from shoal.schedule.base import torch_optimizer
from shoal.schedule.cycle import OneCycle
from shoal.schedule.range_test import LRRangeTest
from shoal.schedule.warmup import WarmupCosineLR, WarmupDecayLR, WarmupLR

__all__ = ["AnySchedule", "make_schedule", "register_schedule"]


class AnySchedule(Protocol):
    """What the engine needs of a schedule; torch's schedulers have it too."""

    def step(self) -> None:
        """Write the next learning rates."""
        ...

    def get_last_lr(self) -> list[Any]:
        """Return the learning rate of each group, as written last."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return what changes in training."""
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
_schedules: Registry[AnySchedule] = Registry("scheduler", lent=_TORCH, later=frozenset())


def register_schedule(name: str) -> Callable[[F], F]:
    """Make a schedule class, or a function that returns one, known as `name` in `scheduler.type`.

    It is called with the torch optimizer first and `scheduler.params` as keywords. Raises `UsageError` when another one
    has the name.
    """
    def register(factory: F) -> F:
        return _schedules.register(name, factory)

    return register


def make_schedule(type: str, params: Mapping[str, object] | None, optimizer: Optimizer) -> AnySchedule:
    """Build the schedule called `type` for `optimizer` (or the one it holds as `.optimizer`) with keywords `params`.

    Raises `ConfigError` naming what is allowed for an unknown name or keyword or a bad value.
    """
    return _schedules.make(type, params, torch_optimizer(optimizer))


register_schedule("WarmupLR")(WarmupLR)
register_schedule("WarmupDecayLR")(WarmupDecayLR)
register_schedule("WarmupCosineLR")(WarmupCosineLR)
register_schedule("OneCycle")(OneCycle)
register_schedule("LRRangeTest")(LRRangeTest)
