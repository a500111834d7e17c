"""Published loss scalers. Engines scale by `shoal.precision`, whose rule is the same; these are for loops without one."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from shoal.compat.deepspeed.runtime.config_utils import DeepSpeedConfigObject
from shoal.compat.deepspeed.utils.logging import logger

__all__ = [
    "CONSECUTIVE_HYSTERESIS",
    "DELAYED_SHIFT",
    "INITIAL_LOSS_SCALE",
    "MIN_LOSS_SCALE",
    "SCALE_WINDOW",
    "CreateLossScaler",
    "DynamicLossScaler",
    "LossScaler",
    "LossScalerBase",
    "to_python_float",
]

INITIAL_LOSS_SCALE = "init_scale"
SCALE_WINDOW = "scale_window"
DELAYED_SHIFT = "delayed_shift"
CONSECUTIVE_HYSTERESIS = "consecutive_hysteresis"
MIN_LOSS_SCALE = "min_scale"


def to_python_float(t: Any) -> float:
    """Return the one number of a tensor or a sequence."""
    return t.item() if hasattr(t, "item") else t[0]


class LossScalerBase(DeepSpeedConfigObject):
    """A factor on the loss."""

    dynamic: bool

    def __init__(self, cur_scale: float):
        self.cur_scale = cur_scale
        self.dynamic = False

    @property
    def loss_scale(self) -> float:
        """The factor on the next loss."""
        return self.cur_scale

    def scale_gradient(self, module: Any, grad_in: tuple[Tensor, ...], grad_out: Any) -> tuple[Tensor, ...]:
        """Return gradients times the factor."""
        return tuple(self.loss_scale * gradient for gradient in grad_in)

    def update_scale(self, overflow: bool) -> None:
        """Adapt to whether a step overflowed."""

    def scale_loss(self, loss: Tensor) -> Tensor:
        """Return the loss times the factor, in fp32."""
        return loss.float() * self.loss_scale

    def backward(self, loss: Tensor, retain_graph: bool = False) -> None:
        """Run the backward of the scaled loss."""
        self.scale_loss(loss).backward(retain_graph=retain_graph)


class LossScaler(LossScalerBase):
    """A factor that never changes."""

    def __init__(self, scale: float = 1):
        super().__init__(scale)

    def has_overflow(self, params: Iterable[Tensor]) -> bool:
        """Return False: nothing is checked."""
        return False

    def __repr__(self) -> str:
        return f"LossScaler(scale={self.cur_scale})"


class DynamicLossScaler(LossScalerBase):
    """A factor that halves after overflows and doubles after a window of clean steps.

    It halves at the `delayed_shift`-th overflow; with `consecutive_hysteresis` a clean step resets their count. An overflow
    at `min_scale` raises, unless `raise_error_at_min_scale` is false.
    """

    def __init__(self, init_scale: float, scale_window: int, min_scale: float, delayed_shift: int,
                 consecutive_hysteresis: bool, raise_error_at_min_scale: bool = True, dtype: torch.dtype = torch.half):
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

    def has_overflow_serial(self, params: Iterable[Tensor]) -> bool:
        """Whether a gradient has an infinity or NaN."""
        return any(parameter.grad is not None and not bool(parameter.grad.isfinite().all()) for parameter in params)

    def update_scale(self, overflow: bool) -> None:
        """Adapt to whether a step overflowed."""
        if overflow:
            self._overflowed()
            self.last_overflow_iter = self.cur_iter
        else:
            if self.consecutive_hysteresis:
                self.cur_hysteresis = self.delayed_shift
            if (self.cur_iter - self.last_overflow_iter) % self.scale_window == 0:
                self.cur_hysteresis = self.delayed_shift
                self.cur_scale *= self.scale_factor
        self.cur_iter += 1

    def _overflowed(self) -> None:
        if self.delayed_shift != 1 and self.cur_hysteresis != 1:
            self.cur_hysteresis -= 1
            return
        if self.cur_scale == self.min_scale and self.raise_error_at_min_scale:
            raise RuntimeError(f"gradients overflow at loss scale {self.cur_scale}, the smallest allowed; look for a bad "
                               f"sample, lower the learning rate, or train in bf16")
        lower = max(self.cur_scale / self.scale_factor, self.min_scale)
        logger.warning("overflow: the loss scale goes from %g to %g", self.cur_scale, lower)
        self.cur_scale = lower


def CreateLossScaler(dtype: torch.dtype, static_loss_scale: float, dynamic_scaling: bool,
                     dynamic_loss_args: dict[str, Any] | None) -> LossScalerBase:
    """Return a dynamic scaler for fp16 with `dynamic_scaling`, a static one otherwise (1 for other dtypes)."""
    if dtype == torch.half and dynamic_scaling:
        defaults = {INITIAL_LOSS_SCALE: 2**32, SCALE_WINDOW: 1000, MIN_LOSS_SCALE: 1, DELAYED_SHIFT: 1,
                    CONSECUTIVE_HYSTERESIS: False}
        return DynamicLossScaler(dtype=dtype, **{**defaults, **(dynamic_loss_args or {})})
    return LossScaler(scale=static_loss_scale if dtype == torch.half else 1.0)
