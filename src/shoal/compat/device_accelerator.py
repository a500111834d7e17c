"""The published accelerator of any kind of device that torch has: it answers what torch's module of that kind does."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shoal.compat.deepspeed.accelerator.abstract_accelerator import DeepSpeedAccelerator
from shoal.device import default_backend, has_triton, manual_seed, module_of, rng_state, selected, set_rng_state
from shoal.errors import NotSupportedYet

__all__ = ["DeviceAccelerator"]


class DeviceAccelerator(DeepSpeedAccelerator):
    """The devices of kind `name`. A method that the kind's module lacks raises `NotSupportedYet`."""

    def __init__(self, name: str):
        super().__init__()
        self._name = name
        self._kind = torch.device(name)
        self._communication_backend_name = default_backend(self._kind)

    def module_function(self, function: str) -> Any:
        """Return a function or class of torch's module of the device."""
        found = vars(module_of(self._kind)).get(function)
        if found is None:
            raise NotSupportedYet(f"torch.{self._name} has no {function}, which get_accelerator() was asked for; use a "
                                  f"release of its package that has it")
        return found

    def device_at(self, device_index: int | None) -> torch.device:
        """Return the device of an index; the current one for None."""
        return torch.device(self._name, self.current_device() if device_index is None else device_index)

    def is_synchronized_device(self) -> bool:
        return False

    def device_name(self, device_index: int | None = None) -> str:
        return self._name if device_index is None else f"{self._name}:{device_index}"

    def device(self, device_index: int | None = None) -> Any:
        return selected(self.device_at(device_index))

    def set_device(self, device_index: int) -> None:
        torch.accelerator.set_device_index(device_index)

    def current_device(self) -> int:
        return torch.accelerator.current_device_index()

    def current_device_name(self) -> str:
        return f"{self._name}:{self.current_device()}"

    def device_count(self) -> int:
        return self.module_function("device_count")()

    def synchronize(self, device_index: int | None = None) -> None:
        torch.accelerator.synchronize(device_index)

    def is_available(self) -> bool:
        return self.module_function("is_available")()

    def set_rng_state(self, new_state: Tensor, device_index: int | None = None) -> None:
        set_rng_state(self.device_at(device_index), new_state)

    def get_rng_state(self, device_index: int | None = None) -> Tensor:
        return rng_state(self.device_at(device_index))

    def manual_seed(self, seed: int) -> Any:
        manual_seed(self.device_at(None), seed)

    def manual_seed_all(self, seed: int) -> Any:
        self.module_function("manual_seed_all")(seed)

    def initial_seed(self) -> int:
        return self.module_function("initial_seed")()

    def default_generator(self, device_index: int) -> torch.Generator:
        return self.module_function("default_generators")[device_index]

    @property
    def Stream(self) -> Any:
        return self.module_function("Stream")

    @property
    def Event(self) -> Any:
        return self.module_function("Event")

    def stream(self, stream: Any) -> Any:
        return self.module_function("stream")(stream)

    def current_stream(self, device_index: int | None = None) -> Any:
        return self.module_function("current_stream")(device_index)

    def default_stream(self, device_index: int | None = None) -> Any:
        return self.module_function("default_stream")(device_index)

    def empty_cache(self) -> None:
        self.module_function("empty_cache")()

    def memory_allocated(self, device_index: int | None = None) -> int:
        return torch.accelerator.memory_allocated(device_index)

    def max_memory_allocated(self, device_index: int | None = None) -> int:
        return torch.accelerator.max_memory_allocated(device_index)

    def reset_max_memory_allocated(self, device_index: int | None = None) -> None:
        torch.accelerator.reset_peak_memory_stats(device_index)

    def memory_cached(self, device_index: int | None = None) -> int:
        return torch.accelerator.memory_reserved(device_index)

    def max_memory_cached(self, device_index: int | None = None) -> int:
        return torch.accelerator.max_memory_reserved(device_index)

    def memory_stats(self, device_index: int | None = None) -> dict[str, Any]:
        return torch.accelerator.memory_stats(device_index)

    def total_memory(self, device_index: int | None = None) -> int:
        return torch.accelerator.get_memory_info(device_index)[1]

    def available_memory(self, device_index: int | None = None) -> int:
        return torch.accelerator.get_memory_info(device_index)[0]

    def pin_memory(self, tensor: Tensor, make_copy: bool = True, match_shape: bool = True) -> Tensor:
        return tensor.pin_memory()

    def is_pinned(self, tensor: Tensor) -> bool:
        return tensor.is_pinned()

    def on_accelerator(self, tensor: Tensor) -> bool:
        return tensor.device.type == self._name

    def is_bf16_supported(self) -> bool:
        return torch.bfloat16 in self._dtypes()

    def is_fp16_supported(self) -> bool:
        return torch.float16 in self._dtypes()

    def is_fp64_supported(self) -> bool:
        return torch.float64 in self._dtypes()

    def _dtypes(self) -> set[torch.dtype]:
        return torch.accelerator.get_device_capability()["supported_dtypes"]

    def is_triton_supported(self) -> bool:
        return has_triton(self._kind)
