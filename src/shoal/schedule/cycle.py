"""Smith's schedules: `LRRangeTest` (arXiv 1506.01186) and `OneCycle` (arXiv 1803.09820).

The range test only raises the learning rate, to find the highest rate at which the loss still falls:

    lr(t) = min_lr (1 + step_rate i),   i = (t + 1) / step_size,   rounded down with staircase

One cycle raises and lowers the learning rate, moves the momentum in the opposite direction, and then decays both. With
n = t + 1, F and S the first and second step sizes, and k = n - F - S:

    height(n)       n / F                       n <= F
                    1 - (n - F) / S             F < n <= F + S
                    0                           after

    lr(t)           min_lr + (max_lr - min_lr) height(n)        in the cycle
                    min_lr / (1 + decay_lr_rate k / D)          after it
    momentum(t)     max_mom - (max_mom - min_mom) height(n)     in the cycle
                    max_mom (1 + decay_mom_rate k / D)          after it

D is `decay_step_size`; 0 disables the decay. A stair count quantizes a side of the cycle into that many steps. These are
DeepSpeed's formulas, except that DeepSpeed's momentum eventually exceeds 1, and here it stays below 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import floor
from typing import Any, cast

from torch.optim import Optimizer

from shoal.errors import ConfigError
from shoal.log import warn_once
from shoal.schedule.base import Limit, Schedule, count, numbers, torch_optimizer

__all__ = ["LRRangeTest", "OneCycle"]

BETA2 = 0.99
"""The second beta of Adam optimizers while the first beta cycles; DeepSpeed's value."""

MAX_MOMENTUM = 0.999
"""The upper bound of a growing momentum, unless `cycle_max_mom` is higher."""


class LRRangeTest(Schedule):
    """Raise the learning rate by `lr_range_test_step_rate` of its minimum every `lr_range_test_step_size` steps.

    The minimum is one number, or one per group. Raises `ConfigError` that names the keyword.
    """

    def __init__(self, optimizer: Optimizer, lr_range_test_min_lr: Limit = 1e-3, lr_range_test_step_size: int = 2000,
                 lr_range_test_step_rate: float = 1.0, lr_range_test_staircase: bool = False,
                 last_batch_iteration: int = -1) -> None:
        lows = numbers("lr_range_test_min_lr", lr_range_test_min_lr, len(torch_optimizer(optimizer).param_groups))
        size = count("lr_range_test_step_size", lr_range_test_step_size, least=1)
        rate, = numbers("lr_range_test_step_rate", lr_range_test_step_rate, 1)

        def curve(step: int) -> float:
            interval = (step + 1) / size
            return rate * (floor(interval) if lr_range_test_staircase else interval)

        super().__init__(optimizer, low=lows, high=[2 * low for low in lows], curve=curve,
                         last_batch_iteration=last_batch_iteration)


