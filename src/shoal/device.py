"""The accelerator of this process: the one file that asks torch which there is, and what it can do.

CUDA, ROCm, XPU and the devices that packages add to torch (PrivateUse1: NPU, HPU) answer alike, through
`torch.accelerator`, `torch.Stream`, `torch.Event` and the module of their kind (`torch.get_device_module`). Where a device
lacks something, a function here says so in a warning or an error. Nothing falls back to the CPU unsaid.

    which device    accelerator, device_count, current_device, set_current
    order of work   DeviceEvent, DeviceStream, new_stream, current_stream, stream_of_thread, follow, within, selected,
                    synchronize
    memory          kept_for_stream, can_pin, registers_pages, lock_pages, empty_cache, memory_of
    random numbers  rng_state, set_rng_state, manual_seed, forked_rng
    communication   default_backend, group_backends

Every event is recorded and waited for in the current stream of its device. To pass a `torch.Stream` to a `torch.cuda.Event`,
or the event to the stream, raises nothing and waits for nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache, lru_cache, partial, wraps
from types import ModuleType
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.errors import UsageError
from shoal.log import warn_once

__all__ = [
    "CONVERSIONS",
    "HOST",
    "VISIBLE_DEVICES",
    "DeviceEvent",
    "DeviceMemory",
    "DeviceStream",
    "accelerator",
    "can_pin",
    "current_device",
    "current_stream",
    "default_backend",
    "device_count",
    "device_names",
    "empty_cache",
    "follow",
    "forked_rng",
    "group_backends",
    "has_float64",
    "has_triton",
    "is_initialized",
    "kept_for_stream",
    "lock_pages",
    "manual_seed",
    "memory_of",
    "module_of",
    "new_stream",
    "on_accelerator",
    "record_use",
    "registers_pages",
    "rng_state",
    "selected",
    "set_current",
    "set_rng_state",
    "steps_fused",
    "stream_of_thread",
    "synchronize",
    "within",
]

HOST = torch.device("cpu")

VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"
"""The variable that lists the devices which a process may use, as DeepSpeed's launcher sets it."""

CONVERSIONS = ("to", "type", "cpu", "cuda", "xpu", "half", "float", "double", "bfloat16")
"""Methods of a tensor that return it as it is where it has the device and dtype that they ask for."""

_TRITON = ("cuda", "xpu")
"""Kinds of devices for which Triton compiles the kernels of Shoal."""

_FUSED = ("cpu", "cuda", "xpu", "mps")
"""Kinds of devices for which torch itself has a fused step of its optimizers."""


# Which device


def accelerator() -> torch.device | None:
    """Return the accelerator of this machine, without an index; None where there is none."""
    return torch.accelerator.current_accelerator(check_available=True)


def device_count() -> int:
    """Return the number of accelerators that this process sees."""
    return torch.accelerator.device_count() if accelerator() is not None else 0


def device_names() -> list[str]:
    """Return the names of the accelerators that this process sees: those of their maker where the device tells them."""
    kind = accelerator()
    if kind is None:
        return []
    name_of = _offered(kind, "get_device_name")
    return [str(name_of(index)) if name_of is not None else f"{kind.type}:{index}" for index in range(device_count())]


def current_device() -> torch.device:
    """Return the current accelerator with its index; the CPU where there is none."""
    kind = accelerator()
    return HOST if kind is None else torch.device(kind.type, torch.accelerator.current_device_index())


def set_current(device: torch.device) -> None:
    """Make `device` the current one of this thread. The CPU always is."""
    if on_accelerator(device) and (index := _index(device)) is not None:
        torch.accelerator.set_device_index(index)


def on_accelerator(at: torch.device | Tensor) -> bool:
    """Whether `at`, or its memory, is of an accelerator."""
    device = at.device if isinstance(at, Tensor) else at
    return device.type not in ("cpu", "meta")


