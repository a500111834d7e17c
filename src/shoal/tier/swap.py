"""A file for state that does not fit in memory: spans hold extents of it, and its threads carry bytes to and from it.

The file belongs to one process, and goes when that process does: when it is closed, when the interpreter ends, or, after a
kill, when the next run begins in the same folder. A forked child does not own it.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from weakref import finalize

from shoal.errors import TierError
from shoal.tier.claim import Claim, claim
from shoal.tier.extents import ALIGNMENT, Extent, Extents
from shoal.tier.page_pool import PagePool
from shoal.tier.trace import Trace
from shoal.tier.transfer import Job, SwapFile, Threads, refusal

__all__ = ["Swap"]

_MOST_THREADS = 64


class Swap:
    """A swap file in `folder`, read and written in requests of `block_bytes`, of which `requests` are under way at once.

    At most `write_ahead` bytes wait to be written, more block the writer; at most `spare` bytes of memory that nobody uses
    are kept for the next use; with `checksums` every block is compared after reading. Raises `TierError` when the file
    cannot be made.
    """

    def __init__(self, folder: str | Path, *, rank: int = 0, block_bytes: int = 1 << 20, requests: int = 8,
                 write_ahead: int = 256 << 20, spare: int = 0, checksums: bool = True):
        assert block_bytes > 0 and requests > 0, (block_bytes, requests)
        made = claim(folder, rank)
        self.path = made.path
        self.direct = made.direct
        self.block_bytes = -(-block_bytes // ALIGNMENT) * ALIGNMENT
        self.read_bytes = 0
        self.written_bytes = 0
        self.lock = threading.RLock()
        """Guards the state of all chunks, which threads change when a job ends. No condition: an interrupt that fell into
        the entrance of one would leave it locked."""
        self.changed = threading.Condition(self.lock)
        """Notified when a write has ended."""
        self.writing_bytes = 0
        """Bytes on their way to the disk, or about to be."""
        self.spare = PagePool(spare)
        """Pages that nobody uses."""
        self._write_ahead = write_ahead
        self._extents = Extents()
        self._allocating = threading.Lock()
        self._file = SwapFile(path=made.path, descriptor=made.descriptor, rank=rank, direct=made.direct, checksums=checksums)
        self._threads = Threads(self._file, min(requests, _MOST_THREADS))
        self._owner = os.getpid()
        self._closing = False
        self._end = finalize(self, _end, made, self._threads, self._owner)

    @property
    def trace(self) -> Trace | None:
        """Where requests are recorded; None: nowhere."""
        return self._file.trace

    @trace.setter
    def trace(self, trace: Trace | None) -> None:
        self._file.trace = trace

    @property
    def disk_bytes(self) -> int:
        """Bytes of the file that spans hold."""
        return self._extents.held

    @property
    def closed(self) -> bool:
        """Whether the file is gone."""
        return self._closing or not self._end.alive

    def allocate(self, bytes: int, name: str) -> Extent:
        """Return an extent of `bytes` for the span `name`, reserved on the disk; raises TierError when that is full, or
        the file closed."""
        with self._allocating:
            if self.closed:  # another file may have its number by now
                raise self._file.error("write", name, self._extents.size, "the file is closed")
            self._grow(bytes, name)
            return self._extents.allocate(bytes)

    def _grow(self, bytes: int, name: str) -> None:
        """Let the file have a free extent of `bytes`."""
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
            raise self._file.error("write", name, size, refusal(error, bytes, self.path.parent)) from error

    def free(self, extents: Iterable[Extent]) -> None:
        """Take extents back."""
        with self._allocating:
            for extent in extents:
                self._extents.free(extent)

    def prepare(self, job: Job) -> tuple[Callable[[], object], Callable[[], object]]:
        """Return what lets `job` travel, and what then tells the threads; the caller has the lock until it has called both.

        One of a file that is closed, or that somebody deleted, fails at once.
        """
        refused = self._refused(job)
        return self._threads.prepare(job) if refused is None else (partial(job.fail, refused), _nothing)

    def _refused(self, job: Job) -> TierError | None:
        """Return why nothing travels any more."""
        said = None
        if self.closed:
            said = "the file is closed"
        elif os.fstat(self._file.descriptor).st_nlink == 0:
            said = "the file was deleted. Let nothing else touch the folder while training runs"
        return None if said is None else job.refused(self._file, job.stretch.offset, said)

    def check_owner(self, name: str) -> None:
        """Raise TierError in a process that was forked from the owner: it has none of the threads."""
        if os.getpid() != self._owner:
            raise TierError(f"{name} rests in {self.path}, which belongs to process {self._owner}; this is process "
                            f"{os.getpid()}, forked from it. Read the state where it is trained")

    def has_room(self, bytes: int) -> bool:
        """Whether `bytes` more may be on their way to the disk; the caller holds the lock."""
        return not self.writing_bytes or self.writing_bytes + bytes <= self._write_ahead

    def count(self, job: Job) -> None:
        """Count a job that has ended; the caller holds the lock."""
        if job.lane == "write":
            self.writing_bytes -= job.bytes
            self.changed.notify_all()
        if job.error is None and job.lane == "read":
            self.read_bytes += job.bytes
        elif job.error is None:
            self.written_bytes += job.bytes

    def close(self) -> None:
        """Remove the file; what is under way ends, what is queued fails."""
        with self.lock:  # nobody is about to put anything into the queue
            self._closing = True
        self._end()


def _nothing() -> None:
    """Wake nobody."""


def _end(made: Claim, threads: Threads, owner: int) -> None:
    if os.getpid() == owner:
        ended = threads.stop()
        made.remove()
        if ended:  # else a thread would go on with whatever file gets the number next
            os.close(made.descriptor)
