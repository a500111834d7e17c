"""Sharded parameters under their published names."""

from __future__ import annotations

import torch

from shoal.compat.deepspeed.accelerator.real_accelerator import get_accelerator as get_accelerator
from shoal.compat.parameters import ZeroParamStatus as ZeroParamStatus
from shoal.compat.parameters import ZeroParamType as ZeroParamType
from shoal.compat.parameters import sharding_unit
from shoal.compat.sharding import DeepSpeedTensorOverride as DeepSpeedTensorOverride
from shoal.compat.sharding import GatheredParameters as GatheredParameters
from shoal.compat.sharding import Init as Init
from shoal.compat.sharding import register_external_parameter as register_external_parameter
from shoal.compat.sharding import unregister_external_parameter as unregister_external_parameter
from shoal.compat.sharding import zero_wrapper_for_fp_tensor_constructor as zero_wrapper_for_fp_tensor_constructor

_orig_torch_tensor, _orig_torch_empty, _orig_torch_zeros = torch.tensor, torch.empty, torch.zeros
_orig_torch_ones, _orig_torch_full, _orig_torch_arange = torch.ones, torch.full, torch.arange
_orig_torch_eye, _orig_torch_randn = torch.eye, torch.randn

partitioned_param_data_shape = [0]


def is_zero_param(parameter: torch.Tensor) -> bool:
    """Whether stage 3 or `zero.Init` shards the parameter."""
    return isinstance(parameter, torch.nn.Parameter) and sharding_unit(parameter) is not None


def shutdown_init_context() -> None:
    """Do nothing: building an engine within `zero.Init` needs no pause of it."""


def restore_init_context() -> None:
    """Do nothing, as `shutdown_init_context` does."""
