"""The learning-rate schedules under their published names, with the published attributes, errors and flags."""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping, Sequence
from typing import Any

from torch.optim import Optimizer

from shoal.errors import CheckpointError, ConfigError, UsageError
from shoal.log import warn_once
from shoal.schedule import base, warmup

__all__ = ["VALID_LR_SCHEDULES", "LRRangeTest", "OneCycle", "WarmupCosineLR", "WarmupDecayLR", "WarmupLR",
           "add_tuning_arguments", "get_config_from_args", "get_lr_from_config", "get_torch_optimizer", "override_params",
           "parse_arguments", "update_lr"]

LR_SCHEDULE = "lr_schedule"
LR_RANGE_TEST, ONE_CYCLE = "LRRangeTest", "OneCycle"
WARMUP_LR, WARMUP_DECAY_LR, WARMUP_COSINE_LR = "WarmupLR", "WarmupDecayLR", "WarmupCosineLR"
VALID_LR_SCHEDULES = [LR_RANGE_TEST, ONE_CYCLE, WARMUP_LR, WARMUP_DECAY_LR, WARMUP_COSINE_LR]

LR_RANGE_TEST_MIN_LR = "lr_range_test_min_lr"
LR_RANGE_TEST_STEP_RATE = "lr_range_test_step_rate"
LR_RANGE_TEST_STEP_SIZE = "lr_range_test_step_size"
LR_RANGE_TEST_STAIRCASE = "lr_range_test_staircase"
EDGE_VALUE, MID_VALUE = "edge_value", "mid_value"
CYCLE_FIRST_STEP_SIZE, CYCLE_FIRST_STAIR_COUNT = "cycle_first_step_size", "cycle_first_stair_count"
CYCLE_SECOND_STEP_SIZE, CYCLE_SECOND_STAIR_COUNT = "cycle_second_step_size", "cycle_second_stair_count"
DECAY_STEP_SIZE = "decay_step_size"
CYCLE_MIN_LR, CYCLE_MAX_LR, DECAY_LR_RATE = "cycle_min_lr", "cycle_max_lr", "decay_lr_rate"
CYCLE_MIN_MOM, CYCLE_MAX_MOM, DECAY_MOM_RATE = "cycle_min_mom", "cycle_max_mom", "decay_mom_rate"
WARMUP_MIN_LR, WARMUP_MAX_LR, WARMUP_NUM_STEPS = "warmup_min_lr", "warmup_max_lr", "warmup_num_steps"
WARMUP_TYPE, WARMUP_LOG_RATE, WARMUP_LINEAR_RATE = "warmup_type", "log", "linear"
WARMUP_MIN_RATIO, COS_MIN_RATIO, TOTAL_NUM_STEPS = "warmup_min_ratio", "cos_min_ratio", "total_num_steps"

RANGE_FLAGS: dict[str, Any] = {LR_RANGE_TEST_MIN_LR: 0.001, LR_RANGE_TEST_STEP_RATE: 1.0, LR_RANGE_TEST_STEP_SIZE: 1000,
                               LR_RANGE_TEST_STAIRCASE: False}
CYCLE_FLAGS: dict[str, Any] = {
    CYCLE_FIRST_STEP_SIZE: 1000, CYCLE_FIRST_STAIR_COUNT: -1, CYCLE_SECOND_STEP_SIZE: -1, CYCLE_SECOND_STAIR_COUNT: -1,
    DECAY_STEP_SIZE: 1000, CYCLE_MIN_LR: 0.01, CYCLE_MAX_LR: 0.1, DECAY_LR_RATE: 0.0, CYCLE_MIN_MOM: 0.8, CYCLE_MAX_MOM: 0.9,
    DECAY_MOM_RATE: 0.0}
WARMUP_FLAGS: dict[str, Any] = {WARMUP_MIN_LR: 0.0, WARMUP_MAX_LR: 0.001, WARMUP_NUM_STEPS: 1000,
                                WARMUP_TYPE: WARMUP_LOG_RATE}
COSINE_FLAGS: dict[str, Any] = {WARMUP_NUM_STEPS: 1000, WARMUP_TYPE: WARMUP_LOG_RATE, WARMUP_MIN_RATIO: 0.01,
                                COS_MIN_RATIO: 0.01}
