"""The published section `flops_profiler`."""

from __future__ import annotations

from typing import Any

from shoal.compat.deepspeed.runtime.config_utils import DeepSpeedConfigObject, get_scalar_param

__all__ = ["FLOPS_PROFILER", "DeepSpeedFlopsProfilerConfig"]

FLOPS_PROFILER = "flops_profiler"
_DEFAULTS = {"enabled": False, "recompute_fwd_factor": 0.0, "profile_step": 1, "module_depth": -1, "top_modules": 1,
             "detailed": True, "output_file": None}


class DeepSpeedFlopsProfilerConfig(DeepSpeedConfigObject):
    """The block `flops_profiler` of the whole configuration `param_dict`."""

    def __init__(self, param_dict: dict[str, Any]):
        super().__init__()
        section = param_dict.get(FLOPS_PROFILER, {})
        for key, default in _DEFAULTS.items():
            setattr(self, key, get_scalar_param(section, key, default))