def module_of(device: torch.device) -> ModuleType:
    """Return torch's module of a kind of device: `torch.xpu` of an XPU."""
    return cast(ModuleType, torch.get_device_module(device))


def is_initialized(device: torch.device) -> bool:
    """Whether this process has used `device`, so that asking it costs no start; True where the device does not tell."""
    asked = _offered(device, "is_initialized")
    return True if asked is None else bool(asked())


def has_triton(device: torch.device) -> bool:
    """Whether Triton compiles kernels for this kind of device, where it is installed."""
    return device.type in _TRITON


def has_float64(device: torch.device) -> bool:
    """Whether the device computes in float64; Apple's and some of Intel's do not."""
    try:
        torch.zeros(1, dtype=torch.float64, device=device)
    except (RuntimeError, TypeError) as error:
        if "float64" in str(error) or "fp64" in str(error):
            return False
        raise  # a device that is taken or broken tells another cause
    return True


def steps_fused(device: torch.device) -> bool:
    """Whether torch's optimizers step parameters of `device` in one fused kernel."""
    if device.type in _FUSED:
        return True
    if device.type != torch._C._get_privateuse1_backend_name():  # pyright: ignore[reportPrivateUsage]  no public name
        return False
    return torch._C._dispatch_has_computed_kernel_for_dispatch_key(  # pyright: ignore[reportPrivateUsage]  no public name
        "aten::_fused_adamw_", "PrivateUse1")


def _index(device: torch.device) -> int | None:
    return cast("int | None", device.index)  # torch declares it as never None


def _offered(device: torch.device, name: str) -> Any:
    """Return the attribute `name` of a device's module; None where it has none."""
    return vars(module_of(device)).get(name)


# Order of work


class DeviceEvent:
    """The point that the current stream of a device has reached with what it was given until now."""

    __slots__ = ("_device", "_event")

    def __init__(self, device: torch.device, *, timing: bool = False):
        self._device = device
        with selected(device):
            self._event = _new_event(device, timing)
            self._event.record()

    def synchronize(self) -> None:
        """Block this thread until the device has reached the event."""
        self._event.synchronize()

    def stream_wait(self) -> None:
        """Have the current stream of the device wait for the event before any later work."""
        with selected(self._device):
            self._event.wait()

    @property
    def passed(self) -> bool:
        """Whether the device has reached the event."""
        return bool(self._event.query())

    def seconds_until(self, later: DeviceEvent) -> float:
        """Return the time between two events that have passed and were made with `timing`."""
        return float(self._event.elapsed_time(later._event)) / 1000


class DeviceStream:
    """A stream of `device` beside its compute stream, which is the one that is current where the stream is used."""

    __slots__ = ("_stream", "device")

    def __init__(self, device: torch.device):
        self.device = device
        self._stream = torch.Stream(device)

    @contextmanager
    def use(self) -> Generator[None]:
        """Give the device's work within the context to this stream."""
        with within(self._stream):
            yield

    def wait_for_current(self) -> None:
        """Have later work of this stream wait for all work of the device's current stream."""
        self._stream.wait_stream(current_stream(self.device))

    def record(self) -> DeviceEvent:
        """Return the point that this stream has reached."""
        with within(self._stream):
            return DeviceEvent(self.device)


    def record_use(self, tensor: Tensor) -> None:
        """Keep the memory of `tensor`, once it is freed, until this stream's present work is done."""
        tensor.record_stream(self._stream)


def record_use(tensor: Tensor) -> None:
    """Keep the memory of an accelerator's `tensor`, once it is freed, until the current stream's present work is done."""
    tensor.record_stream(current_stream(tensor.device))


def new_stream(device: torch.device) -> DeviceStream | None:
    """Return a new stream of `device`; None, said once, where it has only the one that it computes in."""
    if not on_accelerator(device):
        return None
    try:
        return DeviceStream(device)
    except (RuntimeError, NotImplementedError) as error:
        warn_once(f"{device.type}: the device has no streams beside its compute stream ({str(error).splitlines()[0]}): "
                  f"copies and messages take their turn with computation instead of running beside it")
        return None


