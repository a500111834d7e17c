"""Copies between a compute device and its host, concurrent with compute: one stream for each direction.

Where the device is the host there are no streams, and copies are synchronous. On a device that has no streams beside its
compute stream, copies are in that one.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from queue import SimpleQueue
from typing import Protocol
from weakref import WeakMethod, WeakValueDictionary

import torch
from torch import Tensor

from shoal.device import DeviceEvent, DeviceStream, can_pin, new_stream, on_accelerator, record_use
from shoal.tier.pages import copy_bytes, pinned_zeros

__all__ = ["CopyEvent", "CopyStream", "DownloadBuffers", "PinnedRing", "StagingBuffers", "UploadRing", "allocate",
           "d2h_stream", "download_buffers", "free", "h2d_stream", "side_stream", "upload_ring"]

_DEFERRED = 2
"""Copies to the host in flight before the oldest one is waited for."""


class CopyEvent(Protocol):
    """An event recorded in a stream."""

    def synchronize(self) -> None:
        """Block this thread until the stream has reached the event."""
        ...

    def stream_wait(self) -> None:
        """Make the compute stream wait for the event before any later work."""
        ...


class CopyStream:
    """Copies without a stream of their own: synchronous on the host, in the compute stream of `device`."""

    def __init__(self, device: torch.device | None = None) -> None:
        self._device = device
        self._deferred: deque[WeakMethod[Callable[[], None]]] = deque()

    def use(self) -> AbstractContextManager[object]:
        """Return a context whose copies run in this stream, after all work that the compute stream was given so far."""
        return nullcontext()

    def follow_compute(self) -> None:
        """Have later work of this stream follow all work that the compute stream was given so far."""

    def following(self) -> AbstractContextManager[object]:
        """Return a context whose work follows the copies that this stream was given so far."""
        return nullcontext()

    def record_event(self) -> CopyEvent:
        """Return an event behind everything the stream was given so far."""
        return self.record_compute()

    def record_compute(self) -> CopyEvent:
        """Return an event behind everything the compute stream was given so far."""
        return _REACHED if self._device is None else DeviceEvent(self._device)

    def keep_for_compute(self, tensor: Tensor) -> None:
        """Keep the memory of `tensor`, if allocated in this stream, until the compute stream's present work is done."""

    def keep(self, tensor: Tensor) -> None:
        """Keep the memory of `tensor`, if it is freed, until this stream's present work is done."""

    def defer(self, callback: Callable[[], None]) -> None:
        """Call `callback`, which waits for a copy and goes on from there, once a few later ones were deferred.

        It is a method, and is not called once its object is gone: the stream outlives the engines that use it.
        """
        self._deferred.append(WeakMethod(callback))
        while len(self._deferred) > _DEFERRED:
            if (due := self._deferred.popleft()()) is not None:
                due()


class _SideStream(CopyStream):
    """Copies in a stream beside the compute stream."""

    def __init__(self, stream: DeviceStream):
        super().__init__(stream.device)
        self._stream = stream

    def use(self) -> AbstractContextManager[object]:
        self.follow_compute()
        return self._stream.use()

    def follow_compute(self) -> None:
        self._stream.wait_for_current()

    def following(self) -> AbstractContextManager[object]:
        return self._stream.use()

    def record_event(self) -> CopyEvent:
        return self._stream.record()

    def keep_for_compute(self, tensor: Tensor) -> None:
        if on_accelerator(tensor):  # host memory belongs to no stream
            record_use(tensor)

    def keep(self, tensor: Tensor) -> None:
        if on_accelerator(tensor):
            self._stream.record_use(tensor)


def allocate(tensor: Tensor) -> bool:
    """Give `tensor`, of contiguous elements from its storage's first on, memory of the compute stream if it has none.

    Returns whether it had none.
    """
    storage = tensor.untyped_storage()
    if storage.nbytes():
        return False
    storage.resize_(tensor.numel() * tensor.element_size())
    return True


def free(tensor: Tensor) -> None:
    """Free the storage of `tensor`, of which the compute stream is the last user.

    A storage that was exported to numpy stays allocated: torch does not resize it.
    """
    if (storage := tensor.untyped_storage()).resizable():
        storage.resize_(0)


class _ReachedEvent:
    def synchronize(self) -> None:
        pass

    def stream_wait(self) -> None:
        pass


_REACHED: CopyEvent = _ReachedEvent()


@cache
def h2d_stream(device: torch.device) -> CopyStream:
    """Return the stream of copies from the host to `device`."""
    return side_stream(device)


@cache
def d2h_stream(device: torch.device) -> CopyStream:
    """Return the stream of copies from `device` to its host."""
    return side_stream(device)


def side_stream(device: torch.device) -> CopyStream:
    """Return a new stream of `device`, beside its compute stream if it has more than that one."""
    if not on_accelerator(device):
        return CopyStream()
    stream = new_stream(device)
    return CopyStream(device) if stream is None else _SideStream(stream)


