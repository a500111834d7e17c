"""The CPU as an accelerator: one device, no streams, memory of the process."""

from __future__ import annotations

import os
import resource
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from shoal.compat.deepspeed.accelerator.abstract_accelerator import DeepSpeedAccelerator
from shoal.compat.environment import local_size
from shoal.transport import process_group

__all__ = ["CPU_Accelerator"]


class CPU_Accelerator(DeepSpeedAccelerator):
    """The host's processors."""

    _name = "cpu"
    _communication_backend_name = "gloo"

    def __init__(self) -> None:
        super().__init__()
        self.max_mem = self.get_rss()

    def is_synchronized_device(self) -> bool:
        return True

    def device_name(self, device_index: int | None = None) -> str:
        return "cpu"

    def device(self, device_index: int | None = None) -> Any:
        return None

    def set_device(self, device_index: int) -> None:
        return

    def current_device(self) -> int:
        return process_group.local_rank()

    def current_device_name(self) -> str:
        return "cpu"

    def device_count(self) -> int:
        return local_size()

    def synchronize(self, device_index: int | None = None) -> None:
        return

    def is_available(self) -> bool:
        return True

    def set_rng_state(self, new_state: Tensor, device_index: int | None = None) -> None:
        torch.set_rng_state(new_state)

    def get_rng_state(self, device_index: int | None = None) -> Tensor:
        return torch.get_rng_state()

    def manual_seed(self, seed: int) -> Any:
        return torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> Any:
        return torch.manual_seed(seed)

    def initial_seed(self) -> int:
        return torch.initial_seed()

    def default_generator(self, device_index: int) -> torch.Generator:
        return torch.default_generator

    @property
    def Stream(self) -> Any:
        return None

    @property
    def Event(self) -> Any:
        return None

    def stream(self, stream: Any) -> Any:
        return nullcontext()

    def current_stream(self, device_index: int | None = None) -> Any:
        return None

    def default_stream(self, device_index: int | None = None) -> Any:
        return None

    def get_rss(self) -> int:
        """Return the resident memory of this process, and remember the most."""
        with open("/proc/self/statm", encoding="ascii") as file:
            pages = int(file.read().split()[1])
        used = pages * resource.getpagesize()
        self.max_mem = max(used, vars(self).get("max_mem", 0))
        return used

    def reset_rss(self) -> int:
        """Measure the most memory anew; returns what is in use."""
        self.max_mem = 0
        return self.get_rss()

    def empty_cache(self) -> None:
        return

    def memory_allocated(self, device_index: int | None = None) -> int:
        return self.get_rss()

    def max_memory_allocated(self, device_index: int | None = None) -> int:
        self.get_rss()
        return self.max_mem

    def reset_max_memory_allocated(self, device_index: int | None = None) -> None:
        self.reset_rss()

    def memory_cached(self, device_index: int | None = None) -> int:
        return self.get_rss()

    def max_memory_cached(self, device_index: int | None = None) -> int:
        return self.max_memory_allocated(device_index)

    def memory_stats(self, device_index: int | None = None) -> dict[str, Any]:
        return {"allocated_bytes.all.current": self.get_rss(), "allocated_bytes.all.peak": self.max_mem}

    def total_memory(self, device_index: int | None = None) -> int:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")

    def available_memory(self, device_index: int | None = None) -> int:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")

    def pin_memory(self, tensor: Tensor, make_copy: bool = True, match_shape: bool = True) -> Tensor:
        return tensor

    def is_pinned(self, tensor: Tensor) -> bool:
        return False

    def on_accelerator(self, tensor: Tensor) -> bool:
        return tensor.device.type == "cpu"

    def is_bf16_supported(self) -> bool:
        return True

    def is_fp16_supported(self) -> bool:
        return True

    def is_triton_supported(self) -> bool:
        return False

    def op_builder_dir(self) -> str:
        return "deepspeed.ops.op_builder.cpu"