def current_stream(device: torch.device) -> torch.Stream:
    """Return the stream that this thread gives the work of an accelerator to."""
    return torch.accelerator.current_stream(device)


def stream_of_thread(device: torch.device) -> torch.Stream | None:
    """Return the stream that this thread gives the work of `device` to; None on the CPU."""
    return current_stream(device) if on_accelerator(device) else None


def follow(former: torch.Stream | None, tensor: Tensor) -> None:
    """Have the current stream use the memory of `tensor` after the stream `former` has, and free it only after its use."""
    if former is not None:
        current_stream(tensor.device).wait_stream(former)
        record_use(tensor)


@contextmanager
def within(stream: torch.Stream | None) -> Generator[None]:
    """Give the device's work within the context to `stream`, on its device; None, of the CPU, changes nothing.

    torch's own context of a stream cannot be entered by two threads at once.
    """
    if stream is None:
        yield
        return
    index, former = torch.accelerator.current_device_index(), torch.accelerator.current_stream(stream.device)
    torch.accelerator.set_stream(stream)
    try:
        yield
    finally:
        torch.accelerator.set_stream(former)
        torch.accelerator.set_device_index(index)


def synchronize(device: torch.device) -> None:
    """Wait until `device` has done all its work; at once on the CPU."""
    if on_accelerator(device):
        torch.accelerator.synchronize(device)


def _new_event(device: torch.device, timing: bool) -> Any:
    if device.type == "cuda":  # its own event lets a waiting thread sleep; torch.Event has it spin on a core
        return torch.cuda.Event(enable_timing=timing, blocking=True)
    return torch.Event(device, enable_timing=timing)


@contextmanager
def selected(device: torch.device) -> Generator[None]:
    """Make `device` current within the context: an event belongs to the current device's current stream."""
    index = _index(device) if on_accelerator(device) else None
    if index is None or index == (former := torch.accelerator.current_device_index()):
        yield
        return
    torch.accelerator.set_device_index(index)
    try:
        yield
    finally:
        torch.accelerator.set_device_index(former)


# Memory


_Table = TypeVar("_Table")
_KEPT = 64
"""Tables of one kind that are kept, of the calls made last."""


def kept_for_stream(make: Callable[..., _Table]) -> Callable[..., _Table]:
    """Keep the results of `make(device, *arguments)`, tables that a host makes for a device, for calls with equal arguments.

    A copy of a table to the device at each call would hold up the host. Every stream has tables of its own: a dropped one
    returns its memory to the only stream that has used it.
    """
    @lru_cache(maxsize=_KEPT)
    def kept(stream: torch.Stream | None, device: torch.device, *arguments: object) -> _Table:
        with torch.inference_mode(False):  # autograd may save what a later call takes
            return make(device, *arguments)

    @wraps(make)
    def of_stream(device: torch.device, *arguments: object) -> _Table:
        return kept(stream_of_thread(device), device, *arguments)

    return of_stream


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceMemory:
    """Bytes of one accelerator's memory, of this process where the allocator counts them."""

    allocated: int
    """In tensors."""
    reserved: int
    """Held by torch's allocator."""
    most_allocated: int
    free: int
    total: int


def memory_of(device: torch.device) -> DeviceMemory | None:
    """Return the memory of an accelerator; None for the CPU, and, said once, for a device that does not count it."""
    if not on_accelerator(device):
        return None
    try:
        free, total = torch.accelerator.get_memory_info(device)
        return DeviceMemory(allocated=torch.accelerator.memory_allocated(device), free=free, total=total,
                            reserved=torch.accelerator.memory_reserved(device),
                            most_allocated=torch.accelerator.max_memory_allocated(device))
    except (RuntimeError, NotImplementedError) as error:
        warn_once(f"{device.type}: the device does not count its memory ({str(error).splitlines()[0]}); reports leave "
                  f"it out")
        return None


