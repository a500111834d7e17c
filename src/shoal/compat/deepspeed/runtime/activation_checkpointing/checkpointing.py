"""Activation checkpointing under its published names: `configure` once, then `checkpoint(function, *args)`.

    `partition_activations`      each tensor rank keeps one slice of the inputs of a checkpointed function
    `checkpoint_in_cpu`          the inputs rest on the host
    `contiguous_checkpointing`   is accepted with the two values that it needs: inputs are freed one by one in any case

What `configure` was told can be read under the names of the published module variables, such as `PARTITION_ACTIVATIONS`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from shoal.compat.deepspeed.accelerator.real_accelerator import get_accelerator
from shoal.compat.deepspeed.runtime.activation_checkpointing.config import DeepSpeedActivationCheckpointingConfig
from shoal.compat.deepspeed.runtime.config import read_config
from shoal.compat.deepspeed.runtime.utils import copy_to_device as copy_to_device
from shoal.compat.deepspeed.runtime.utils import move_to_device as move_to_device
from shoal.compat.deepspeed.runtime.utils import see_memory_usage as see_memory_usage
from shoal.compat.deepspeed.utils.bwc import (
    bwc_tensor_model_parallel_group,
    bwc_tensor_model_parallel_rank,
    bwc_tensor_model_parallel_world_size,
)
from shoal.compat.recompute import MODEL_PARALLEL_RNG, Recompute, may_rest
from shoal.compat.recompute import CudaRNGStatesTracker as CudaRNGStatesTracker
from shoal.errors import UsageError
from shoal.log import warn_once

__all__ = ["CheckpointFunction", "CudaRNGStatesTracker", "checkpoint", "configure", "detach_variable", "extract_tensors",
           "get_cuda_rng_tracker", "get_partition_size", "get_partition_start", "is_activation_to_checkpoint",
           "is_configured", "merge_tensors", "model_parallel_cuda_manual_seed", "model_parallel_reconfigure_tp_seed",
           "non_reentrant_checkpoint", "partition_activations_in_checkpoint", "reset", "set_num_layers"]

_MODEL_PARALLEL_RNG_TRACKER_NAME = MODEL_PARALLEL_RNG
_CUDA_RNG_STATE_TRACKER = CudaRNGStatesTracker()
_SEED_OFFSET = 2718
"""Between the seed of the default generator and that of the model-parallel one, as published."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Options:
    """The arguments of `configure`, under the names of the published section."""

    configured: bool = False
    mpu: Any = None
    partition_activations: bool = False
    contiguous_memory_optimization: bool = False
    cpu_checkpointing: bool = False
    number_checkpoints: int | None = None
    synchronize_checkpoint_boundary: bool = False
    profile: bool = False


class _State:
    """The options of this process."""

    def __init__(self) -> None:
        self.options = _Options()

    def change(self, **values: Any) -> None:
        """Change some of the options."""
        self.options = replace(self.options, **values)


_state = _State()

_VARIABLES: dict[str, Callable[[_Options], Any]] = {
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
        return _VARIABLES[name](_state.options)
    raise AttributeError(f"module '{__name__}' has no attribute '{name}'")


def __dir__() -> list[str]:
    return sorted({*globals(), *_VARIABLES})


def configure(mpu_: Any, deepspeed_config: Any = None, partition_activations: bool | None = None,
              contiguous_checkpointing: bool | None = None, num_checkpoints: int | None = None,
              checkpoint_in_cpu: bool | None = None, synchronize: bool | None = None, profile: bool | None = None) -> None:
    """Take the options of the block `activation_checkpointing`, and then those of the keywords that are not None.

    Raises `AssertionError` for contiguous memory without partitioning, or without the number of checkpoints.
    """
    options = _Options(mpu=mpu_, configured=True)
    if deepspeed_config is not None:
        param_dict = getattr(deepspeed_config, "_param_dict", None)
        block = DeepSpeedActivationCheckpointingConfig(read_config(deepspeed_config) if param_dict is None else param_dict)
        options = replace(options, **block.repr())
    given = {"partition_activations": partition_activations, "contiguous_memory_optimization": contiguous_checkpointing,
             "number_checkpoints": num_checkpoints, "cpu_checkpointing": checkpoint_in_cpu,
             "synchronize_checkpoint_boundary": synchronize, "profile": profile}
    options = replace(options, **{key: value for key, value in given.items() if value is not None})
    if options.contiguous_memory_optimization:
        assert options.partition_activations, "contiguous_checkpointing: needs partition_activations"
        assert options.number_checkpoints is not None, "contiguous_checkpointing: needs num_checkpoints"
    if options.profile:
        warn_once("activation_checkpointing.profile: has no effect; `with engine.trace() as trace` records the phases of a "
                  "step")
    _state.options = options


def is_configured() -> bool:
    """Whether `configure` was called."""
    return _state.options.configured


def reset() -> None:
    """Do nothing: no buffers are kept between passes."""


def set_num_layers(nlayers: int) -> None:
    """Keep the number of layers."""
    _state.change(number_checkpoints=nlayers)


def partition_activations_in_checkpoint(partition_activation: bool) -> None:
    """Switch the partitioning of inputs over the tensor ranks on or off."""
    _state.change(partition_activations=partition_activation)


def checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Return `function(*args, **kwargs)`; its activations are recomputed in backward, with the same random numbers."""
    options = _state.options
    group = bwc_tensor_model_parallel_group(options.mpu) if options.partition_activations else None
    run = Recompute(tracker=_CUDA_RNG_STATE_TRACKER, on_host=options.cpu_checkpointing, group=group,
                    synchronize=options.synchronize_checkpoint_boundary)
    return _published(run(function, *args, **kwargs))


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


def _published(outputs: Any) -> Any:
    """Return several outputs as a tuple, and one by itself."""
    if isinstance(outputs, list):
        outputs = tuple(outputs)
    return outputs[0] if isinstance(outputs, tuple) and len(outputs) == 1 else outputs


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
    return item.numel() // bwc_tensor_model_parallel_world_size(_state.options.mpu)


def get_partition_start(item: Tensor) -> int:
    """Return the first element of `item` that this tensor rank keeps."""
    return get_partition_size(item) * bwc_tensor_model_parallel_rank(_state.options.mpu)


# Random numbers


def get_cuda_rng_tracker() -> CudaRNGStatesTracker:
    """Return the tracker of this process."""
    return _CUDA_RNG_STATE_TRACKER


def model_parallel_cuda_manual_seed(seed: int) -> None:
    """Seed the default generator by `seed`, and the model-parallel one by a number of its own on each tensor rank."""
    _CUDA_RNG_STATE_TRACKER.reset()
    get_accelerator().manual_seed(seed)
    _CUDA_RNG_STATE_TRACKER.add(MODEL_PARALLEL_RNG, _seed_of_slices(seed))


def model_parallel_reconfigure_tp_seed(seed: int) -> None:
    """Seed the model-parallel generator alone, in place of its present state."""
    with _CUDA_RNG_STATE_TRACKER.fork():
        get_accelerator().manual_seed(_seed_of_slices(seed))


def _seed_of_slices(seed: int) -> int:
    return seed + _SEED_OFFSET + bwc_tensor_model_parallel_rank(_state.options.mpu)
