"""The published sections `fp16` and `bf16`."""

from __future__ import annotations

import math
from typing import Any, Self

from pydantic import field_validator, model_validator

from shoal.compat.deepspeed.runtime.config_utils import DeepSpeedConfigModel

__all__ = [
    "BFLOAT16",
    "BFLOAT16_OLD",
    "CONSECUTIVE_HYSTERESIS",
    "DELAYED_SHIFT",
    "FP16",
    "INITIAL_LOSS_SCALE",
    "MIN_LOSS_SCALE",
    "SCALE_WINDOW",
    "DeepSpeedBF16Config",
    "DeepSpeedFP16Config",
    "get_bfloat16_config",
    "get_float16_config",
]

FP16 = "fp16"
BFLOAT16 = "bf16"
BFLOAT16_OLD = "bfloat16"
INITIAL_LOSS_SCALE = "init_scale"
SCALE_WINDOW = "scale_window"
DELAYED_SHIFT = "delayed_shift"
CONSECUTIVE_HYSTERESIS = "consecutive_hysteresis"
MIN_LOSS_SCALE = "min_scale"


class DeepSpeedBF16Config(DeepSpeedConfigModel):
    """The block `bf16`."""

    enabled: bool = False
    immediate_grad_update: bool = False
    check_grad_overflow: bool = True
    bf16_master_weights_and_grads: bool = False
    bf16_optimizer_states: bool = False


class DeepSpeedFP16Config(DeepSpeedConfigModel):
    """The block `fp16`."""

    enabled: bool = False
    auto_cast: bool = False
    loss_scale: float = 0
    initial_scale_power: int = 16
    loss_scale_window: int = 1000
    hysteresis: int = 2
    consecutive_hysteresis: bool = False
    min_loss_scale: int = 1
    fp16_master_weights_and_grads: bool = False

    @field_validator("loss_scale", mode="before")
    @classmethod
    def _finite(cls, given: Any) -> float:
        if isinstance(given, bool):
            raise ValueError(f"fp16.loss_scale: got {given}; give a number")
        try:
            number = float(given)
        except (TypeError, ValueError):
            raise ValueError(f"fp16.loss_scale: got {given!r}; give a number") from None
        if not math.isfinite(number) or number < 0:
            raise ValueError(f"fp16.loss_scale: got {number}; give a finite number from 0, where 0 is dynamic")
        return number

    @model_validator(mode="after")
    def _positive(self) -> Self:
        if self.enabled and self.loss_scale == 0:
            for name in ("loss_scale_window", "min_loss_scale"):
                if getattr(self, name) <= 0:
                    raise ValueError(f"fp16.{name}: got {getattr(self, name)}; a dynamic loss scale (loss_scale of 0) needs "
                                     f"a number above 0")
        return self

    def initial_dynamic_scale(self) -> int:
        """Return the first dynamic loss scale."""
        return 2**self.initial_scale_power

    def dynamic_loss_scale_args(self) -> dict[str, Any]:
        """Return the keywords of the dynamic loss scaler."""
        return {INITIAL_LOSS_SCALE: self.initial_dynamic_scale(), SCALE_WINDOW: self.loss_scale_window,
                DELAYED_SHIFT: self.hysteresis, CONSECUTIVE_HYSTERESIS: self.consecutive_hysteresis,
                MIN_LOSS_SCALE: self.min_loss_scale}


def get_float16_config(param_dict: dict[str, Any]) -> DeepSpeedFP16Config:
    """Return the block `fp16` of a whole configuration."""
    return DeepSpeedFP16Config(**param_dict.get(FP16, {}))


def get_bfloat16_config(param_dict: dict[str, Any]) -> DeepSpeedBF16Config:
    """Return the block `bf16`, or its older spelling `bfloat16`, of a whole configuration."""
    return DeepSpeedBF16Config(**param_dict.get(BFLOAT16, param_dict.get(BFLOAT16_OLD, {})))