def empty_cache(device: torch.device) -> None:
    """Return the unused memory of torch's allocator to an accelerator; the CPU's allocator keeps none."""
    if on_accelerator(device) and (function := _offered(device, "empty_cache")) is not None:
        function()


def can_pin(device: torch.device) -> bool:
    """Whether host memory can be page-locked for copies to and from `device`; said once where it cannot."""
    return on_accelerator(device) and _can_pin(device.type)


@cache
def _can_pin(kind: str) -> bool:
    try:
        torch.empty(1, dtype=torch.uint8, pin_memory=True, device="cpu")
    except (RuntimeError, NotImplementedError) as error:
        warn_once(f"{kind}: host memory cannot be page-locked for the device ({str(error).splitlines()[0]}): copies between "
                  f"host and device block the host, and pin_memory has no effect")
        return False
    return True


_PORTABLE = 1
"""cudaHostRegisterPortable: pinned for every device of the process."""


def registers_pages(device: torch.device) -> bool:
    """Whether `lock_pages` pins memory for this kind of device."""
    return device.type == "cuda" and can_pin(device)


def lock_pages(address: int, size: int) -> Callable[[], object]:
    """Page-lock host memory, for which torch's allocator of pinned memory takes the next power of two and keeps it.

    Returns what unlocks it, to be called before the memory is unmapped: it waits for copies that may still read the memory.
    Raises `UsageError` where the system refuses.
    """
    runtime: Any = torch.cuda.cudart()
    code = int(runtime.cudaHostRegister(address, size, _PORTABLE))
    if code:
        raise UsageError(f"pin_memory: the system refuses to page-lock {size:,} bytes of host memory (error {code} of "
                         f"cudaHostRegister): leave memory free, raise the limit of locked memory (ulimit -l), or set "
                         f"pin_memory to false")
    return partial(_unlock_pages, runtime, address, current_device())


def _unlock_pages(runtime: Any, address: int, device: torch.device) -> None:
    with suppress(RuntimeError):  # in a process that ends, or a forked one, the device is gone
        synchronize(device)  # of this thread another one may be current
    runtime.cudaHostUnregister(address)


# Random numbers


def rng_state(device: torch.device) -> Tensor:
    """Return the state of the default generator of an accelerator."""
    with selected(device):
        return cast(Tensor, module_of(device).get_rng_state())


def set_rng_state(device: torch.device, state: Tensor) -> None:
    """Set the default generator of an accelerator to a state that `rng_state` returned."""
    with selected(device):
        module_of(device).set_rng_state(state)


def manual_seed(device: torch.device, seed: int) -> None:
    """Seed the default generator of an accelerator."""
    seeded = _offered(device, "manual_seed") or _offered(device, "manual_seed_all")
    if seeded is None:
        raise UsageError(f"{device}: torch.{device.type} has neither manual_seed nor manual_seed_all, which its random "
                         f"numbers need here: use another device, or a release of its package that has them")
    with selected(device):
        seeded(seed)


@contextmanager
def forked_rng() -> Generator[None]:
    """Restore the default generators of the host and of the current accelerator after the context."""
    host, device = torch.get_rng_state(), current_device()
    state = rng_state(device) if on_accelerator(device) else None
    try:
        yield
    finally:
        torch.set_rng_state(host)
        if state is not None:
            set_rng_state(device, state)


# Communication


def default_backend(device: torch.device) -> str:
    """Return the backend that torch knows for tensors of a kind of device; gloo where it knows no other."""
    try:
        return dist.get_default_backend_for_device(device)
    except ValueError:
        return "gloo"


def group_backends(device: torch.device | None) -> str:
    """Return the backends of a process group of ranks that compute on the accelerator `device`; None: on the CPU.

    Tensors of the device travel by its own backend, and those of the host by gloo.
    """
    own = "gloo" if device is None else default_backend(device)
    return own if device is None or own == "gloo" else f"cpu:gloo,{device.type}:{own}"
