"""Activation checkpointing under its published names: `configure` once, then `checkpoint(function, *args)`.

The mechanism is that of `shoal.checkpointing`. What `configure` was told can be read under the names of the published module
variables, such as `PARTITION_ACTIVATIONS`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from shoal.activation.checkpointing import CheckpointingOptions, may_rest, options, take
from shoal.activation.checkpointing import checkpoint as recomputed
from shoal.activation.checkpointing import get_cuda_rng_tracker as get_cuda_rng_tracker
from shoal.activation.checkpointing import is_configured as is_configured
from shoal.activation.checkpointing import model_parallel_cuda_manual_seed as model_parallel_cuda_manual_seed
from shoal.activation.checkpointing import model_parallel_reconfigure_tp_seed as model_parallel_reconfigure_tp_seed
from shoal.activation.checkpointing import partition_activations_in_checkpoint as partition_activations_in_checkpoint
from shoal.activation.checkpointing import reset as reset
from shoal.activation.checkpointing import set_num_layers as set_num_layers
from shoal.activation.random_states import MODEL_PARALLEL
from shoal.activation.random_states import RandomStates as CudaRNGStatesTracker
from shoal.activation.settings import FunctionSettings
from shoal.compat.deepspeed.runtime.activation_checkpointing.config import ACT_CHKPT, DeepSpeedActivationCheckpointingConfig
from shoal.compat.deepspeed.runtime.config import read_config
from shoal.compat.deepspeed.runtime.utils import copy_to_device as copy_to_device
from shoal.compat.deepspeed.runtime.utils import move_to_device as move_to_device
from shoal.compat.deepspeed.runtime.utils import see_memory_usage as see_memory_usage
from shoal.compat.deepspeed.utils.bwc import (
    bwc_tensor_model_parallel_group,
    bwc_tensor_model_parallel_rank,
    bwc_tensor_model_parallel_world_size,
)
from shoal.compat.tolerance import warn_unknown
from shoal.errors import UsageError

__all__ = ["CheckpointFunction", "CudaRNGStatesTracker", "checkpoint", "configure", "detach_variable", "extract_tensors",
           "get_cuda_rng_tracker", "get_partition_size", "get_partition_start", "is_activation_to_checkpoint",
           "is_configured", "merge_tensors", "model_parallel_cuda_manual_seed", "model_parallel_reconfigure_tp_seed",
           "non_reentrant_checkpoint", "partition_activations_in_checkpoint", "reset", "set_num_layers"]

_MODEL_PARALLEL_RNG_TRACKER_NAME = MODEL_PARALLEL
_CUDA_RNG_STATE_TRACKER = get_cuda_rng_tracker()

_VARIABLES: dict[str, Callable[[CheckpointingOptions], Any]] = {
    "PARTITION_ACTIVATIONS": lambda options: options.partition_activations,
    "CPU_CHECKPOINT": lambda options: options.cpu_checkpointing,
    "CONTIGUOUS_CHECKPOINTING": lambda options: options.contiguous_memory_optimization,
    "SYNCHRONIZE": lambda options: options.synchronize_checkpoint_boundary,
    "PROFILE_TIME": lambda options: options.profile, "num_layers": lambda options: options.number_checkpoints,
    "deepspeed_checkpointing_enabled": lambda options: options.configured, "mpu": lambda options: options.mpu,
    "mp_rank": lambda options: bwc_tensor_model_parallel_rank(options.mpu),
    "mp_size": lambda options: bwc_tensor_model_parallel_world_size(options.mpu),
    "mp_group": lambda options: bwc_tensor_model_parallel_group(options.mpu)}
"""Published module variables."""


def __getattr__(name: str) -> Any:
    if name in _VARIABLES:
        return _VARIABLES[name](options())
    raise AttributeError(f"module '{__name__}' has no attribute '{name}'")


def __dir__() -> list[str]:
    return sorted({*globals(), *_VARIABLES})


def configure(mpu_: Any, deepspeed_config: Any = None, partition_activations: bool | None = None,
              contiguous_checkpointing: bool | None = None, num_checkpoints: int | None = None,
              checkpoint_in_cpu: bool | None = None, synchronize: bool | None = None, profile: bool | None = None) -> None:
    """Take the options of the block `activation_checkpointing`, and then those of the keywords that are not None.

    An unknown key of the block warns. Raises `AssertionError` for contiguous memory without partitioning, or without the
    number of checkpoints.
    """
    taken: dict[str, Any] = {}
    if deepspeed_config is not None:
        param_dict = getattr(deepspeed_config, "_param_dict", None)
        param_dict = read_config(deepspeed_config) if param_dict is None else param_dict
        taken = DeepSpeedActivationCheckpointingConfig(param_dict).repr()
        for key in param_dict.get(ACT_CHKPT, {}):
            if key not in FunctionSettings.model_fields:
                warn_unknown(FunctionSettings, key, f"{ACT_CHKPT}.{key}")
    given: dict[str, Any] = {
        "partition_activations": partition_activations, "contiguous_memory_optimization": contiguous_checkpointing,
        "number_checkpoints": num_checkpoints, "cpu_checkpointing": checkpoint_in_cpu,
        "synchronize_checkpoint_boundary": synchronize, "profile": profile}
    found = CheckpointingOptions(mpu=mpu_, configured=True,
                    **(taken | {key: value for key, value in given.items() if value is not None}))
    if found.contiguous_memory_optimization:
        assert found.partition_activations, "contiguous_checkpointing: needs partition_activations"
        assert found.number_checkpoints is not None, "contiguous_checkpointing: needs num_checkpoints"
    take(found)


def checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Return `function(*args, **kwargs)`; its activations are recomputed in backward, with the same random numbers."""
    outputs = recomputed(function, *args, **kwargs)
    if isinstance(outputs, list):
        outputs = tuple(outputs)
    return outputs[0] if isinstance(outputs, tuple) and len(outputs) == 1 else outputs