FLAGS: Mapping[str, Mapping[str, Any]] = {LR_RANGE_TEST: RANGE_FLAGS, ONE_CYCLE: CYCLE_FLAGS, WARMUP_LR: WARMUP_FLAGS,
                                          WARMUP_DECAY_LR: WARMUP_FLAGS, WARMUP_COSINE_LR: COSINE_FLAGS}
"""The flags of each schedule, and the values that the command line gives them."""


class _NoOptimizer(UsageError, TypeError):
    """An object that is no optimizer."""


class _NoStep(CheckpointError, KeyError):
    """The state of another schedule."""

    __str__ = CheckpointError.__str__


def get_torch_optimizer(optimizer: Any) -> Optimizer:
    """Return the torch optimizer, which may be the `.optimizer` of a wrapper. Raises `TypeError` for another object."""
    try:
        return base.torch_optimizer(optimizer)
    except UsageError as error:
        raise _NoOptimizer(f"{type(optimizer).__name__} is not a subclass of torch.optim.Optimizer; give one, or an object "
                           f"with one as .optimizer") from error


def update_lr(param_groups: Sequence[dict[str, Any]], lrs: Sequence[float]) -> list[float]:
    """Write one learning rate to each group; return them."""
    for group, lr in zip(param_groups, lrs, strict=False):
        group["lr"] = lr
    return [group["lr"] for group in param_groups]


def _format_param(optimizer: Optimizer, param_value: Any, param_name: str) -> list[Any]:
    """Return one value for each group of `optimizer`. Raises `ValueError` for another number of values."""
    groups = len(optimizer.param_groups)
    if not isinstance(param_value, list | tuple):
        return [param_value] * groups
    if len(param_value) != groups:
        raise ConfigError(f"expected {groups} value for {param_name}, got {len(param_value)}")
    return list(param_value)


BETA2 = 0.99
"""The second beta while the first one cycles, as published."""


def _steps(value: Any, name: str) -> int:
    """Return a positive int. Raises `ValueError` for another value."""
    if not isinstance(value, int) or value <= 0:
        raise ConfigError(f"{name} must be a positive integer, got {value}")
    return int(value)


def _length(value: Any, name: str, *, may_be_zero: bool) -> float:
    """Return a length in steps, which may be a fraction. Raises `ValueError` for a negative one."""
    if value < 0 or (value == 0 and not may_be_zero):
        raise ConfigError(f"{name} must be {'non-negative' if may_be_zero else 'positive'}, got {value}")
    return float(value)


class _Loads(base.Schedule):
    """A schedule that raises the published error for a state without a step."""

    def load_state_dict(self, state_dict: Mapping[str, int]) -> None:
        """Continue from a `state_dict`. Raises a `KeyError` if it has no step."""
        try:
            super().load_state_dict(state_dict)
        except CheckpointError as error:
            raise _NoStep(*error.args) from None


class LRRangeTest(_Loads):
    """The published schedule of that name; the rate may be negative."""

    def __init__(self, optimizer: Any, lr_range_test_min_lr: Any = 1e-3, lr_range_test_step_size: int = 2000,
                 lr_range_test_step_rate: float = 1.0, lr_range_test_staircase: bool = False,
                 last_batch_iteration: int = -1):
        inner = get_torch_optimizer(optimizer)
        self.min_lr = _format_param(inner, lr_range_test_min_lr, LR_RANGE_TEST_MIN_LR)
        self.step_size = _steps(lr_range_test_step_size, LR_RANGE_TEST_STEP_SIZE)
        self.step_rate = lr_range_test_step_rate
        self.staircase = lr_range_test_staircase
        super().__init__(inner, low=self.min_lr, high=[2 * low for low in self.min_lr], curve=self._increase,
                         last_batch_iteration=last_batch_iteration)

    def _increase(self, step: int) -> float:
        interval = (step + 1) / self.step_size
        return self.step_rate * (math.floor(interval) if self.staircase else interval)

    def step(self, batch_iteration: int | None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]  published
        """Move to the next step, or to `batch_iteration`."""
        super().step(batch_iteration)


