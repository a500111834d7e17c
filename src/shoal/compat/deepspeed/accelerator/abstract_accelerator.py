"""The answers of a published accelerator: names, devices, memory, streams, random numbers, dtypes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from shoal.errors import NotSupportedYet

__all__ = ["DeepSpeedAccelerator"]


class DeepSpeedAccelerator(ABC):
    """One kind of device. Methods that differ between kinds are abstract; the others follow from torch alone."""

    _name: str
    _communication_backend_name: str

    def __init__(self) -> None:
        self._compile_backend = "inductor"

    def name(self) -> str:
        """Return the type of the device, as torch spells it."""
        return self._name

    # The execution model

    def supports_nvtx_domain(self) -> bool:
        """Whether ranges have a domain."""
        return False

    @abstractmethod
    def is_synchronized_device(self) -> bool:
        """Whether calls return when their work is done."""

    def use_host_timers(self) -> bool:
        """Whether the host's clock measures work."""
        return self.is_synchronized_device()

    def resolves_data_dependency(self) -> bool:
        """Whether memory may be used again without waiting for streams."""
        return self.is_synchronized_device()

    def handles_memory_backpressure(self) -> bool:
        """Whether an allocation waits for memory that is about to be free."""
        return self.is_synchronized_device()

    # Devices

    @abstractmethod
    def device_name(self, device_index: int | None = None) -> str:
        """Return the device as torch spells it."""

    @abstractmethod
    def device(self, device_index: int | None = None) -> Any:
        """Return a context that makes the device the current one."""

    @abstractmethod
    def set_device(self, device_index: int) -> None:
        """Make the device the current one."""

    @abstractmethod
    def current_device(self) -> int:
        """Return the index of the current device."""

    @abstractmethod
    def current_device_name(self) -> str:
        """Return the current device as torch spells it."""

    @abstractmethod
    def device_count(self) -> int:
        """Return the number of devices that this host offers."""

    @abstractmethod
    def synchronize(self, device_index: int | None = None) -> None:
        """Wait for all work of the device."""

    @abstractmethod
    def is_available(self) -> bool:
        """Whether the device can be used."""

    # Random numbers

    def random(self) -> ModuleType:
        """Return torch's module of random numbers."""
        return torch.random

    @abstractmethod
    def set_rng_state(self, new_state: Tensor, device_index: int | None = None) -> None:
        """Set the state of the device's generator."""

    @abstractmethod
    def get_rng_state(self, device_index: int | None = None) -> Tensor:
        """Return the state of the device's generator."""

    @abstractmethod
    def manual_seed(self, seed: int) -> Any:
        """Seed the device's generator."""

    @abstractmethod
    def manual_seed_all(self, seed: int) -> Any:
        """Seed the generators of all devices."""

    @abstractmethod
    def initial_seed(self) -> int:
        """Return the seed of the device's generator."""

    @abstractmethod
    def default_generator(self, device_index: int) -> torch.Generator:
        """Return the device's generator."""

    # Streams

    @property
    @abstractmethod
    def Stream(self) -> Any:
        """The class of streams, None where there are none."""

    @property
    @abstractmethod
    def Event(self) -> Any:
        """The class of events, None where there are none."""

    @abstractmethod
    def stream(self, stream: Any) -> Any:
        """Return a context in which work goes to `stream`."""

    @abstractmethod
    def current_stream(self, device_index: int | None = None) -> Any:
        """Return the stream that work goes to."""

    @abstractmethod
    def default_stream(self, device_index: int | None = None) -> Any:
        """Return the stream that work goes to unless another is chosen."""

    # Memory, in bytes

    @abstractmethod
    def empty_cache(self) -> None:
        """Give unused memory back."""

    @abstractmethod
    def memory_allocated(self, device_index: int | None = None) -> int:
        """Return the memory in use."""

    @abstractmethod
    def max_memory_allocated(self, device_index: int | None = None) -> int:
        """Return the most memory that was in use."""

    @abstractmethod
    def reset_max_memory_allocated(self, device_index: int | None = None) -> None:
        """Measure the most memory anew."""

    @abstractmethod
    def memory_cached(self, device_index: int | None = None) -> int:
        """Return the memory that the allocator holds."""

    @abstractmethod
    def max_memory_cached(self, device_index: int | None = None) -> int:
        """Return the most memory that the allocator held."""

    def reset_max_memory_cached(self, device_index: int | None = None) -> None:
        """Measure the most memory anew."""
        self.reset_max_memory_allocated(device_index)

    def reset_peak_memory_stats(self, device_index: int | None = None) -> None:
        """Measure the most memory anew."""
        self.reset_max_memory_allocated(device_index)

    @abstractmethod
    def memory_stats(self, device_index: int | None = None) -> dict[str, Any]:
        """Return the allocator's counters."""

    def memory_reserved(self, device_index: int | None = None) -> int:
        """Return the memory that the allocator holds."""
        return self.memory_cached(device_index)

    def max_memory_reserved(self, device_index: int | None = None) -> int:
        """Return the most memory that the allocator held."""
        return self.max_memory_cached(device_index)

    @abstractmethod
    def total_memory(self, device_index: int | None = None) -> int:
        """Return the memory of the device."""

    @abstractmethod
    def available_memory(self, device_index: int | None = None) -> int:
        """Return the memory that is free."""

    def pin_memory_alignment(self) -> int:
        """Return the alignment of pinned memory, in bytes."""
        return 1

    @abstractmethod
    def pin_memory(self, tensor: Tensor, make_copy: bool = True, match_shape: bool = True) -> Tensor:
        """Return `tensor` in pinned memory, where the device has such memory."""

    @abstractmethod
    def is_pinned(self, tensor: Tensor) -> bool:
        """Whether `tensor` lies in pinned memory."""

    def pin_empty(self, *size: Any, dtype: torch.dtype, device: Any = "cpu") -> Tensor:
        """Return an uninitialized tensor in pinned memory, where the device has such memory."""
        return self.pin_memory(torch.empty(*size, dtype=dtype, device=device))

    def pin_empty_like(self, tensor: Tensor, device: Any = "cpu", dtype: torch.dtype | None = None) -> Tensor:
        """Return an uninitialized tensor of the shape of another one in pinned memory."""
        return self.pin_empty(tensor.shape, dtype=dtype or tensor.dtype, device=device)

    def register_host_memory(self, address: Any, num_bytes: int) -> bool:
        """Return False: memory that a script allocated is not pinned in place; copy it by `pin_memory`."""
        return False

    def unregister_host_memory(self, address: Any) -> None:  # noqa: B027  a device may keep it
        """Do nothing: no memory was registered."""

    def unpin_memory(self, tensor: Tensor) -> Tensor:
        """Return a copy in pageable memory if `tensor` is pinned."""
        return tensor.clone() if self.is_pinned(tensor) else tensor

    @abstractmethod
    def on_accelerator(self, tensor: Tensor) -> bool:
        """Whether `tensor` lies on this kind of device."""

    # Dtypes

    @abstractmethod
    def is_bf16_supported(self) -> bool:
        """Whether the device computes in bf16."""

    @abstractmethod
    def is_fp16_supported(self) -> bool:
        """Whether the device computes in fp16."""

    def is_fp64_supported(self) -> bool:
        """Whether the device computes in fp64."""
        return True

    def supported_dtypes(self) -> list[torch.dtype]:
        """Return the dtypes to train in."""
        dtypes = [torch.float32]
        if self.is_bf16_supported():
            dtypes.append(torch.bfloat16)
        if self.is_fp16_supported():
            dtypes.append(torch.float16)
        return dtypes

    # Other services

    def communication_backend_name(self) -> str:
        """Return torch.distributed's backend for this device."""
        return self._communication_backend_name

    @abstractmethod
    def is_triton_supported(self) -> bool:
        """Whether Triton compiles for the device."""

    def range_push(self, msg: str, domain: Any = None, category: Any = None) -> Any:
        """Begin a range of a profile."""
        return None

    def range_pop(self, domain: Any = None) -> Any:
        """End a range of a profile."""
        return None

    def lazy_call(self, callback: Callable[[], object]) -> Any:
        """Call `callback` once the device is initialized: now, where it is."""
        return callback()

    def create_graph(self) -> Any:
        """Return a graph that captures work, None where there are none."""
        return None

    def capture_to_graph(self, graph: Any, pool: Any = None, stream: Any = None) -> AbstractContextManager[Any]:
        """Return a context that captures work into `graph`; it runs the work where there are no graphs."""
        return nullcontext()

    def replay_graph(self, graph: Any) -> None:
        """Run the work that `graph` captured; nothing where there are no graphs."""
        if graph is not None:
            graph.replay()

    def prefer_triton_grouped_mm(self) -> bool:
        """Return False: there are no grouped products of Triton."""
        return False

    def is_current_stream_capturing(self) -> bool:
        """Whether work is being captured."""
        return False

    @property
    def BFloat16Tensor(self) -> Any:
        return torch.BFloat16Tensor

    @property
    def ByteTensor(self) -> Any:
        return torch.ByteTensor

    @property
    def DoubleTensor(self) -> Any:
        return torch.DoubleTensor

    @property
    def FloatTensor(self) -> Any:
        return torch.FloatTensor

    @property
    def HalfTensor(self) -> Any:
        return torch.HalfTensor

    @property
    def IntTensor(self) -> Any:
        return torch.IntTensor

    @property
    def LongTensor(self) -> Any:
        return torch.LongTensor

    def op_builder_dir(self) -> str:
        """Return the module of the device's op builders."""
        return "deepspeed.ops.op_builder"

    def create_op_builder(self, class_name: str) -> Any:
        """Return an op builder by the name of its class, None where there is none."""
        builder = self.get_op_builder(class_name)
        return None if builder is None else builder()

    def get_op_builder(self, class_name: str) -> Any:
        """Return the class of an op builder, None where there is none."""
        from shoal.compat.deepspeed.ops import op_builder

        return getattr(op_builder, class_name, None)

    def build_extension(self) -> Any:
        """Raise `NotSupportedYet`."""
        raise NotSupportedYet("build_extension: Shoal builds its native code at first use; nothing is built by hand")

    def export_envs(self) -> list[str]:
        """Return the prefixes of environment variables that other hosts need."""
        return []

    def visible_devices_envs(self) -> list[str]:
        """Return the environment variables that choose devices."""
        return ["CUDA_VISIBLE_DEVICES"]

    def set_visible_devices_envs(self, current_env: dict[str, str], local_accelerator_ids: list[int]) -> None:
        """Choose these devices in `current_env`."""
        for name in self.visible_devices_envs():
            current_env[name] = ",".join(map(str, local_accelerator_ids))

    def get_compile_backend(self) -> str:
        """Return the backend of `torch.compile`."""
        return self._compile_backend

    def set_compile_backend(self, backend: str) -> None:
        """Choose the backend of `torch.compile`; raises `ValueError` for one that torch does not list."""
        known = torch.compiler.list_backends(exclude_tags=())
        if backend not in known:
            raise ValueError(f"set_compile_backend: got {backend!r}; choose {', '.join(known)}")
        self._compile_backend = backend