def non_reentrant_checkpoint(function: Callable[..., Any], *args: Any) -> Any:
    """Do the same as `checkpoint`, which is not re-entrant either."""
    return checkpoint(function, *args)


class CheckpointFunction:
    """`checkpoint` in the form of an autograd function."""

    def __init__(self, *args: Any, **kwargs: Any):
        raise UsageError("CheckpointFunction: is not constructed; call CheckpointFunction.apply(function, outputs, *args)")

    @staticmethod
    def apply(run_function: Callable[..., Any], all_outputs: list[Any], *args: Any) -> Any:
        """Run `run_function`, add its results to `all_outputs`, and return them."""
        result = checkpoint(run_function, *args)
        all_outputs += result if isinstance(result, tuple) else [result]
        return result


# What scripts do to arguments


def is_activation_to_checkpoint(item: Any) -> bool:
    """Whether `item` is an activation that may be partitioned or rest on the host."""
    return may_rest(item)


def extract_tensors(all_objects: Sequence[Any]) -> tuple[tuple[Any, ...], tuple[Any, ...], tuple[bool, ...]]:
    """Return the tensors, the other objects, and for each object whether it is a tensor."""
    flags = tuple(isinstance(each, Tensor) for each in all_objects)
    tensors = tuple(each for each, flag in zip(all_objects, flags, strict=True) if flag)
    return tensors, tuple(each for each, flag in zip(all_objects, flags, strict=True) if not flag), flags


def merge_tensors(tensor_objects: Sequence[Any], non_tensor_objects: Sequence[Any],
                  tensor_flags: Sequence[bool]) -> tuple[Any, ...]:
    """Undo `extract_tensors`."""
    tensors, others = iter(tensor_objects), iter(non_tensor_objects)
    return tuple(next(tensors if flag else others) for flag in tensor_flags)


def detach_variable(inputs: Any, device: Any = None) -> tuple[Any, ...]:
    """Return the tensors of a tuple without their graphs, on `device`, requiring gradients as before.

    Raises `RuntimeError` for another type than a tuple.
    """
    if not isinstance(inputs, tuple):
        raise RuntimeError("Only tuple of tensors is supported. Got Unsupported input type: ", type(inputs).__name__)
    return tuple(_detached(each, device) if isinstance(each, Tensor) else each for each in inputs)


def _detached(tensor: Tensor, device: Any) -> Tensor:
    return tensor.detach().to(tensor.device if device is None else torch.device(device)).requires_grad_(tensor.requires_grad)


def get_partition_size(item: Tensor) -> int:
    """Return the elements of `item` that each tensor rank keeps."""
    return item.numel() // bwc_tensor_model_parallel_world_size(options().mpu)


def get_partition_start(item: Tensor) -> int:
    """Return the first element of `item` that this tensor rank keeps."""
    return get_partition_size(item) * bwc_tensor_model_parallel_rank(options().mpu)
