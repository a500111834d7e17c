"""A span on a compute device, mirrored by a span of the host: fetch copies up, commit copies down and frees device memory.

A commit does not wait for its copy: readers on the host do. The pages of a span on disk are unmapped and mapped again, and
are not page-locked. A copy to them would hold up the thread that starts it: it goes to a page-locked buffer, and from there
once it is whole.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch
from torch import Tensor

from shoal.device import can_pin, set_current
from shoal.tier.disk_span import DiskSpan
from shoal.tier.pages import copy_bytes
from shoal.tier.span import DONE, Names, PlacedSpan, ResidentSpan, Span, Transfer, no_names
from shoal.tier.store import Store
from shoal.tier.streams import (
    CopyEvent,
    CopyStream,
    allocate,
    d2h_stream,
    download_buffers,
    free,
    h2d_stream,
    upload_ring,
)

__all__ = ["CopiesEnded", "CopyTransfer", "DeviceMirror", "ResidentCopy", "copy_to_device", "mirrored"]


class CopyTransfer(Transfer, Protocol):
    """A copy of a span of the host into memory of a device.

    It follows the work that the compute stream has been given when the transfer begins: that may use, or have allocated,
    the memory. It does not follow what is given later, while a disk is read.
    """

    def finish(self) -> None:
        """Block this thread until the copy has read its source, which may then be overwritten."""
        ...


class _Upload:
    """A copy to `target`, which the compute stream owns. Dropped before a wait, with its engine, it keeps the memory."""

    def __init__(self, target: Tensor, stream: CopyStream):
        self._target, self._stream = target, stream
        self.done = False

    def __del__(self) -> None:
        if not self.done:
            self._stream.keep(self._target)


class ResidentCopy(_Upload):
    """The copy of `source` into `target`, in `stream`. Where the source is page-locked, the host waits for nothing."""

    def __init__(self, source: Tensor, target: Tensor, stream: CopyStream):
        super().__init__(target, stream)
        stream.follow_compute()
        with stream.following():
            target.copy_(source, non_blocking=True)
        self._event = stream.record_event()

    def wait(self) -> None:
        self._event.stream_wait()  # at every call: another stream may be the current one
        self.done = True

    def following(self) -> AbstractContextManager[object]:
        return self._stream.following()

    def finish(self) -> None:
        self._event.synchronize()


class DiskCopy(_Upload):
    """The copy of a span on disk into `target`: each chunk starts on its way in the thread that has read it.

    The host waits for the disk where it has not delivered yet, and for room in the ring where chunks are in memory still.
    """

    def __init__(self, source: DiskSpan, target: Tensor, device: torch.device):
        super().__init__(target, h2d_stream(device))
        self._source, self._device = source.tensor, device
        self._ring = upload_ring(device)
        self._thread = threading.get_ident()
        self._after = self._stream.record_compute()
        self._events: list[CopyEvent] = []
        self._failure: BaseException | None = None
        self._arriving = source.deliver(self._send)

    def wait(self) -> None:
        self.finish()
        for event in self._events:
            event.stream_wait()
        self.done = True

    def following(self) -> AbstractContextManager[object]:
        self.finish()
        return self._stream.following()

    def finish(self) -> None:
        self._arriving.wait()
        if self._failure is not None:
            raise self._failure

    def _send(self, elements: range) -> None:
        """Start copying `elements`; any thread."""
        try:
            if threading.get_ident() != self._thread:  # a new thread begins with the first device, and would come back to it
                set_current(self._device)
            part = slice(elements.start, elements.stop)
            self._events.append(self._ring.send(self._source[part], self._target[part], self._after))
        except Exception as error:  # of the device: whoever waits raises it
            self._failure = error


def copy_to_device(source: Span, target: Tensor, device: torch.device) -> CopyTransfer:
    """Start copying a span of the host, which no one has fetched, to `target`, memory of `device`."""
    if isinstance(source, DiskSpan):
        return DiskCopy(source, target, device)
    return ResidentCopy(source.tensor, target, h2d_stream(device))


class CopiesEnded:
    """The transfer of host memory that a device copies: it ends when `finish` has waited for the copies."""

    def __init__(self, finish: Callable[[], None]):
        self._finish = finish
        self.done = False

    def wait(self) -> None:
        self._finish()
        self.done = True

    def following(self) -> AbstractContextManager[object]:
        self.wait()
        return nullcontext()


class DeviceMirror:
    """Memory of `device` that mirrors the span `below`, as a whole. At first it is in memory."""

    def __init__(self, below: PlacedSpan, device: torch.device):
        self._copied_down: CopyEvent | None = None
        self.tensor: Tensor = torch.empty_like(below.tensor, device=device)
        self._below = below
        self._device = device
        self._arriving: CopyTransfer | None = None
        self._buffers = download_buffers(device) if isinstance(below, DiskSpan) and can_pin(device) else None
        self._staged: Tensor | None = None
        self._lock = threading.Lock()

    def __del__(self) -> None:
        if self._copied_down is not None:  # dropped with its engine, under its own copy
            d2h_stream(self._device).keep(self.tensor)

    def fetch(self, start: int = 0, stop: int | None = None, *, fresh: bool = False) -> Transfer:
        self.finish_commit()
        allocate(self.tensor)
        self._arriving = None if fresh else copy_to_device(self._below, self.tensor, self._device)
        return self._arriving or DONE

    def commit(self, start: int = 0, stop: int | None = None, *, changed: bool = True) -> Transfer:
        if self._arriving is not None:
            self._arriving.wait()  # a copy up that is still unused writes to the memory
        if not changed:
            free(self.tensor)
            return DONE
        stream, target = d2h_stream(self._device), self._below.tensor
        if self._buffers is None:
            self._below.fetch(fresh=True).wait()
        else:
            self._staged = self._buffers.borrow(target.nbytes)
            target = self._staged[:target.nbytes].view(target.dtype)
        with stream.use():
            target.copy_(self.tensor, non_blocking=True)
        self._copied_down = stream.record_event()
        stream.defer(self.finish_commit)
        return DONE

    def finish_commit(self) -> None:
        """Wait for a copy down to end, free its source, and commit the span below; the optimizer's thread may call it."""
        with self._lock:
            event, self._copied_down = self._copied_down, None
            if event is not None:
                event.synchronize()
                free(self.tensor)
                self._unstage()
                self._below.commit()

    def _unstage(self) -> None:
        """Copy what a buffer holds to the span below, and give the buffer back."""
        staged, self._staged = self._staged, None
        if self._buffers is not None and staged is not None:
            self._below.fetch(fresh=True).wait()
            copy_bytes(staged[:self._below.tensor.nbytes], self._below.tensor)
            self._buffers.give_back(staged)

    def finish_copies(self) -> None:
        """Wait until no copy reads or writes the span below: the host is about to."""
        self.finish_commit()
        if (arriving := self._arriving) is not None:
            arriving.finish()

    def discard(self) -> None:
        self.finish_commit()
        self._below.discard()

    def close(self) -> None:
        self.finish_commit()
        self._below.close()