class OneCycle(Schedule):
    """Raise the learning rate from `cycle_min_lr` to `cycle_max_lr` and lower it again; the momentum does the opposite.

    The limits are one number, or one per group. The momentum is `momentum` of SGD, or the first beta of Adam optimizers,
    whose second beta is set to 0.99. If a group has neither, the momentum is not changed, with a warning. Raises
    `ConfigError` that names the keyword.
    """

    def __init__(self, optimizer: Optimizer, cycle_min_lr: Limit, cycle_max_lr: Limit, decay_lr_rate: float = 0.0,
                 cycle_first_step_size: int = 2000, cycle_second_step_size: int | None = None,
                 cycle_first_stair_count: int = 0, cycle_second_stair_count: int | None = None, decay_step_size: int = 0,
                 cycle_momentum: bool = True, cycle_min_mom: Limit = 0.8, cycle_max_mom: Limit = 0.9,
                 decay_mom_rate: float = 0.0, last_batch_iteration: int = -1) -> None:
        inner = torch_optimizer(optimizer)
        groups = len(inner.param_groups)
        low, high = numbers("cycle_min_lr", cycle_min_lr, groups), numbers("cycle_max_lr", cycle_max_lr, groups)
        _check_order("lr", low, high)
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
        decay = 1 + self._decay_lr * self._cycle.decays(self.last_batch_iteration)
        return [lr / decay for lr in super().get_lr()]

    def get_mom(self) -> list[Any]:
        """Return the betas or the momentum of each group at the current step; unchanged values without a cycle."""
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
    """The position of a step within the cycle and the decay after it."""

    first: int
    second: int
    first_stairs: int
    second_stairs: int
    decay: int

    def height(self, step: int) -> float:
        """Return 0 at the lowest and 1 at the highest learning rate of the cycle."""
        n = step + 1
        if n <= self.first:
            return _stairs(n, self.first, self.first_stairs)
        if n <= self.first + self.second:
            return 1 - _stairs(n - self.first, self.second, self.second_stairs)
        return 0.0

    def decays(self, step: int) -> float:
        """Return the steps since the end of the cycle, in units of `decay` steps."""
        return max(0, step + 1 - self.first - self.second) / self.decay if self.decay else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Momentum:
    """The key of the momentum in the parameter groups, and its limits."""

    key: str
    lows: list[float]
    highs: list[float]
    rate: float

    @classmethod
    def of(cls, optimizer: Optimizer, low: Limit, high: Limit, rate: float) -> _Momentum | None:
        """Return the momentum of `optimizer` that is cycled, or None, with a warning, if it has none."""
        groups = optimizer.param_groups
        lows, highs = numbers("cycle_min_mom", low, len(groups)), numbers("cycle_max_mom", high, len(groups))
        _check_order("mom", lows, highs)
        if max(highs) >= 1:
            raise ConfigError(f"scheduler.params.cycle_max_mom: got {max(highs):g}; a momentum is below 1")
        growth, = numbers("decay_mom_rate", rate, 1)
        if all("betas" in group for group in groups):
            _warn_beta2_override(groups)
            return cls(key="betas", lows=lows, highs=highs, rate=growth)
        if all(group.get("momentum") for group in groups):
            return cls(key="momentum", lows=lows, highs=highs, rate=growth)
        warn_once(f"scheduler.params.cycle_momentum: {type(optimizer).__name__} has no betas and no momentum above 0; only "
                  f"the learning rate is cycled. Give it a momentum, or set cycle_momentum to false")
        return None

    def at(self, height: float, decays: float) -> list[Any]:
        """Return the momentum or betas of each group at `height` of the cycle and `decays` after it."""
        momenta = [min((high - (high - low) * height) * (1 + self.rate * decays), max(high, MAX_MOMENTUM))
                   for low, high in zip(self.lows, self.highs, strict=True)]
        return [(momentum, BETA2) for momentum in momenta] if self.key == "betas" else momenta


def _warn_beta2_override(groups: list[dict[str, Any]]) -> None:
    given = {cast("tuple[float, float]", group["betas"])[1] for group in groups} - {BETA2}
    if given:
        warn_once(f"scheduler.params.cycle_momentum: OneCycle sets the second beta to {BETA2}, as published; the optimizer "
                  f"was given {', '.join(f'{beta:g}' for beta in sorted(given))}. Set cycle_momentum to false to keep both "
                  f"betas")


def _stairs(step: int, steps: int, stairs: int) -> float:
    """Return `step / steps`, rounded down to a multiple of `1 / stairs` if `stairs` is not 0."""
    return step * stairs // steps / stairs if stairs else step / steps


def _check_order(name: str, lows: list[float], highs: list[float]) -> None:
    for low, high in zip(lows, highs, strict=True):
        if high < low:
            raise ConfigError(f"scheduler.params.cycle_max_{name}: got {high:g}, below cycle_min_{name} of {low:g}; give "
                              f"at least the minimum")
