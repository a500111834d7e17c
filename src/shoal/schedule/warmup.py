"""Three schedules warm up for N steps, then stay constant, decay linearly, or decay along a cosine.

    t < 0         0
    0 <= t < N    m + (1 - m) r,              r = ln(t + 1) / ln N  or  t / N
    t >= N        1                                                                        (constant)
                  max(0, (T - t) / max(1, T - N))                                          (linear)
                  c + (1 - c) (1 + cos(pi p)) / 2,  p = min(1, (t - N + 1) / max(1, T - N))    (cosine)

N is `warmup_num_steps` (at least 2), T `total_num_steps`, c `cos_min_ratio`, m `warmup_min_ratio` (0 but for the cosine).
These are the formulas of the DeepSpeed schedules of the same names.
"""

from __future__ import annotations

import math
from functools import partial

from torch.optim import Optimizer

from shoal.log import warn_once
from shoal.schedule.base import Curve, Limit, Schedule, count

__all__ = ["WarmupCosineLR", "WarmupDecayLR", "WarmupLR"]


class WarmupLR(Schedule):
    """Raise the learning rate from `warmup_min_lr` to `warmup_max_lr` within `warmup_num_steps`, then keep it constant.

    The limits are one number, or one per group; `warmup_max_lr` of None means the learning rate of each group. Raises
    `ConfigError` for a step count that is not a positive integer, or limits that do not match the groups.
    """

    def __init__(self, optimizer: Optimizer, warmup_min_lr: Limit = 0.0, warmup_max_lr: Limit | None = None,
                 warmup_num_steps: int = 1000, warmup_type: str = "log", last_batch_iteration: int = -1) -> None:
        curve = _warmup(warmup_type, _warmup_steps(warmup_num_steps), then=_constant)
        super().__init__(optimizer, low=warmup_min_lr, high=warmup_max_lr, curve=curve,
                         last_batch_iteration=last_batch_iteration)


class WarmupDecayLR(Schedule):
    """Warm up as `WarmupLR`, then decay linearly to `warmup_min_lr` at `total_num_steps`.

    Arguments and errors are those of `WarmupLR`. A total below the warm-up gives a warning; the decay is then one jump.
    """

    def __init__(self, optimizer: Optimizer, total_num_steps: int, warmup_min_lr: Limit = 0.0,
                 warmup_max_lr: Limit | None = 0.001, warmup_num_steps: int = 1000, warmup_type: str = "log",
                 last_batch_iteration: int = -1) -> None:
        steps = _warmup_steps(warmup_num_steps)
        total = _total_steps(total_num_steps, steps)
        curve = _warmup(warmup_type, steps, then=partial(_linear, steps, total))
        super().__init__(optimizer, low=warmup_min_lr, high=warmup_max_lr, curve=curve,
                         last_batch_iteration=last_batch_iteration)


class WarmupCosineLR(Schedule):
    """Warm up from `warmup_min_ratio` to 1 times each group's learning rate, then decay to `cos_min_ratio` times it.

    The decay is half a cosine that ends at `total_num_steps`. Errors are those of `WarmupDecayLR`.
    """

    def __init__(self, optimizer: Optimizer, total_num_steps: int, warmup_min_ratio: float = 0.0,
                 warmup_num_steps: int = 1000, cos_min_ratio: float = 0.0001, warmup_type: str = "log",
                 last_batch_iteration: int = -1) -> None:
        steps = _warmup_steps(warmup_num_steps)
        total = _total_steps(total_num_steps, steps)
        curve = _warmup(warmup_type, steps, start=warmup_min_ratio, then=partial(_cosine, steps, total, cos_min_ratio))
        super().__init__(optimizer, low=0.0, high=None, curve=curve, last_batch_iteration=last_batch_iteration)


def _warmup(kind: str, steps: int, *, then: Curve, start: float = 0.0) -> Curve:
    if kind not in ("log", "linear"):
        warn_once(f"scheduler.params.warmup_type: got {kind!r}; allowed are log and linear; using log")

    def curve(step: int) -> float:
        if step < 0:
            return 0.0
        if step >= steps:
            return then(step)
        fraction = step / steps if kind == "linear" else math.log(step + 1) / math.log(steps)
        return start + (1 - start) * fraction

    return curve


def _constant(step: int) -> float:
    return 1.0


def _linear(steps: int, total: int, step: int) -> float:
    return max(0.0, (total - step) / max(1, total - steps))


def _cosine(steps: int, total: int, floor: float, step: int) -> float:
    progress = min(1.0, (step - steps + 1) / max(1, total - steps))
    return max(0.0, floor + (1 - floor) * (1 + math.cos(math.pi * progress)) / 2)


def _warmup_steps(value: float) -> int:
    return max(2, count("warmup_num_steps", value, least=1))  # ln 1 is 0, the divisor


def _total_steps(value: float, steps: int) -> int:
    total = count("total_num_steps", value, least=1)
    if total < steps:
        warn_once(f"scheduler.params.total_num_steps: got {total}, less than the warm-up of {steps} steps; the learning "
                  f"rate drops to its final value directly after the warm-up")
    return total
