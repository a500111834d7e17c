"""A swap file: spans own extents of it, and its threads read and write their chunks.

The file belongs to one process. It is removed when that process closes it, when the interpreter ends, or, after a kill, when
the next run starts in the same folder. A forked child does not own it.
"""

from __future__ import annotations

import operator
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from weakref import finalize

from shoal.errors import TierError
from shoal.tier.claim import Claim, claim
from shoal.tier.extents import ALIGNMENT, Extent, Extents
from shoal.tier.pages import PagePool
from shoal.tier.trace import Trace
from shoal.tier.transfer import IoThreads, Job, SwapFile, describe

__all__ = ["Swap"]

_MOST_THREADS = 64


class Swap:
    """A swap file in `folder`, read and written in requests of `block_bytes`, `requests` of which run concurrently.

    At most `write_ahead` bytes wait to be written; a commit of more blocks. At most `page_pool` bytes of released pages are
    kept for the next fetch. With `checksums` every block is verified after reading. Raises `TierError` if the file cannot
    be created.
    """

    def __init__(self, folder: str | Path, *, rank: int = 0, block_bytes: int = 1 << 20, requests: int = 8,
                 write_ahead: int = 256 << 20, page_pool: int = 0, checksums: bool = True):
        assert block_bytes > 0 and requests > 0, (block_bytes, requests)
        made = claim(folder, rank)
        self.path = made.path
        self.direct = made.direct
        self.block_bytes = -(-block_bytes // ALIGNMENT) * ALIGNMENT
        self.read_bytes = 0
        self.written_bytes = 0
        self.lock = threading.RLock()
        """Guards the state of all chunks, which threads change when a job ends. Not a Condition: an interrupt on entering
        one would leave it locked."""
        self.write_ended = threading.Condition(self.lock)
        """Notified when a write has ended."""
        self._writes: set[Job] = set()
        """Writes that are queued or in flight; `lock` guards it."""
        self.page_pool = PagePool(page_pool)
        """Released pages of all spans."""
        self._write_ahead = write_ahead
        self._extents = Extents()
        self._allocating = threading.Lock()
        self._file = SwapFile(path=made.path, descriptor=made.descriptor, rank=rank, direct=made.direct, checksums=checksums)
        self._threads = IoThreads(self._file, min(requests, _MOST_THREADS))
        self._owner = os.getpid()
        self._closing = False
        self._end = finalize(self, _end, made, self._threads, self._owner)

    def record_to(self, trace: Trace | None) -> None:
        """Record requests in `trace` from now on; None: in no trace."""
        self._file.record_to(trace)

    @property
    def disk_bytes(self) -> int:
        """Bytes of the file that spans own."""
        return self._extents.allocated

    @property
    def writing_bytes(self) -> int:
        """Bytes of writes that are queued or in flight."""
        with self.lock:
            return sum(job.bytes for job in self._writes)

    @property
    def closed(self) -> bool:
        """Whether the file is closed."""
        return self._closing or not self._end.alive

    def allocate(self, bytes: int, name: str) -> Extent:
        """Return an extent of `bytes`, reserved on disk, for the span `name`; raises TierError if the disk is full or the
        file closed."""
        with self._allocating:
            if self.closed:  # another file may have its descriptor by now
                raise self._file.error("write", name, self._extents.size, "the file is closed")
            self._grow(bytes, name)
            return self._extents.allocate(bytes)

    def _grow(self, bytes: int, name: str) -> None:
        """Extend the file until it has a free extent of `bytes`."""
        shortage = self._extents.shortage(bytes)
        if shortage > 0:
            self._reserve(shortage, name)
            self._extents.grow(shortage)

    def _reserve(self, bytes: int, name: str) -> None:
        size = self._extents.size
        try:
            os.posix_fallocate(self._file.descriptor, size, bytes)
        except OSError as error:
            os.ftruncate(self._file.descriptor, size)
            raise self._file.error("write", name, size, describe(error, bytes, self.path.parent)) from error

    def free(self, extents: Iterable[Extent]) -> None:
        """Free extents."""
        with self._allocating:
            for extent in extents:
                self._extents.free(extent)

    def prepare(self, job: Job) -> tuple[Callable[[], object], Callable[[], object]]:
        """Return two functions, which enqueue `job` and wake the threads; the caller holds the lock until it called both.

        Both are implemented in C, so that no KeyboardInterrupt separates the effects of the first. If the file is closed or
        was deleted, the first one fails the job instead.
        """
        if (failure := self._failure(job)) is not None:
            return partial(job.fail, failure), _nothing
        enqueue, wake = self._threads.prepare(job)
        if job.lane == "write":
            both = map(operator.call, (partial(self._writes.add, job), enqueue))
            enqueue = partial(deque, both, 0)
        return enqueue, wake

    def _failure(self, job: Job) -> TierError | None:
        """Return the error of every job once the file is closed or deleted."""
        reason = None
        if self.closed:
            reason = "the file is closed"
        elif os.fstat(self._file.descriptor).st_nlink == 0:
            reason = "the file was deleted. No other process may touch the folder during training"
        return None if reason is None else job.failure(self._file, job.extent.offset, reason)

    def check_owner(self, name: str) -> None:
        """Raise TierError in a process forked from the owner: it has none of the threads."""
        if os.getpid() != self._owner:
            raise TierError(f"{name} rests in {self.path}, which belongs to process {self._owner}; this is process "
                            f"{os.getpid()}, forked from it. Read the state in the training process")

    def has_room(self, bytes: int) -> bool:
        """Whether the write-ahead limit admits `bytes` more; the caller holds the lock."""
        return not self._writes or self.writing_bytes + bytes <= self._write_ahead

    def record_completion(self, job: Job) -> None:
        """Count the bytes of a job that has ended; the caller holds the lock."""
        if job.lane == "write":
            self._writes.discard(job)
            self.write_ended.notify_all()
        if job.error is None and job.lane == "read":
            self.read_bytes += job.bytes
        elif job.error is None:
            self.written_bytes += job.bytes

    def close(self) -> None:
        """Remove the file; requests in flight end, queued ones fail."""
        with self.lock:  # no thread is between `prepare` and enqueueing
            self._closing = True
        self._end()


def _nothing() -> None:
    """Wake no thread."""


def _end(made: Claim, threads: IoThreads, owner: int) -> None:
    if os.getpid() == owner:
        ended = threads.stop()
        made.remove()
        if ended:  # else a thread might use the descriptor for another file
            os.close(made.descriptor)
