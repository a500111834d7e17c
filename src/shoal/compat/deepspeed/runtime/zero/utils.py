"""Published helpers of ZeRO."""

from __future__ import annotations

from torch.optim import Adagrad, Adam, AdamW, Optimizer

from shoal.compat.deepspeed.ops.adagrad import DeepSpeedCPUAdagrad
from shoal.compat.deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
from shoal.compat.deepspeed.ops.lion import DeepSpeedCPULion, FusedLion
from shoal.compat.deepspeed.runtime.zero.partition_parameters import is_zero_param as is_zero_param

ZERO_SUPPORTED_OPTIMIZERS: list[type[Optimizer]] = [
    Adam, AdamW, FusedAdam, DeepSpeedCPUAdam, Adagrad, DeepSpeedCPUAdagrad, DeepSpeedCPULion, FusedLion]


class ZeRORuntimeException(Exception):
    """An error of the published ZeRO runtime. Shoal raises its own errors, which name the cause."""


def is_zero_supported_optimizer(optimizer: Optimizer) -> bool:
    """Whether the published runtime shards the state of this class without `zero_allow_untested_optimizer`."""
    return type(optimizer) in ZERO_SUPPORTED_OPTIMIZERS
