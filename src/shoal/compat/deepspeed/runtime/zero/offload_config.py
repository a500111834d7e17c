"""The published sections of offload."""

from __future__ import annotations

from enum import Enum
from pathlib import Path

from pydantic import Field, model_validator

from shoal.compat.deepspeed.runtime.config_utils import DeepSpeedConfigModel, pp_int

__all__ = ["DeepSpeedZeroOffloadOptimizerConfig", "DeepSpeedZeroOffloadParamConfig", "OffloadDeviceEnum",
           "OffloadStateTypeEnum"]


class OffloadDeviceEnum(str, Enum):  # noqa: UP042  published so
    """Where state rests."""

    none = "none"
    cpu = "cpu"
    nvme = "nvme"


class OffloadStateTypeEnum(str, Enum):  # noqa: UP042  published so
    """The kinds of state that `engine.offload_states` moves."""

    optim_states = "optim_states"
    hp_params = "hp_params"
    lp_params = "lp_params"
    lp_grads = "lp_grads"
    contiguous_grad_buffer = "contiguous_grad_buffer"


class DeepSpeedZeroOffloadParamConfig(DeepSpeedConfigModel):
    """`zero_optimization.offload_param`."""

    device: OffloadDeviceEnum = OffloadDeviceEnum.none
    nvme_path: Path | None = None
    buffer_count: int = Field(default=5, ge=0)
    buffer_size: int = Field(default=pp_int(100_000_000), ge=0)
    max_in_cpu: int = Field(default=pp_int(1_000_000_000), ge=0)
    pin_memory: bool = True


class DeepSpeedZeroOffloadOptimizerConfig(DeepSpeedConfigModel):
    """`zero_optimization.offload_optimizer`."""

    device: OffloadDeviceEnum = OffloadDeviceEnum.none
    nvme_path: Path | None = None
    buffer_count: int = Field(default=4, ge=0)
    pin_memory: bool = True
    pipeline_read: bool = False
    pipeline_write: bool = False
    fast_init: bool = False
    ratio: float = Field(default=1.0, ge=0.0, le=1.0)
    super_offload: bool = False
    cpuadam_cores_perc: float = Field(default=0.8, ge=0.0, le=1.0)

    @model_validator(mode="after")
    def set_pipeline(self) -> DeepSpeedZeroOffloadOptimizerConfig:
        """Add `pipeline`: whether reads or writes overlap with the update."""
        vars(self)["pipeline"] = self.pipeline_read or self.pipeline_write
        return self