class OneCycle(_Loads):
    """The published schedule of that name: the learning rate and the first beta of Adam cycle, and then decay.

    The formulas are those of `shoal.schedule.cycle`, without its limits: sizes may be fractions, rates negative, and the
    momentum may grow past 1. Until the first step the first beta is its minimum, and `get_last_lr` raises.
    """

    def __init__(self, optimizer: Any, cycle_min_lr: Any, cycle_max_lr: Any, decay_lr_rate: float = 0.0,
                 cycle_first_step_size: int = 2000, cycle_second_step_size: int | None = None,
                 cycle_first_stair_count: int = 0, cycle_second_stair_count: int | None = None, decay_step_size: int = 0,
                 cycle_momentum: bool = True, cycle_min_mom: Any = 0.8, cycle_max_mom: Any = 0.9,
                 decay_mom_rate: float = 0.0, last_batch_iteration: int = -1):
        inner = get_torch_optimizer(optimizer)
        self.min_lrs = _format_param(inner, cycle_min_lr, CYCLE_MIN_LR)
        self.max_lrs = _format_param(inner, cycle_max_lr, CYCLE_MAX_LR)
        self.first_step_size = _length(cycle_first_step_size, CYCLE_FIRST_STEP_SIZE, may_be_zero=False)
        self.second_step_size = self.first_step_size if cycle_second_step_size is None else _length(
            cycle_second_step_size, CYCLE_SECOND_STEP_SIZE, may_be_zero=True)
        self.first_stair_count = cycle_first_stair_count
        self.second_stair_count = cycle_first_stair_count if cycle_second_stair_count is None else cycle_second_stair_count
        self.total_size = self.first_step_size + self.second_step_size
        self.step_ratio = self.first_step_size / self.total_size
        self.decay_step_size, self.decay_lr_rate, self.decay_mom_rate = decay_step_size, decay_lr_rate, decay_mom_rate
        self.skip_lr_decay = decay_step_size == 0 or decay_lr_rate == 0
        self.skip_mom_decay = decay_step_size == 0 or decay_mom_rate == 0
        self.cycle_momentum = cycle_momentum and "betas" in inner.defaults
        super().__init__(inner, low=self.min_lrs, high=self.max_lrs, curve=self._height,
                         last_batch_iteration=last_batch_iteration)
        self._last_lr = None
        if self.cycle_momentum:
            self._start_momentum(cycle_min_mom, cycle_max_mom)
        elif cycle_momentum:
            warn_once(f"scheduler.params.cycle_momentum: {type(inner).__name__} has no betas; only the learning rate is "
                      f"cycled")

    def _start_momentum(self, low: Any, high: Any) -> None:
        groups = self.optimizer.param_groups
        self.min_moms = [(each, BETA2) for each in _format_param(self.optimizer, low, CYCLE_MIN_MOM)]
        self.max_moms = [(each, BETA2) for each in _format_param(self.optimizer, high, CYCLE_MAX_MOM)]
        if self.last_batch_iteration == -1:
            for group, betas in zip(groups, self.min_moms, strict=True):
                group["betas"] = betas

    def _height(self, step: int) -> float:
        """Return 0 at the lowest and 1 at the highest learning rate of the cycle, and 0 after it."""
        n = step + 1
        if n <= self.first_step_size and n < self.total_size:
            return _stairs(n / self.first_step_size, self.first_stair_count)
        left = max(0.0, self.total_size - n)
        return _stairs(left / self.second_step_size, self.second_stair_count) if left else 0.0

    def _decays(self) -> float:
        """Return the steps since the end of the cycle, in units of `decay_step_size`."""
        return max(0.0, self.last_batch_iteration + 1 - self.total_size) / self.decay_step_size

    def get_lr(self) -> list[float]:
        """Return the learning rate of each group at the current step."""
        decay = 1 if self.skip_lr_decay else 1 + self.decay_lr_rate * self._decays()
        return [lr / decay for lr in super().get_lr()]

    def get_mom(self) -> list[tuple[float, float]] | None:
        """Return the betas of each group at the current step; None if they do not cycle."""
        if not self.cycle_momentum:
            return None
        height = self._height(self.last_batch_iteration)
        growth = 1 if self.skip_mom_decay else 1 + self.decay_mom_rate * self._decays()
        return [((high - (high - low) * height) * growth, BETA2)
                for (low, _), (high, _) in zip(self.min_moms, self.max_moms, strict=True)]

    def step(self, batch_iteration: int | None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]  published
        """Move to the next step, or to `batch_iteration`."""
        super().step(batch_iteration)
        for group, betas in zip(self.optimizer.param_groups, self.get_mom() or [], strict=False):
            group["betas"] = betas


