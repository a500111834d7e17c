"""A span on a compute device, mirrored by a span of the host: fetch copies up, commit copies down and frees device memory.

A commit does not wait for its copy: readers on the host do.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from shoal.tier.span import DONE, Names, PlacedSpan, ResidentSpan, Span, Transfer, no_names
from shoal.tier.store import Store
from shoal.tier.streams import CopyEvent, CopyStream, allocate, d2h_stream, free, h2d_stream

__all__ = ["CopiesEnded", "CopyTransfer", "DeviceMirror", "mirrored"]


class CopyTransfer:
    """A copy of the span `source` into `target` on a compute device, in `stream`.

    The copy waits for the work that is queued on the compute stream when the transfer begins: it may use, or have allocated,
    the memory of `target`. The copy does not wait for work that is queued later, while a disk is read.
    """

    def __init__(self, source: Span, target: Tensor, stream: CopyStream):
        self._source = source
        self._target = target
        self._stream = stream
        stream.follow_compute()
        self._arriving = source.fetch()
        self._event: CopyEvent | None = None
        self._done = False
        if self._arriving is DONE:
            self._start()

    @property
    def done(self) -> bool:
        return self._done

    def wait(self) -> None:
        if self._event is None:
            self._arriving.wait()
            self._start()
        assert self._event is not None
        self._event.stream_wait()  # at every call: another stream may be the current one
        if self._done:
            return
        if not isinstance(self._source, ResidentSpan):  # the commit releases the memory that the copy reads
            self._event.synchronize()
        self._source.commit(changed=False)
        self._done = True

    def following(self) -> AbstractContextManager[object]:
        if not isinstance(self._source, ResidentSpan):  # the host waits for the disk anyway
            self.wait()
            return nullcontext()
        return self._stream.following()

    def finish(self) -> None:
        """Block this thread until the copy, if it has started, has read its source, which may then be overwritten."""
        if self._event is not None:
            self._event.synchronize()

    def _start(self) -> None:
        with self._stream.following():
            self._target.copy_(self._source.tensor, non_blocking=True)
        self._event = self._stream.record_event()


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
        self.tensor: Tensor = torch.empty_like(below.tensor, device=device)
        self._below = below
        self._device = device
        self._arriving: CopyTransfer | None = None
        self._copied_down: CopyEvent | None = None
        self._lock = threading.Lock()

    def fetch(self, start: int = 0, stop: int | None = None, *, fresh: bool = False) -> Transfer:
        self.finish_commit()
        allocate(self.tensor)
        self._arriving = None if fresh else CopyTransfer(self._below, self.tensor, h2d_stream(self._device))
        return self._arriving or DONE

    def commit(self, start: int = 0, stop: int | None = None, *, changed: bool = True) -> Transfer:
        if self._arriving is not None:
            self._arriving.wait()  # a copy up that is still unused writes to the memory
        if not changed:
            free(self.tensor)
            return DONE
        stream = d2h_stream(self._device)
        self._below.fetch(fresh=True).wait()
        with stream.use():
            self._below.tensor.copy_(self.tensor, non_blocking=True)
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
                self._below.commit()

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
