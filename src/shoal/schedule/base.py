"""A schedule is a pure function of the step; `Schedule` writes its value to the optimizer's parameter groups.

    lr(group, step) = low(group) + (high(group) - low(group)) * curve(step)

`step` is -1 until the first call of `step()`, which the engine makes after each optimizer step that was applied.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import inf, isfinite
from typing import Protocol, runtime_checkable

from torch import Tensor
from torch.optim import Optimizer

from shoal.errors import CheckpointError, ConfigError, UsageError

__all__ = ["Curve", "Limit", "Schedule", "count", "numbers", "torch_optimizer"]

Curve = Callable[[int], float]
Limit = float | Sequence[float]


@runtime_checkable
class _OptimizerWrapper(Protocol):
    """A wrapper around an optimizer, such as the engine's."""

    @property
    def optimizer(self) -> object: ...


class NotAnOptimizer(UsageError, TypeError):
    """A schedule was given something else than an optimizer."""


def torch_optimizer(subject: object) -> Optimizer:
    """Return `subject` if it is a torch optimizer, else its `.optimizer`. Raises `UsageError` if neither is one."""
    if isinstance(subject, Optimizer):
        return subject
    if isinstance(subject, _OptimizerWrapper) and isinstance(subject.optimizer, Optimizer):
        return subject.optimizer
    raise NotAnOptimizer(f"schedule: got {type(subject).__name__} as the optimizer; give a torch.optim.Optimizer, or an "
                         f"object with one as .optimizer")


def count(keyword: str, value: object, *, least: int) -> int:
    """Return `value` as an int if it is a whole number of at least `least`, else raise `ConfigError` with the keyword."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not isfinite(value) or value != int(value) \
            or value < least:
        raise ConfigError(f"scheduler.params.{keyword}: got {value!r}; give a whole number of steps, {least} or more")
    return int(value)


def numbers(keyword: str, limit: object, groups: int) -> list[float]:
    """Return one finite, non-negative number per group from one number or one per group; else raise `ConfigError`."""
    each = [limit] * groups if isinstance(limit, int | float) else limit
    if not isinstance(each, list | tuple) or any(
            isinstance(number, bool) or not isinstance(number, int | float) or not 0 <= number < inf for number in each):
        raise ConfigError(f"scheduler.params.{keyword}: got {limit!r}; give one finite number, 0 or more, or one per group")
    if len(each) != groups:
        raise ConfigError(f"scheduler.params.{keyword}: got {limit!r}, {len(each)} numbers for {groups} parameter groups; "
                          f"give one number, or one per group")
    return [float(number) for number in each]


class Schedule:
    """The learning rates of an optimizer's groups: from `low` (curve 0) to `high` (curve 1) along `curve`.

    Each limit is one number, or one per group; a `high` of None means the learning rate of each group. `optimizer` may
    also be an object with an optimizer as `.optimizer`. The constructor writes the value of step -1 to the groups; with
    a later `last_batch_iteration` it does not change them before the next step. Raises `ConfigError` for limits that do
    not match the groups, `UsageError` if `optimizer` is not an optimizer.
    """

    def __init__(self, optimizer: Optimizer, *, low: Limit, high: Limit | None, curve: Curve,
                 last_batch_iteration: int = -1) -> None:
        self.optimizer = torch_optimizer(optimizer)
        self.last_batch_iteration = last_batch_iteration
        groups = self.optimizer.param_groups
        self._lows = _per_group(low, len(groups))
        self._highs = _per_group([float(group["lr"]) for group in groups] if high is None else high, len(groups))
        self._curve = curve
        self._last_lr: list[float] | None = None
        if last_batch_iteration == -1:
            self._write()

    def get_lr(self) -> list[float]:
        """Return the learning rate of each group at the current step, from the formula."""
        factor = self._curve(self.last_batch_iteration)
        return [low + (high - low) * factor for low, high in zip(self._lows, self._highs, strict=True)]

    def get_last_lr(self) -> list[float]:
        """Return the learning rates written last. Raises AssertionError before the first write (as published)."""
        if self._last_lr is None:
            raise AssertionError("need to call step() first")
        return self._last_lr

    def step(self, last_batch_iteration: int | None = None) -> None:
        """Move to the next step, or to `last_batch_iteration`, and write every group's learning rate."""
        following = self.last_batch_iteration + 1
        self.last_batch_iteration = following if last_batch_iteration is None else last_batch_iteration
        self._write()

    def state_dict(self) -> dict[str, int]:
        """Return the step; the curve comes from the configuration."""
        return {"last_batch_iteration": self.last_batch_iteration}

    def load_state_dict(self, state_dict: Mapping[str, int]) -> None:
        """Move to a stored step and write its learning rates."""
        if "last_batch_iteration" not in state_dict:
            raise CheckpointError(f"schedule: the checkpoint lacks last_batch_iteration; it has "
                                  f"{', '.join(sorted(state_dict)) or 'nothing'}; was it saved by another schedule?")
        self.last_batch_iteration = state_dict["last_batch_iteration"]
        self._write()

    def _write(self) -> None:
        self._last_lr = self.get_lr()
        for group, lr in zip(self.optimizer.param_groups, self._last_lr, strict=True):
            if isinstance(group["lr"], Tensor):  # a captured CUDA graph reads this tensor
                group["lr"].fill_(lr)
            else:
                group["lr"] = lr


def _per_group(limit: Limit, groups: int) -> list[float]:
    if isinstance(limit, int | float):
        return [float(limit)] * groups
    if len(limit) != groups:
        raise ConfigError(f"scheduler.params: got {list(limit)}, {len(limit)} learning rates for {groups} parameter "
                          f"groups; give one number, or one per group")
    return [float(number) for number in limit]
