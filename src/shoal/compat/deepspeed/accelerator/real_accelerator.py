"""The accelerator of this process: the one that DS_ACCELERATOR names, else the one that torch has, else the CPU."""

from __future__ import annotations

from collections.abc import Callable
from logging import getLogger

from shoal import device
from shoal.compat import environment
from shoal.compat.deepspeed.accelerator.abstract_accelerator import DeepSpeedAccelerator
from shoal.compat.deepspeed.accelerator.cpu_accelerator import CPU_Accelerator
from shoal.compat.deepspeed.accelerator.cuda_accelerator import CUDA_Accelerator
from shoal.compat.device_accelerator import DeviceAccelerator
from shoal.errors import UsageError

__all__ = ["SUPPORTED_ACCELERATOR_LIST", "get_accelerator", "is_current_accelerator_supported", "set_accelerator"]

SUPPORTED_ACCELERATOR_LIST = ["cuda", "cpu"]
accel_logger = getLogger("DeepSpeed")
_KINDS: dict[str, Callable[[], DeepSpeedAccelerator]] = {"cuda": CUDA_Accelerator, "cpu": CPU_Accelerator}
"""The kinds that have published classes of their own; other devices are a `DeviceAccelerator`."""
_chosen: list[DeepSpeedAccelerator] = []


def get_accelerator() -> DeepSpeedAccelerator:
    """Return the accelerator of this process; raises `ValueError` where DS_ACCELERATOR names one that Shoal lacks."""
    if not _chosen:
        present = device.current_device().type
        name = environment.accelerator() or present
        if name not in (*_KINDS, present):
            choices = dict.fromkeys([*SUPPORTED_ACCELERATOR_LIST, present])
            raise _UnknownAccelerator(f"DS_ACCELERATOR: got {name!r}; choose {' or '.join(choices)}")
        _chosen.append(_KINDS[name]() if name in _KINDS else DeviceAccelerator(name))
    return _chosen[-1]


def set_accelerator(accel_obj: DeepSpeedAccelerator) -> DeepSpeedAccelerator:
    """Make `accel_obj` the accelerator of this process, and return it."""
    _chosen[:] = [accel_obj]
    return accel_obj


def is_current_accelerator_supported() -> bool:
    """Whether Shoal computes on the accelerator of this process."""
    name = get_accelerator().device_name().partition(":")[0]
    return name in SUPPORTED_ACCELERATOR_LIST or name == device.current_device().type


class _UnknownAccelerator(UsageError, ValueError):
    """A device that Shoal does not compute on."""
