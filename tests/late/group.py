"""The process group of the late device, registered as backend "late": gloo, on streams of the device.

`dist.init_process_group("cpu:gloo,late:late", ...)` uses it for the tensors of the device.
"""

from __future__ import annotations

import importlib.util
from datetime import timedelta
from functools import cache
from types import ModuleType

import torch.distributed as dist

from tests.late.build import build
from tests.late.device import NAME, load

__all__ = ["BACKEND", "register"]

BACKEND = f"cpu:gloo,{NAME}:{NAME}"


@cache
def register() -> None:
    """Let process groups of this process have the backend."""
    load()
    _native()
    dist.Backend.register_backend(NAME, _create, devices=[NAME])


@cache
def _native() -> ModuleType:
    spec = importlib.util.spec_from_file_location("late_group", build() / "late_group.so")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _create(store: dist.Store, rank: int, ranks: int, timeout: timedelta) -> object:
    return _native().over_gloo(dist.ProcessGroupGloo(store, rank, ranks, timeout))
