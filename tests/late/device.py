"""The late device as torch sees it: `load()` makes `torch.device("late")` and the module `torch.late`.

    seed(0)       nothing runs before something that the host waits for needs it
    seed(n)       at each wait of the host some streams run ahead of the others, drawn from n
    queued()      the tasks that have not run
"""

from __future__ import annotations

import ctypes
import types
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch
from torch import Tensor

from tests.late.build import build

__all__ = ["NAME", "load", "queued", "seed"]

NAME = "late"


@cache
def load() -> torch.device:
    """Build and register the device in this process. Raises `NoCompiler` where it cannot be built."""
    path = build() / "liblate.so"
    torch.utils.rename_privateuse1_backend(NAME)
    torch.ops.load_library(path)
    torch._register_device_module(NAME, _module())  # pyright: ignore[reportPrivateUsage]  the documented way
    torch.utils.generate_methods_for_privateuse1_backend()
    return torch.device(NAME, 0)


@cache
def _library() -> ctypes.CDLL:
    load()
    library = ctypes.CDLL(str(build() / "liblate.so"))
    library.late_set_seed.argtypes = [ctypes.c_uint64]
    library.late_queued.restype = ctypes.c_int64
    return library


def seed(number: int) -> None:
    """Choose the order of tasks from now on."""
    _library().late_set_seed(number)


def queued() -> int:
    """Return the number of tasks that have not run."""
    return int(_library().late_queued())


def _module() -> types.ModuleType:
    """Return `torch.late`, with the names that torch and its users expect of a device module."""
    module = types.ModuleType(f"torch.{NAME}")
    names: dict[str, object] = {
        "Event": torch.Event,
        "Stream": torch.Stream,
        "_is_in_bad_fork": lambda: False,
        "current_device": lambda: 0,
        "current_stream": torch.accelerator.current_stream,
        "default_stream": lambda device=None: torch.Stream(stream_id=0, device_index=0, device_type=20),
        "device": _device,
        "device_count": lambda: 1,
        "empty_cache": torch.accelerator.empty_cache,
        "get_amp_supported_dtype": lambda: [torch.bfloat16, torch.float16],
        "get_rng_state": lambda device=None: torch.get_rng_state(),
        "initial_seed": torch.initial_seed,
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "manual_seed": lambda seed: None,
        "manual_seed_all": lambda seed: None,
        "max_memory_allocated": torch.accelerator.max_memory_allocated,
        "memory_allocated": torch.accelerator.memory_allocated,
        "memory_reserved": torch.accelerator.memory_reserved,
        "reset_peak_memory_stats": torch.accelerator.reset_peak_memory_stats,
        "set_device": lambda device: None,
        "set_rng_state": _set_rng_state,
        "stream": _stream,
        "synchronize": lambda device=None: torch.accelerator.synchronize(),
    }
    for name, value in names.items():
        setattr(module, name, value)
    return module


def _set_rng_state(state: Tensor, device: object = None) -> None:
    torch.set_rng_state(state)


@contextmanager
def _device(device: object) -> Iterator[None]:
    yield


@contextmanager
def _stream(stream: torch.Stream | None) -> Iterator[None]:
    if stream is None:
        yield
        return
    with stream:
        yield