class _MirroredSpan:
    """The host's side of a mirror: a fetch also waits for the copies of the device's side, in both directions."""

    def __init__(self, mirror: DeviceMirror, below: Span):
        self.tensor = below.tensor
        self._mirror = mirror
        self._below = below

    def fetch(self, start: int = 0, stop: int | None = None, *, fresh: bool = False) -> Transfer:
        if isinstance(self._below, ResidentSpan):
            return CopiesEnded(self._mirror.finish_copies)
        self._mirror.finish_copies()  # a disk writes what came down while the step waits for its turn
        return self._below.fetch(start, stop, fresh=fresh)

    def commit(self, start: int = 0, stop: int | None = None, *, changed: bool = True) -> Transfer:
        return self._below.commit(start, stop, changed=changed)

    def close(self) -> None:
        self._mirror.close()


def mirrored(device: torch.device, store: Store, size: int, dtype: torch.dtype, name: str,
             names: Names = no_names) -> tuple[PlacedSpan, Span]:
    """Return a span of `store` as `device` uses it, and as it rests; both are one where `device` is the store's device."""
    rest = store.place(size, dtype, name, names=names)
    if device == store.device:
        return rest, rest
    mirror = DeviceMirror(rest, device)
    return mirror, _MirroredSpan(mirror, rest)
