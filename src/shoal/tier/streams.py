"""Copies between a compute device and its host, beside what the device computes: one stream for each way.

Where the device is the host there are no streams, and a copy is over when it was made.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Protocol

import torch
from torch import Tensor

__all__ = ["CopyStream", "Mark", "down", "side", "up", "upload"]

_LANDING = 2  # copies to the host that may be under way before the oldest is seen to its end


class Mark(Protocol):
    """A place in what a stream was given to do."""

    def wait(self) -> None:
        """Block this thread until the stream has come here."""
        ...

    def join(self) -> None:
        """Let what the device computes from now on come after."""
        ...


class CopyStream:
    """What is copied where there is no stream of its own for it: at once, or among what the device computes."""

    def __init__(self) -> None:
        self._landing: deque[Callable[[], None]] = deque()

    def open(self, *, after_compute: bool = False) -> AbstractContextManager[object]:
        """Return a context whose copies belong to this stream; they follow what the device was given so far if asked."""
        return nullcontext()

    def mark(self) -> Mark:
        """Return a mark behind what the stream was given so far."""
        return _HERE

    def free(self, tensor: Tensor, *, computed: bool) -> None:
        """Empty the storage of `tensor` once this stream, or if `computed` the device's computing, is done with it.

        One that somebody had as an array of numpy stays as it is: torch resizes it no more.
        """
        if (storage := tensor.untyped_storage()).resizable():
            storage.resize_(0)

    def hand_over(self, tensor: Tensor) -> None:
        """Keep the memory of `tensor`, if it was made in this stream, until what the device computes now is done with it."""

    def land(self, landing: Callable[[], None]) -> None:
        """Have `landing` called when a few later ones were asked for: it waits for a copy, and goes on from there."""
        self._landing.append(landing)
        while len(self._landing) > _LANDING:
            self._landing.popleft()()


class _CudaStream(CopyStream):
    def __init__(self, device: torch.device):
        super().__init__()
        self._stream = torch.cuda.Stream(device)

    def open(self, *, after_compute: bool = False) -> AbstractContextManager[object]:
        if after_compute:
            self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        return torch.cuda.stream(self._stream)

    def mark(self) -> Mark:
        event = torch.cuda.Event(blocking=True)  # who waits sleeps: the others would keep a core busy
        event.record(self._stream)
        return _CudaMark(event, self._stream.device)

    def free(self, tensor: Tensor, *, computed: bool) -> None:
        tensor.record_stream(torch.cuda.current_stream(tensor.device) if computed else self._stream)
        tensor.untyped_storage().resize_(0)

    def hand_over(self, tensor: Tensor) -> None:
        if tensor.is_cuda:  # what rests on the host belongs to no stream
            tensor.record_stream(torch.cuda.current_stream(tensor.device))


class _CudaMark:
    def __init__(self, event: torch.cuda.Event, device: torch.device):
        self._event = event
        self._device = device

    def wait(self) -> None:
        self._event.synchronize()

    def join(self) -> None:
        torch.cuda.current_stream(self._device).wait_event(self._event)


class _InlineStream:
    def wait(self) -> None:
        pass

    def join(self) -> None:
        pass


_HERE: Mark = _InlineStream()


@cache
def up(device: torch.device) -> CopyStream:
    """Return the stream of copies from the host to `device`."""
    return _CudaStream(device) if device.type == "cuda" else CopyStream()


@cache
def down(device: torch.device) -> CopyStream:
    """Return the stream of copies from `device` to its host."""
    return _CudaStream(device) if device.type == "cuda" else CopyStream()


def side(device: torch.device) -> CopyStream:
    """Return a stream of one's own, for what `device` does beside its computing."""
    return _CudaStream(device) if device.type == "cuda" else CopyStream()


class Upload:
    """Two page-locked buffers through which what the host computes goes to a device."""

    def __init__(self, device: torch.device):
        self._device = device
        self._buffers: list[tuple[Tensor, Mark]] = []

    def borrow(self, elements: int, dtype: torch.dtype) -> Tensor:
        """Return host memory (elements,) to write; its contents are undefined."""
        size = elements * dtype.itemsize
        buffer = torch.empty(0, dtype=torch.uint8)
        if len(self._buffers) > 1:
            buffer, mark = self._buffers.pop(0)
            mark.wait()
        if buffer.numel() < size:
            buffer = torch.empty(size, dtype=torch.uint8, pin_memory=self._device.type == "cuda")
        self._lent = buffer
        return buffer[:size].view(dtype)

    def send(self, written: Tensor, target: Tensor) -> None:
        """Copy what was written into the memory borrowed last to `target`, ahead of what is computed from now on."""
        stream = up(self._device)
        with stream.open(after_compute=True):
            target.copy_(written, non_blocking=True)
        mark = stream.mark()
        mark.join()
        self._buffers.append((self._lent, mark))


@cache
def upload(device: torch.device) -> Upload:
    """Return the way of small copies to `device`."""
    return Upload(device)
