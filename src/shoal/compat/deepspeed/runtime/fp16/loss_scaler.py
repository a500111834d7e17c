"""The published loss scalers, as objects of their own: scripts construct them, and published checkpoints name them.

The dynamic scale halves when gradients overflow, and doubles once `scale_window` clean steps have followed a first one; the
last of `delayed_shift` overflows halves it. Shoal's engines follow the same rule, by `shoal.precision.loss_scale`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn

from shoal.compat.deepspeed.runtime.config_utils import DeepSpeedConfigObject
from shoal.compat.deepspeed.runtime.utils import has_inf_or_nan
from shoal.compat.deepspeed.utils.logging import logger
from shoal.errors import LossScaleError

__all__ = [
    "CONSECUTIVE_HYSTERESIS",
    "DELAYED_SHIFT",
    "INITIAL_LOSS_SCALE",
    "LOSS_SCALE_PROFILE_DEFAULTS",
    "MIN_LOSS_SCALE",
    "SCALE_WINDOW",
    "CreateLossScaler",
    "DynamicLossScaler",
    "LossScaleConfig",
    "LossScaleProfile",
    "LossScaleProfileDefaults",
    "LossScaler",
    "LossScalerBase",
    "to_python_float",
]  # fmt: skip

INITIAL_LOSS_SCALE = "init_scale"
SCALE_WINDOW = "scale_window"
DELAYED_SHIFT = "delayed_shift"
CONSECUTIVE_HYSTERESIS = "consecutive_hysteresis"
MIN_LOSS_SCALE = "min_scale"


def to_python_float(t: Any) -> Any:
    """Return the number in a tensor of one element, else the first item."""
    return t.item() if isinstance(t, Tensor) else t[0]


class LossScalerBase(DeepSpeedConfigObject):
    """A factor on the loss, `loss_scale`."""

    def __init__(self, cur_scale: float):
        self.cur_scale = cur_scale
        self.dynamic = False

    @property
    def loss_scale(self) -> float:
        """The factor."""
        return self.cur_scale

    def scale_gradient(self, module: object, grad_in: Iterable[Tensor], grad_out: object) -> tuple[Tensor, ...]:
        """Return each gradient times the factor."""
        return tuple(self.loss_scale * gradient for gradient in grad_in)

    def update_scale(self, overflow: bool) -> None:
        """Do nothing: the factor is constant."""

    def scale_loss(self, loss: Tensor) -> Tensor:
        """Return the loss times the factor."""
        return loss * self.loss_scale

    def backward(self, loss: Tensor, retain_graph: bool = False) -> None:
        """Run backward of the scaled loss."""
        self.scale_loss(loss).backward(retain_graph=retain_graph)  # pyright: ignore[reportUnknownMemberType]


class LossScaler(LossScalerBase):
    """A constant factor; no gradient counts as an overflow."""

    def __init__(self, scale: float = 1):
        super().__init__(scale)

    def has_overflow(self, params: Iterable[nn.Parameter]) -> bool:
        """Return False."""
        return False

    @staticmethod
    def _has_inf_or_nan(x: Tensor) -> bool:
        return False


class DynamicLossScaler(LossScalerBase):
    """A factor that follows the gradients; see the module.

    Raises `LossScaleError` for an overflow at `min_scale`, unless `raise_error_at_min_scale` is false.
    """

    def __init__(self, init_scale: float, scale_window: int, min_scale: float, delayed_shift: int,
                 consecutive_hysteresis: bool, raise_error_at_min_scale: bool = True, dtype: torch.dtype = torch.float16):
        super().__init__(init_scale)
        self.dynamic = True
        self.cur_iter = 0
        self.last_overflow_iter = -1
        self.scale_factor = 2.0
        self.scale_window = scale_window
        self.min_scale = min_scale
        self.delayed_shift = delayed_shift
        self.cur_hysteresis = delayed_shift
        self.consecutive_hysteresis = consecutive_hysteresis
        self.raise_error_at_min_scale = raise_error_at_min_scale
        self.dtype = dtype

    def has_overflow_serial(self, params: Iterable[nn.Parameter]) -> bool:
        """Whether a gradient of this rank is infinite or NaN."""
        return any(self._has_inf_or_nan(each.grad.data) for each in params if each.grad is not None)

    @staticmethod
    def _has_inf_or_nan(x: Tensor) -> bool:
        return bool(has_inf_or_nan(x))

    def update_scale(self, overflow: bool) -> None:
        """Follow one step, which overflowed or did not."""
        if overflow:
            self._overflowed()
        else:
            if self.consecutive_hysteresis:
                self.cur_hysteresis = self.delayed_shift
            stable = self.cur_iter - self.last_overflow_iter - 1
            if stable > 0 and stable % self.scale_window == 0:
                self.cur_hysteresis = self.delayed_shift
                self.cur_scale *= self.scale_factor
        self.cur_iter += 1

    def _overflowed(self) -> None:
        if self.delayed_shift > 1 and self.cur_hysteresis > 1:
            self.cur_hysteresis -= 1
            logger.info("overflow: loss scale %s stays, %d more until it halves", self.cur_scale, self.cur_hysteresis)
        else:
            if self.cur_scale == self.min_scale and self.raise_error_at_min_scale:
                raise LossScaleError(f"Current loss scale already at minimum - cannot decrease scale anymore. It is "
                                     f"{self.cur_scale:g}: look for a bad sample, lower the learning rate, or train in bf16")
            self.cur_scale = max(self.cur_scale / self.scale_factor, self.min_scale)
        self.last_overflow_iter = self.cur_iter


def CreateLossScaler(dtype: torch.dtype, static_loss_scale: float, dynamic_scaling: bool,
                     dynamic_loss_args: Mapping[str, Any] | None) -> LossScalerBase:
    """Return the scaler of a training in `dtype`: fp16 alone scales dynamically, and other dtypes scale by 1."""
    if dtype == torch.half and dynamic_scaling:
        given: dict[str, Any] = {
            INITIAL_LOSS_SCALE: 2.0 ** 32, SCALE_WINDOW: 1000, MIN_LOSS_SCALE: 1, DELAYED_SHIFT: 1,
            CONSECUTIVE_HYSTERESIS: False, **(dynamic_loss_args or {})}
        return DynamicLossScaler(dtype=dtype, **given)
    return LossScaler(static_loss_scale if dtype == torch.half else 1.0)


class LossScaleProfile(Enum):
    """Which published fp16 optimizer the defaults of a loss scale are for."""

    FUSED = "fused"
    UNFUSED = "unfused"


@dataclass(frozen=True)
class LossScaleProfileDefaults:
    """The dynamic scale of a profile where the arguments do not say another."""

    initial_dynamic_scale: float
    default_scale_window: int
    default_min_loss_scale: float
    scale_factor: float


LOSS_SCALE_PROFILE_DEFAULTS = {
    LossScaleProfile.FUSED: LossScaleProfileDefaults(
        initial_dynamic_scale=2**32, default_scale_window=1000, default_min_loss_scale=1, scale_factor=2.0),
    LossScaleProfile.UNFUSED: LossScaleProfileDefaults(
        initial_dynamic_scale=2.0**16, default_scale_window=1000, default_min_loss_scale=0.25, scale_factor=2.0)}


class LossScaleConfig:
    """The loss scale of an fp16 optimizer at stage 0: its present value and the rule that changes it."""

    def __init__(self, low_precision_dtype: torch.dtype, dynamic_loss_scale: bool, static_loss_scale: float,
                 dynamic_loss_args: Mapping[str, Any] | None, *, profile: LossScaleProfile = LossScaleProfile.FUSED,
                 initial_dynamic_scale: float | None = None):
        self.use_grad_scaling = low_precision_dtype == torch.float16
        self.dynamic_loss_scale = self.use_grad_scaling and dynamic_loss_scale
        self.cur_iter = 0
        self.last_overflow_iter: int | None = None
        self.scale_factor: float | None = None
        self.scale_window: int | None = None
        self.min_loss_scale: float | None = None
        self.cur_scale: float = static_loss_scale if self.use_grad_scaling else 1.0
        if self.dynamic_loss_scale:
            defaults, given = LOSS_SCALE_PROFILE_DEFAULTS[profile], dynamic_loss_args or {}
            initial = defaults.initial_dynamic_scale if initial_dynamic_scale is None else initial_dynamic_scale
            self.cur_scale = given.get(INITIAL_LOSS_SCALE, initial)
            self.scale_window = given.get(SCALE_WINDOW, defaults.default_scale_window)
            self.min_loss_scale = given.get(MIN_LOSS_SCALE, defaults.default_min_loss_scale)
            self.scale_factor, self.last_overflow_iter = defaults.scale_factor, -1