def _stairs(height: float, stairs: int) -> float:
    """Return `height`, rounded down to a multiple of `1 / stairs` if there are any."""
    return math.floor(height * stairs + 1e-9) / stairs if stairs > 0 else height


class WarmupLR(_Loads, warmup.WarmupLR):
    """The published schedule of that name."""

    def __init__(self, optimizer: Any, warmup_min_lr: Any = 0.0, warmup_max_lr: Any = None, warmup_num_steps: int = 1000,
                 warmup_type: str = WARMUP_LOG_RATE, last_batch_iteration: int = -1):
        steps = _steps(warmup_num_steps, WARMUP_NUM_STEPS)
        super().__init__(get_torch_optimizer(optimizer), warmup_min_lr, warmup_max_lr, steps, warmup_type,
                         last_batch_iteration)
        self.warmup_num_steps = max(2, steps)
        self.warmup_type = warmup_type if warmup_type in (WARMUP_LOG_RATE, WARMUP_LINEAR_RATE) else WARMUP_LOG_RATE
        self.inverse_log_warm_up = 1.0 / math.log(self.warmup_num_steps)

    @property
    def min_lrs(self) -> list[float]:
        """The lowest learning rate of each group."""
        return self._lows

    @property
    def max_lrs(self) -> list[float]:
        """The highest learning rate of each group."""
        return self._highs

    @property
    def delta_lrs(self) -> list[float]:
        """Their distance."""
        return [high - low for low, high in zip(self._lows, self._highs, strict=True)]

    def _get_gamma(self) -> float:
        """Return where the present step lies between the lowest (0) and the highest learning rate (1)."""
        return self._curve(self.last_batch_iteration)


class WarmupDecayLR(WarmupLR, warmup.WarmupDecayLR):
    """The published schedule of that name."""

    def __init__(self, optimizer: Any, total_num_steps: int, warmup_min_lr: Any = 0.0, warmup_max_lr: Any = 0.001,
                 warmup_num_steps: int = 1000, warmup_type: str = WARMUP_LOG_RATE, last_batch_iteration: int = -1):
        steps = _steps(warmup_num_steps, WARMUP_NUM_STEPS)
        warmup.WarmupDecayLR.__init__(self, get_torch_optimizer(optimizer), total_num_steps, warmup_min_lr, warmup_max_lr,
                                      steps, warmup_type, last_batch_iteration)
        self.total_num_steps = total_num_steps
        self.warmup_num_steps = max(2, steps)
        self.warmup_type = warmup_type if warmup_type in (WARMUP_LOG_RATE, WARMUP_LINEAR_RATE) else WARMUP_LOG_RATE
        self.inverse_log_warm_up = 1.0 / math.log(self.warmup_num_steps)


class WarmupCosineLR(_Loads, warmup.WarmupCosineLR):
    """The published schedule of that name."""

    def __init__(self, optimizer: Any, total_num_steps: int, warmup_min_ratio: float = 0.0, warmup_num_steps: int = 1000,
                 cos_min_ratio: float = 0.0001, warmup_type: str = WARMUP_LOG_RATE, last_batch_iteration: int = -1):
        steps = _steps(warmup_num_steps, WARMUP_NUM_STEPS)
        super().__init__(get_torch_optimizer(optimizer), total_num_steps, warmup_min_ratio, steps, cos_min_ratio,
                         warmup_type, last_batch_iteration)
        self.total_num_steps = total_num_steps
        self.warmup_min_ratio, self.cos_min_ratio = warmup_min_ratio, cos_min_ratio
        self.warmup_num_steps = max(2, steps)
        self.warmup_type = warmup_type if warmup_type in (WARMUP_LOG_RATE, WARMUP_LINEAR_RATE) else WARMUP_LOG_RATE
        self.inverse_log_warm_up = 1.0 / math.log(self.warmup_num_steps)

    @property
    def org_lrs(self) -> list[float]:
        """The learning rate of each group at construction."""
        return self._highs

    def get_lr_ratio(self) -> float:
        """Return the factor of the present step."""
        return self._curve(self.last_batch_iteration)