class StagingBuffers:
    """Two page-locked buffers through which one engine's thread copies results of the host to a device."""

    def __init__(self, device: torch.device):
        self._device = device
        self._buffers: list[tuple[Tensor, CopyEvent]] = []

    def borrow(self, elements: int, dtype: torch.dtype) -> Tensor:
        """Return host memory (elements,) to write to; its contents are undefined."""
        size = elements * dtype.itemsize
        buffer = torch.empty(0, dtype=torch.uint8, device="cpu")
        if len(self._buffers) > 1:
            buffer, event = self._buffers.pop(0)
            event.synchronize()
        if buffer.numel() < size:
            buffer = _page_locked(size, self._device)
        self._borrowed = buffer
        return buffer[:size].view(dtype)

    def send(self, written: Tensor, target: Tensor) -> CopyEvent:
        """Start copying `written`, the memory borrowed last, to `target`; return the event that its readers wait for.

        The copy runs beside the compute stream: its stream must follow the last reader of what `target` had.
        """
        stream = h2d_stream(self._device)
        with stream.following():
            target.copy_(written, non_blocking=True)
        event = stream.record_event()
        self._buffers.append((self._borrowed, event))
        return event

    def keep(self, target: Tensor) -> None:
        """Keep the memory of `target`, if it is freed, until it has what was sent so far."""
        h2d_stream(self._device).keep(target)


class DownloadBuffers:
    """Page-locked buffers through which memory of a device reaches host memory that is not, whole; any thread may borrow.

    There are as many as were borrowed at a time, and those that came back serve later borrowers.
    """

    def __init__(self, device: torch.device):
        self._device = device
        self._free: list[Tensor] = []
        self._lock = threading.Lock()

    def borrow(self, size: int) -> Tensor:
        """Return at least `size` bytes: the smallest free buffer that has them, or a new one in place of the largest.

        To end a buffer waits for the device: a new one is an eighth larger than asked for, so that few end.
        """
        with self._lock:
            self._free.sort(key=Tensor.numel)
            fitting = next((at for at, buffer in enumerate(self._free) if buffer.numel() >= size), None)
            found = self._free.pop(-1 if fitting is None else fitting) if self._free else None
        if found is None or fitting is None:
            return _page_locked(size + size // 8, self._device)
        return found

    def give_back(self, buffer: Tensor) -> None:
        """End a loan; no copy reads or writes the buffer any more."""
        with self._lock:
            self._free.append(buffer)


_download_buffers: WeakValueDictionary[torch.device, DownloadBuffers] = WeakValueDictionary()


def download_buffers(device: torch.device) -> DownloadBuffers:
    """Return the buffers of `device`, which last as long as somebody has them."""
    return _download_buffers.setdefault(device, DownloadBuffers(device))


class UploadRing:
    """A fixed ring of page-locked memory through which host memory of any kind reaches a device; any thread may send."""

    def __init__(self, device: torch.device, *, slots: int = 8, size: int = 4 << 20):
        """Each of `slots` has `size` bytes."""
        self._stream = h2d_stream(device)
        self._size = size
        self._slots: SimpleQueue[tuple[Tensor, CopyEvent]] = SimpleQueue()  # and the copies that read them last
        for slot in _page_locked(slots * size, device).split(size):
            self._slots.put((slot, _REACHED))

    def send(self, source: Tensor, target: Tensor, after: CopyEvent) -> CopyEvent:
        """Start copying the 1-D host tensor `source` to `target` `after` an event; return the event behind the copy.

        The host may overwrite `source` at once. Blocks while the copies to come are more than the ring holds.
        """
        event, elements = after, self._size // source.element_size()
        for part, into in zip(source.split(elements), target.split(elements), strict=True):
            slot, last = self._slots.get()
            try:
                last.synchronize()
                filled = slot[:part.nbytes].view(part.dtype)
                copy_bytes(part, filled)
                with self._stream.following():
                    after.stream_wait()
                    into.copy_(filled, non_blocking=True)
                event = last = self._stream.record_event()
            finally:
                self._slots.put((slot, last))
        return event


@cache
def upload_ring(device: torch.device) -> UploadRing:
    """Return the ring through which what a disk delivers reaches `device`."""
    return UploadRing(device)


def _page_locked(size: int, device: torch.device) -> Tensor:
    """Return `size` bytes of host memory, page-locked for `device` where that is possible."""
    return pinned_zeros(size, torch.uint8, device) if can_pin(device) else torch.empty(size, dtype=torch.uint8, device="cpu")


class PinnedRing:
    """A fixed ring of page-locked memory through which tensors of a device reach host memory of any kind.

    A slot is emptied when its turn comes again, while the device fills the others. So any amount of host memory takes part
    in copies at the rate of page-locked memory, and little of it is page-locked.
    """

    def __init__(self, device: torch.device, *, slots: int = 3, size: int = 32 << 20):
        """Each of `slots` has `size` bytes."""
        self._stream = d2h_stream(device)
        self._free = list(_page_locked(slots * size, device).split(size))
        self._copies: deque[tuple[CopyEvent, Tensor, Tensor, Tensor]] = deque()  # source, slot, and what gets its contents

    def download(self, source: Tensor, target: Tensor) -> None:
        """Start copying `source` to the 1-D host tensor `target` of as many bytes, which holds them after `finish`."""
        source, target = source.contiguous().view(-1).view(torch.uint8), target.view(torch.uint8)
        size = (self._free[0] if self._free else self._copies[0][2]).numel()
        for part, into in zip(source.split(size), target.split(size), strict=True):
            if not self._free:
                self._empty_oldest()
            slot = self._free.pop()
            with self._stream.use():
                slot[:part.numel()].copy_(part, non_blocking=True)
            self._copies.append((self._stream.record_event(), part, slot, into))

    def finish(self) -> None:
        """Wait until all targets have their contents."""
        while self._copies:
            self._empty_oldest()

    def _empty_oldest(self) -> None:
        event, _, slot, into = self._copies.popleft()
        event.synchronize()
        into.copy_(slot[:into.numel()])
        self._free.append(slot)
