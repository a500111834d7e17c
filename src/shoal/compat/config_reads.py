"""The published functions that read one value of a configuration, which is a dict, with the published default."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from shoal.attention.settings import MODES, SparseAttentionSettings
from shoal.errors import ConfigError, NotServed
from shoal.precision.policy import DTYPES

__all__ = [
    "get_checkpoint_parallel_write_pipeline", "get_checkpoint_params", "get_checkpoint_tag_validation_mode",
    "get_communication_data_type", "get_data_types_params", "get_dataloader_drop_last", "get_disable_allgather",
    "get_disable_python_gc", "get_dump_state", "get_expert_data_topo_config", "get_gradient_accumulation_steps",
    "get_gradient_allreduce_op", "get_gradient_clipping", "get_gradient_predivide_factor", "get_log_level",
    "get_lower_precision_safe_modules", "get_managed_gradient_accumulation", "get_memory_breakdown",
    "get_optimizer_gradient_clipping", "get_optimizer_legacy_fusion", "get_optimizer_name", "get_optimizer_params",
    "get_pipeline_config", "get_prescale_gradients", "get_scheduler_name", "get_scheduler_params", "get_sparse_attention",
    "get_steps_per_print",
    "get_torch_autocast_dtype", "get_torch_autocast_enabled", "get_train_batch_size", "get_train_micro_batch_size_per_gpu",
    "get_wall_clock_breakdown", "get_zero_allow_untested_optimizer", "get_zero_force_ds_cpu_optimizer",
]  # fmt: skip

Config = Mapping[str, Any]

TAG_MODES = ("WARN", "IGNORE", "FAIL")
REDUCTIONS = ("mean", "sum")
PIPELINE: dict[str, Any] = {"stages": "auto", "partition": "best", "seed_layers": False, "activation_checkpoint_interval": 0,
                            "pipe_partitioned": True, "grad_partitioned": True}
"""The published defaults of the block `pipeline`."""


def _read(*path: str, default: Any = None) -> Callable[[Config], Any]:
    """Return the function that reads the value at `path`."""
    def read(param_dict: Config) -> Any:
        found: Any = param_dict
        for key in path:
            if not isinstance(found, Mapping) or key not in found:
                return default
            found = found[key]
        return found

    read.__doc__ = f"Return `{'.'.join(path)}`, by default {default!r}."
    return read


get_train_batch_size = _read("train_batch_size")
get_train_micro_batch_size_per_gpu = _read("train_micro_batch_size_per_gpu")
get_gradient_accumulation_steps = _read("gradient_accumulation_steps")
get_managed_gradient_accumulation = _read("managed_gradient_accumulation", default=True)
get_gradient_clipping = _read("gradient_clipping", default=1.0)
get_gradient_predivide_factor = _read("gradient_predivide_factor", default=1.0)
get_prescale_gradients = _read("prescale_gradients", default=False)
get_optimizer_name = _read("optimizer", "type")
get_optimizer_params = _read("optimizer", "params")
get_optimizer_gradient_clipping = _read("optimizer", "params", "max_grad_norm")
get_optimizer_legacy_fusion = _read("optimizer", "legacy_fusion", default=False)
get_scheduler_name = _read("scheduler", "type")
get_scheduler_params = _read("scheduler", "params")
get_zero_allow_untested_optimizer = _read("zero_allow_untested_optimizer", default=False)
get_zero_force_ds_cpu_optimizer = _read("zero_force_ds_cpu_optimizer", default=True)
get_torch_autocast_enabled = _read("torch_autocast", "enabled", default=False)
get_lower_precision_safe_modules = _read("torch_autocast", "lower_precision_safe_modules")
get_steps_per_print = _read("steps_per_print")
get_log_level = _read("log_level")
get_wall_clock_breakdown = _read("wall_clock_breakdown", default=False)
get_memory_breakdown = _read("memory_breakdown", default=False)
get_dump_state = _read("dump_state", default=False)
get_dataloader_drop_last = _read("dataloader_drop_last", default=False)
get_disable_allgather = _read("disable_allgather", default=False)
get_disable_python_gc = _read("disable_python_gc", default=False)
get_expert_data_topo_config = _read("use_data_before_expert_parallelism", default=False)
get_checkpoint_params = _read("checkpoint", default={})
get_data_types_params = _read("data_types", default={})


def get_pipeline_config(param_dict: Config) -> dict[str, Any]:
    """Return the block `pipeline` with its defaults."""
    return {**PIPELINE, **param_dict.get("pipeline", {})}


def get_torch_autocast_dtype(param_dict: Config) -> torch.dtype | None:
    """Return the dtype of `torch_autocast`, None if it names none."""
    name = _read("torch_autocast", "dtype")(param_dict)
    return None if name is None else getattr(torch, name)


def get_communication_data_type(param_dict: Config, comm_type: str = "communication_data_type",
                                comm_data_type_default: torch.dtype | None = None) -> torch.dtype | None:
    """Return the dtype of reductions; raises `ValueError` for an unknown name."""
    name = param_dict.get(comm_type)
    if name is None:
        return comm_data_type_default
    if str(name).lower() not in DTYPES:
        raise ConfigError(f"Invalid {comm_type}. Supported data types: {list(DTYPES)}. Got: {name}")
    return DTYPES[str(name).lower()]


def get_gradient_allreduce_op(param_dict: Config) -> str:
    """Return the way of averaging gradients; raises `ValueError` for another name than 'mean' and 'sum'."""
    name = param_dict.get("gradient_allreduce_op", REDUCTIONS[0])
    if name not in REDUCTIONS:
        raise ConfigError(f"Invalid gradient_allreduce_op. Supported operations: {list(REDUCTIONS)}. Got: {name!r}")
    return name


def get_checkpoint_tag_validation_mode(checkpoint_params: Config) -> str:
    """Return the reaction to different tags of ranks, of the block `checkpoint`; raises `ValueError` for an unknown mode."""
    mode = str(checkpoint_params.get("tag_validation", TAG_MODES[0])).upper()
    if mode not in TAG_MODES:
        raise ConfigError(f"checkpoint.tag_validation: got {mode}; choose one of {list(TAG_MODES)}")
    return mode


def get_checkpoint_parallel_write_pipeline(checkpoint_params: Config) -> bool:
    """Return whether pipeline stages write in parallel, of the block `checkpoint`; raises `ValueError` for no boolean."""
    found = _read("parallel_write", "pipeline_stage", default=False)(checkpoint_params)
    if not isinstance(found, bool):
        raise ConfigError(f"checkpoint.parallel_write.pipeline_stage: got {found!r}; give true or false")
    return found


def get_sparse_attention(param_dict: Config) -> dict[str, Any] | None:
    """Return the section `sparse_attention` with `mode` and the keys of that mode; None without a section.

    Raises NotServed (a NotImplementedError) for an unknown mode.
    """
    section = param_dict.get("sparse_attention")
    if section is None:
        return None
    mode = section.get("mode", "fixed")
    published = {name: structure for name, structure in MODES.items() if structure.published}
    if mode not in published:
        raise NotServed(f"sparse_attention.mode: got {mode!r}; choose {', '.join(published)}")
    fields = SparseAttentionSettings.model_fields
    keys = [] if mode == "dense" else ["block", *published[mode].keys]
    if mode in ("bigbird", "bslongformer"):
        keys.remove("attention")  # which the published reader drops
    defaults = {key: list(fields[key].default) if isinstance(fields[key].default, tuple) else fields[key].default
                for key in keys}
    return {"mode": mode, **{key: section.get(key, default) for key, default in defaults.items()}}