SCHEDULES: Mapping[str, type[base.Schedule]] = {
    kind.__name__: kind for kind in (LRRangeTest, OneCycle, WarmupLR, WarmupDecayLR, WarmupCosineLR)}
"""The schedules that engines build from a configuration under the published name."""


# The command line


def add_tuning_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add `--lr_schedule` and a flag for every parameter of the schedules to a parser, and return it."""
    group = parser.add_argument_group("Convergence Tuning", "Convergence tuning configurations")
    group.add_argument("--lr_schedule", type=str, default=None, help=f"one of {', '.join(VALID_LR_SCHEDULES)}")
    given: dict[str, Any] = {**RANGE_FLAGS, **CYCLE_FLAGS, "cycle_momentum": False, **WARMUP_FLAGS, **COSINE_FLAGS}
    for name, default in given.items():
        if name == "cycle_momentum":
            group.add_argument("--cycle_momentum", default=False, action="store_true", help="cycle the momentum too")
        elif isinstance(default, bool):
            group.add_argument(f"--{name}", type=bool, default=default, help=f"{name} of the schedule")
        else:
            group.add_argument(f"--{name}", type=type(default), default=default, help=f"{name} of the schedule")
    return parser


def parse_arguments() -> tuple[argparse.Namespace, list[str]]:
    """Parse the flags of the schedules; returns them, and the arguments that are none."""
    return add_tuning_arguments(argparse.ArgumentParser()).parse_known_args()


def _override(args: argparse.Namespace, params: dict[str, Any], names: Mapping[str, Any]) -> None:
    params.update({name: value for name in names if (value := getattr(args, name, None)) is not None})


def override_lr_range_test_params(args: argparse.Namespace, params: dict[str, Any]) -> None:
    """Write the flags of LRRangeTest to `params`."""
    _override(args, params, RANGE_FLAGS)


def override_1cycle_params(args: argparse.Namespace, params: dict[str, Any]) -> None:
    """Write the flags of OneCycle to `params`."""
    _override(args, params, CYCLE_FLAGS)


def override_warmupLR_params(args: argparse.Namespace, params: dict[str, Any]) -> None:
    """Write the flags of WarmupLR to `params`."""
    _override(args, params, WARMUP_FLAGS)


def override_warmupCosineLR_params(args: argparse.Namespace, params: dict[str, Any]) -> None:
    """Write the flags of WarmupCosineLR to `params`."""
    _override(args, params, COSINE_FLAGS)


def override_params(args: argparse.Namespace, params: dict[str, Any]) -> None:
    """Write all flags to `params`."""
    for names in (RANGE_FLAGS, CYCLE_FLAGS, WARMUP_FLAGS, COSINE_FLAGS):
        _override(args, params, names)


def get_config_from_args(args: argparse.Namespace) -> tuple[dict[str, Any] | None, str | None]:
    """Return the section `scheduler` that the flags describe and None, or None and the problem."""
    name = getattr(args, LR_SCHEDULE, None)
    if name is None:
        return None, "--lr_schedule not specified on command line"
    if name not in VALID_LR_SCHEDULES:
        return None, f"{name} is not supported LR schedule"
    params: dict[str, Any] = {}
    _override(args, params, FLAGS[name])
    return {"type": name, "params": params}, None


LR_OF = {LR_RANGE_TEST: LR_RANGE_TEST_MIN_LR, ONE_CYCLE: CYCLE_MAX_LR, WARMUP_LR: WARMUP_MAX_LR,
         WARMUP_DECAY_LR: WARMUP_MAX_LR}
"""The parameter that is a schedule's learning rate."""


def get_lr_from_config(config: Mapping[str, Any]) -> tuple[float | None, str]:
    """Return the learning rate of a section `scheduler` and "", or None and the problem."""
    if "type" not in config:
        return None, "LR schedule type not defined in config"
    if "params" not in config:
        return None, "LR schedule params not defined in config"
    name, params = config["type"], config["params"]
    if name not in VALID_LR_SCHEDULES:
        return None, f"{name} is not a valid LR schedule"
    if name == WARMUP_COSINE_LR:
        return None, f"{name} scales the optimizer learning rate by a ratio, so its params define no lr"
    return params[LR_OF[name]], ""
