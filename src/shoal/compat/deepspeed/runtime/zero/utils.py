"""Published helpers of ZeRO."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.optim import Adagrad, Adam, AdamW, Optimizer

import shoal.comm
from shoal.compat.deepspeed.accelerator.real_accelerator import get_accelerator
from shoal.compat.deepspeed.ops.adagrad import DeepSpeedCPUAdagrad
from shoal.compat.deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
from shoal.compat.deepspeed.ops.lion import DeepSpeedCPULion, FusedLion
from shoal.compat.deepspeed.runtime.zero.partition_parameters import is_zero_param as is_zero_param
from shoal.compat.deepspeed.utils.logging import logger

ZERO_SUPPORTED_OPTIMIZERS: list[type[Optimizer]] = [
    Adam, AdamW, FusedAdam, DeepSpeedCPUAdam, Adagrad, DeepSpeedCPUAdagrad, DeepSpeedCPULion, FusedLion]


class ZeRORuntimeException(Exception):
    """An error of the published ZeRO runtime. Shoal raises its own errors, which name the cause."""


def is_zero_supported_optimizer(optimizer: Optimizer) -> bool:
    """Whether the published runtime shards the state of this class without `zero_allow_untested_optimizer`."""
    return type(optimizer) in ZERO_SUPPORTED_OPTIMIZERS


def get_norm_dtype() -> torch.dtype:
    """Return the dtype in which norms are summed up."""
    return torch.float64


def is_builtin_type(obj: object) -> bool:
    """Whether `obj` is of one of Python's own types."""
    return type(obj).__module__ in ("builtins", "__builtin__")


def isinstance_namedtuple(obj: object) -> bool:
    """Whether `obj` is a named tuple."""
    return isinstance(obj, tuple) and hasattr(obj, "_asdict") and hasattr(obj, "_fields")


def apply_to_tensors_only(function: Callable[[Tensor], Any], value: Any,
                          warning_msg_fn: Callable[[Any], str] | None = None) -> Any:
    """Return `value` with `function` applied to each tensor in its lists, tuples and dicts.

    `warning_msg_fn` is told of objects of other classes, in which tensors are not found.
    """
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, dict):
        return {key: apply_to_tensors_only(function, each, warning_msg_fn) for key, each in value.items()}
    if isinstance(value, list | tuple):
        found = [apply_to_tensors_only(function, each, warning_msg_fn) for each in value]
        return type(value)(*found) if isinstance_namedtuple(value) else type(value)(found)
    if not is_builtin_type(value) and warning_msg_fn is not None:
        logger.warning(warning_msg_fn(value))
    return value


def get_mapping_to_flat_buffer(tensors: Sequence[Tensor]) -> list[tuple[Tensor, int, int]]:
    """Return each tensor with its offset and size in a buffer that holds them one after another."""
    sizes = [each.numel() for each in tensors]
    return [(each, stop - size, size) for each, size, stop in zip(tensors, sizes, accumulate(sizes), strict=True)]


def defragment(tensors: Sequence[Tensor]) -> Tensor:
    """Move tensors of one dtype and device into one buffer, of which they become views, and return it."""
    buffer = torch.cat([each.detach().reshape(-1) for each in tensors])
    with torch.no_grad():
        for each, offset, size in get_mapping_to_flat_buffer(tensors):
            part = buffer.narrow(0, offset, size).view_as(each)
            each.set_(part.untyped_storage(), part.storage_offset(), part.size(), part.stride())
    return buffer


def get_lst_from_rank0(lst: list[int]) -> list[int]:
    """Return rank 0's list of numbers, which has the length of this rank's. Every rank calls it."""
    values = torch.tensor(lst, dtype=torch.int64, device=get_accelerator().current_device_name())
    shoal.comm.broadcast(values, src=0)
    return values.tolist()
