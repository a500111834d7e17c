"""The published section `zero_optimization`."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from enum import Enum
from typing import Any

from pydantic import Field, model_validator

from shoal.compat.deepspeed.runtime.config_utils import DeepSpeedConfigModel, get_scalar_param, pp_int
from shoal.compat.deepspeed.runtime.zero.leaf_module_config import DeepSpeedZeroLeafModuleConfig
from shoal.compat.deepspeed.runtime.zero.offload_config import (
    DeepSpeedZeroOffloadOptimizerConfig,
    DeepSpeedZeroOffloadParamConfig,
    OffloadDeviceEnum,
)
from shoal.compat.deepspeed.utils.logging import logger

__all__ = ["ZERO_OPTIMIZATION", "DeepSpeedZeroConfig", "ZeroStageEnum", "get_zero_config", "read_zero_config_deprecated"]

ZERO_OPTIMIZATION = "zero_optimization"


class ZeroStageEnum(int, Enum):
    """The stages, by the state that each shards."""

    disabled = 0
    optimizer_states = 1
    gradients = 2
    weights = 3
    max_stage = 3  # noqa: PIE796  published as another name of the last


def _params_on_cpu(given: bool | None) -> DeepSpeedZeroOffloadParamConfig | None:
    return DeepSpeedZeroOffloadParamConfig(device=OffloadDeviceEnum.cpu) if given else None


def _optimizer_on_cpu(given: bool | None) -> DeepSpeedZeroOffloadOptimizerConfig | None:
    return DeepSpeedZeroOffloadOptimizerConfig(device=OffloadDeviceEnum.cpu) if given else None


def _old(new: str, **rule: Any) -> Any:
    return Field(None, json_schema_extra={"deprecated": True, "new_param": new, **rule})


class DeepSpeedZeroConfig(DeepSpeedConfigModel):
    """The block `zero_optimization`; fields of stage 3 are also spelled with the prefix `stage3_`."""

    stage: ZeroStageEnum = ZeroStageEnum.disabled
    contiguous_gradients: bool = True
    reduce_scatter: bool = True
    reduce_bucket_size: int = Field(pp_int(500_000_000), gt=0)
    use_multi_rank_bucket_allreduce: bool = True
    allgather_partitions: bool = True
    allgather_bucket_size: int = Field(pp_int(500_000_000), ge=0)
    overlap_comm: bool | None = None
    compute_grad_norm: bool = True
    load_from_fp32_weights: bool = True
    elastic_checkpoint: bool = False
    offload_param: DeepSpeedZeroOffloadParamConfig | None = None
    offload_optimizer: DeepSpeedZeroOffloadOptimizerConfig | None = None
    zenflow: dict[str, Any] | None = None
    sub_group_size: int = Field(pp_int(1_000_000_000), ge=0)
    cpu_offload_param: bool | None = _old("offload_param", new_param_fn=_params_on_cpu)
    cpu_offload_use_pin_memory: bool | None = _old("offload_param or offload_optimizer", set_new_param=False)
    cpu_offload: bool | None = _old("offload_optimizer", new_param_fn=_optimizer_on_cpu)
    prefetch_bucket_size: int = Field(pp_int(50_000_000), ge=0, alias="stage3_prefetch_bucket_size")
    param_persistence_threshold: int = Field(pp_int(100_000), ge=0, alias="stage3_param_persistence_threshold")
    model_persistence_threshold: int = Field(pp_int(sys.maxsize, "sys.maxsize"), ge=0,
                                             alias="stage3_model_persistence_threshold")
    max_live_parameters: int = Field(pp_int(1_000_000_000), ge=0, alias="stage3_max_live_parameters")
    max_reuse_distance: int = Field(pp_int(1_000_000_000), ge=0, alias="stage3_max_reuse_distance")
    gather_16bit_weights_on_model_save: bool = Field(False, alias="stage3_gather_16bit_weights_on_model_save")
    module_granularity_threshold: int = Field(0, alias="stage3_module_granularity_threshold")
    use_all_reduce_for_fetch_params: bool = Field(False, alias="stage3_use_all_reduce_for_fetch_params")
    allgather_sequential: bool = Field(False, alias="stage3_allgather_sequential")
    stage3_gather_fp16_weights_on_model_save: bool = Field(False, json_schema_extra={
        "deprecated": True, "new_param": "gather_16bit_weights_on_model_save"})
    ignore_unused_parameters: bool = True
    legacy_stage1: bool = False
    round_robin_gradients: bool = False
    parameter_alignment: bool = False
    zero_hpz_partition_size: int = Field(1, ge=0)
    zero_quantized_weights: bool = False
    zero_quantized_nontrainable_weights: bool = False
    zero_quantized_gradients: bool = False
    memory_efficient_linear: bool = True
    pipeline_loading_checkpoint: bool = False
    override_module_apply: bool = True
    log_trace_cache_warnings: bool = False
    enable_sanity_checks: bool = False
    save_muon_momentum_buffer_in_memory: bool = False
    leaf_module: DeepSpeedZeroLeafModuleConfig = Field(default_factory=DeepSpeedZeroLeafModuleConfig)
    zeropp_loco_param: dict[str, Any] | None = None
    mics_shard_size: int = Field(-1, json_schema_extra={"new_param": "mics_shard_size"})
    mics_hierarchical_params_gather: bool = False

    @model_validator(mode="after")
    def overlap_comm_valid(self) -> DeepSpeedZeroConfig:
        """Resolve `overlap_comm` as published: on at stage 3 alone. (Shoal overlaps at every stage unless it is given.)"""
        if self.overlap_comm is None:
            vars(self)["overlap_comm"] = self.stage == ZeroStageEnum.weights
        return self

    @model_validator(mode="after")
    def compute_grad_norm_valid(self) -> DeepSpeedZeroConfig:
        """Refuse to do without the gradient norm at stages other than 1 and 2."""
        if not self.compute_grad_norm and self.stage not in (1, 2):
            raise ValueError(f"compute_grad_norm: got false at stage {int(self.stage)}; it is for stages 1 and 2")
        return self

    @model_validator(mode="after")
    def offload_ratio_check(self) -> DeepSpeedZeroConfig:
        """Refuse a partial offload below stage 3."""
        partial = self.offload_optimizer is not None and self.offload_optimizer.ratio < 1.0
        assert not partial or self.stage == ZeroStageEnum.weights, (
            f"offload_optimizer.ratio: got less than 1 at stage {int(self.stage)}; a partial offload needs stage 3")
        return self


def read_zero_config_deprecated(param_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Return the section that the oldest form stands for: `"zero_optimization": true` is stage 1."""
    section: dict[str, Any] = {"stage": 1 if param_dict[ZERO_OPTIMIZATION] else 0}
    if section["stage"]:
        section["allgather_bucket_size"] = get_scalar_param(param_dict, "allgather_size", 500_000_000)
    logger.warning('"zero_optimization": a boolean is the oldest form; write "zero_optimization": {"stage": %d}',
                   section["stage"])
    return section


def get_zero_config(param_dict: Mapping[str, Any]) -> DeepSpeedZeroConfig:
    """Return the section of a whole configuration."""
    section = param_dict.get(ZERO_OPTIMIZATION, {})
    if isinstance(section, bool):
        section = read_zero_config_deprecated(param_dict)
    return DeepSpeedZeroConfig(**section)
