"""Process groups of tests: "late" is gloo on streams of the late device, and "staged" is gloo for ranks that share a device.

`dist.init_process_group("cpu:gloo,late:late", ...)` uses the first for the tensors of the late device; the second serves any
device ("cpu:gloo,cuda:staged").
"""

from __future__ import annotations

import importlib.util
from datetime import timedelta
from functools import cache, partial
from types import ModuleType

import torch.distributed as dist

from tests.late.build import build
from tests.late.device import NAME, load

__all__ = ["BACKEND", "STAGED", "register", "register_staged"]

BACKEND = f"cpu:gloo,{NAME}:{NAME}"
STAGED = "staged"


@cache
def register() -> None:
    """Let process groups of this process have the backend of the late device."""
    load()
    _native("late_group")
    dist.Backend.register_backend(NAME, partial(_create, "late_group"), devices=[NAME])


@cache
def register_staged(kind: str) -> None:
    """Let process groups of this process have the staged backend for a kind of device."""
    _native("staged_group")
    dist.Backend.register_backend(STAGED, partial(_create, "staged_group"), devices=[kind])


@cache
def _native(library: str) -> ModuleType:
    file = f"{library}.so"
    spec = importlib.util.spec_from_file_location(library, build(file) / file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _create(library: str, store: dist.Store, rank: int, ranks: int, timeout: timedelta) -> object:
    return _native(library).over_gloo(dist.ProcessGroupGloo(store, rank, ranks, timeout))
