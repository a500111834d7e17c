"""A learning rate that only rises, to find the highest one with which the loss still falls (Smith, arXiv 1506.01186).

    lr(t) = min_lr (1 + step_rate i),   i = (t + 1) / step_size,   rounded down with staircase

These are the formulas of the published schedule of this name.
"""

from __future__ import annotations

from math import floor

from torch.optim import Optimizer

from shoal.schedule.base import Limit, Schedule, count, numbers, torch_optimizer

__all__ = ["LRRangeTest"]


class LRRangeTest(Schedule):
    """Raise the learning rate by `lr_range_test_step_rate` of its minimum every `lr_range_test_step_size` steps.

    The minimum is one number or one per group. Raises `ConfigError` by keyword.
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
