"""The accelerator of this process: the one that DS_ACCELERATOR names, else CUDA where torch has it, else the CPU."""

from __future__ import annotations

from logging import getLogger

import torch

from shoal.compat import environment
from shoal.compat.deepspeed.accelerator.abstract_accelerator import DeepSpeedAccelerator
from shoal.compat.deepspeed.accelerator.cpu_accelerator import CPU_Accelerator
from shoal.compat.deepspeed.accelerator.cuda_accelerator import CUDA_Accelerator
from shoal.errors import UsageError

__all__ = ["SUPPORTED_ACCELERATOR_LIST", "get_accelerator", "is_current_accelerator_supported", "set_accelerator"]

SUPPORTED_ACCELERATOR_LIST = ["cuda", "cpu"]
accel_logger = getLogger("DeepSpeed")
_KINDS: dict[str, type[DeepSpeedAccelerator]] = {"cuda": CUDA_Accelerator, "cpu": CPU_Accelerator}
_chosen: list[DeepSpeedAccelerator] = []


def get_accelerator() -> DeepSpeedAccelerator:
    """Return the accelerator of this process; raises `ValueError` where DS_ACCELERATOR names one that Shoal lacks."""
    if not _chosen:
        name = environment.accelerator() or ("cuda" if torch.cuda.is_available() else "cpu")
        if name not in _KINDS:
            raise _UnknownAccelerator(f"DS_ACCELERATOR: got {name!r}; choose {' or '.join(SUPPORTED_ACCELERATOR_LIST)}")
        _chosen.append(_KINDS[name]())
    return _chosen[-1]


def set_accelerator(accel_obj: DeepSpeedAccelerator) -> DeepSpeedAccelerator:
    """Make `accel_obj` the accelerator of this process, and return it."""
    _chosen[:] = [accel_obj]
    return accel_obj


def is_current_accelerator_supported() -> bool:
    """Whether Shoal computes on the accelerator of this process."""
    return get_accelerator().device_name().partition(":")[0] in SUPPORTED_ACCELERATOR_LIST


class _UnknownAccelerator(UsageError, ValueError):
    """A device that Shoal does not compute on."""
