"""One cycle of the learning rate up and down, the momentum mirrored; then a slow decay of both (Smith, arXiv 1803.09820).

With n = t + 1, F and S the first and the second step size, k = n - F - S:

    height(n)       n / F                       n <= F
                    1 - (n - F) / S             F < n <= F + S
                    0                           after

    lr(t)           min_lr + (max_lr - min_lr) height(n)        in the cycle
                    min_lr / (1 + decay_lr_rate k / D)          after it
    momentum(t)     max_mom - (max_mom - min_mom) height(n)     in the cycle
                    max_mom (1 + decay_mom_rate k / D)          after it

D is `decay_step_size`; at 0 nothing decays. With stairs a side of the cycle goes in so many jumps. These are the formulas
of the published schedule of this name, whose momentum would pass 1 after long enough: here it stays below.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

from torch.optim import Optimizer

from shoal.errors import ConfigError
from shoal.log import warn_once
from shoal.schedule.base import Limit, Schedule, count, numbers, torch_optimizer

__all__ = ["OneCycle"]

BETA2 = 0.99
"""The second beta of Adam kinds while the first one cycles, as published."""

HIGHEST = 0.999
"""What a growing momentum stops at, unless `cycle_max_mom` is higher."""


class OneCycle(Schedule):
    """Raise the learning rate from `cycle_min_lr` to `cycle_max_lr` and lower it again; the momentum does the opposite.

    The limits are one number or one per group. The momentum is the first beta of Adam kinds, whose second one is set to
    0.99, or `momentum` of SGD; where a group has neither, it is left alone with a warning. Raises `ConfigError` by keyword.
    """

    def __init__(self, optimizer: Optimizer, cycle_min_lr: Limit, cycle_max_lr: Limit, decay_lr_rate: float = 0.0,
                 cycle_first_step_size: int = 2000, cycle_second_step_size: int | None = None,
                 cycle_first_stair_count: int = 0, cycle_second_stair_count: int | None = None, decay_step_size: int = 0,
                 cycle_momentum: bool = True, cycle_min_mom: Limit = 0.8, cycle_max_mom: Limit = 0.9,
                 decay_mom_rate: float = 0.0, last_batch_iteration: int = -1) -> None:
        inner = torch_optimizer(optimizer)
        groups = len(inner.param_groups)
        low, high = numbers("cycle_min_lr", cycle_min_lr, groups), numbers("cycle_max_lr", cycle_max_lr, groups)
        _ordered("lr", low, high)
        second = cycle_first_step_size if cycle_second_step_size is None else cycle_second_step_size
        second_stairs = cycle_first_stair_count if cycle_second_stair_count is None else cycle_second_stair_count
        self._cycle = _Cycle(
            first=count("cycle_first_step_size", cycle_first_step_size, least=1),
            second=count("cycle_second_step_size", second, least=0),
            first_stairs=count("cycle_first_stair_count", cycle_first_stair_count, least=0),
            second_stairs=count("cycle_second_stair_count", second_stairs, least=0),
            decay=count("decay_step_size", decay_step_size, least=0))
        self._decay_lr, = numbers("decay_lr_rate", decay_lr_rate, 1)
        self._momentum = _Momentum.of(inner, cycle_min_mom, cycle_max_mom, decay_mom_rate) if cycle_momentum else None
        super().__init__(optimizer, low=low, high=high, curve=self._cycle.height, last_batch_iteration=last_batch_iteration)

    def get_lr(self) -> list[float]:
        faded = 1 + self._decay_lr * self._cycle.decays(self.last_batch_iteration)
        return [lr / faded for lr in super().get_lr()]

    def get_mom(self) -> list[Any]:
        """Return the betas, or the momentum, of each group at the current step; what it has where none is cycled."""
        groups = self.optimizer.param_groups
        if self._momentum is None:
            return [group.get("betas", group.get("momentum", 0.0)) for group in groups]
        height, decays = (of(self.last_batch_iteration) for of in (self._cycle.height, self._cycle.decays))
        return self._momentum.at(height, decays)

    def _write(self) -> None:
        super()._write()
        if self._momentum is not None:
            for group, momentum in zip(self.optimizer.param_groups, self.get_mom(), strict=True):
                group[self._momentum.key] = momentum


@dataclass(frozen=True, slots=True, kw_only=True)
class _Cycle:
    """How high the cycle stands at a step, and how far beyond it the step is."""

    first: int
    second: int
    first_stairs: int
    second_stairs: int
    decay: int

    def height(self, step: int) -> float:
        """Return 0 where the learning rate is lowest, 1 where it is highest."""
        place = step + 1
        if place <= self.first:
            return _stairs(place, self.first, self.first_stairs)
        if place <= self.first + self.second:
            return 1 - _stairs(place - self.first, self.second, self.second_stairs)
        return 0.0

    def decays(self, step: int) -> float:
        """Return how many times `decay` steps lie between the end of the cycle and the step."""
        return max(0, step + 1 - self.first - self.second) / self.decay if self.decay else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Momentum:
    """Under which key the groups hold their momentum, and between which limits it goes."""

    key: str
    lows: list[float]
    highs: list[float]
    rate: float

    @classmethod
    def of(cls, optimizer: Optimizer, low: Limit, high: Limit, rate: float) -> _Momentum | None:
        """Return what `optimizer` cycles, or None, with a warning, where it has nothing to cycle."""
        groups = optimizer.param_groups
        lows, highs = numbers("cycle_min_mom", low, len(groups)), numbers("cycle_max_mom", high, len(groups))
        _ordered("mom", lows, highs)
        if max(highs) >= 1:
            raise ConfigError(f"scheduler.params.cycle_max_mom: got {max(highs):g}; a momentum is below 1")
        growth, = numbers("decay_mom_rate", rate, 1)
        if all("betas" in group for group in groups):
            _tell_of_beta2(groups)
            return cls(key="betas", lows=lows, highs=highs, rate=growth)
        if all(group.get("momentum") for group in groups):
            return cls(key="momentum", lows=lows, highs=highs, rate=growth)
        warn_once(f"scheduler.params.cycle_momentum: {type(optimizer).__name__} has no betas and no momentum above 0; going "
                  f"on with the learning rate alone. Give it a momentum, or set cycle_momentum to false")
        return None

    def at(self, height: float, decays: float) -> list[Any]:
        """Return what each group holds at `height` of the cycle, or so many `decays` after it."""
        momenta = [min((high - (high - low) * height) * (1 + self.rate * decays), max(high, HIGHEST))
                   for low, high in zip(self.lows, self.highs, strict=True)]
        return [(momentum, BETA2) for momentum in momenta] if self.key == "betas" else momenta


def _tell_of_beta2(groups: list[dict[str, Any]]) -> None:
    given = {cast("tuple[float, float]", group["betas"])[1] for group in groups} - {BETA2}
    if given:
        warn_once(f"scheduler.params.cycle_momentum: OneCycle sets the second beta to {BETA2}, as published; the optimizer "
                  f"was given {', '.join(f'{beta:g}' for beta in sorted(given))}. Set cycle_momentum to false to keep both "
                  f"betas")


def _stairs(place: int, steps: int, stairs: int) -> float:
    """Return how much of the way `place` is of `steps`; in jumps, each at the end of its stair, if there are any."""
    return place * stairs // steps / stairs if stairs else place / steps


def _ordered(what: str, lows: list[float], highs: list[float]) -> None:
    for low, high in zip(lows, highs, strict=True):
        if high < low:
            raise ConfigError(f"scheduler.params.cycle_max_{what}: got {high:g}, below cycle_min_{what} of {low:g}; give "
                              f"one that is not below")
