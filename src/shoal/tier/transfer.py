"""I/O threads transfer pages to and from a file in blocks, without copies.

    submit           a job's blocks join the queue of their lane, read or write
    transfer_block   a thread reads a block and verifies its checksum, or computes its checksum and writes it
    on_done, then    the thread that transferred the last block of a job calls back the job's owner, then others

Half of the threads prefer reads and half writes, so that neither lane waits for the other's queue.
"""

from __future__ import annotations

import errno
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import repeat
from pathlib import Path
from queue import SimpleQueue
from typing import Literal

from shoal.errors import TierError
from shoal.native.crc32 import crc32
from shoal.tier.extents import ALIGNMENT
from shoal.tier.folder_check import free_bytes
from shoal.tier.pages import Pages
from shoal.tier.span import Names, no_names
from shoal.tier.trace import Trace

__all__ = ["IoThreads", "Job", "Lane", "MappedExtent", "PendingJobs", "SwapFile", "describe"]

Lane = Literal["read", "write"]
SHOWN = 3
"""Parameters named by an error; it counts the others."""

_CLOSE_TIMEOUT = 30.0  # seconds that blocks in flight have when the file is closed


@dataclass(slots=True, kw_only=True)
class SwapFile:
    """An open swap file, and how it is read and written."""

    path: Path
    descriptor: int
    rank: int
    direct: bool
    checksums: bool
    trace: Trace | None = None

    def record_to(self, trace: Trace | None) -> None:
        """Record requests in `trace` from now on; None: in no trace."""
        self.trace = trace

    def error(self, lane: Lane, name: str, offset: int, reason: str) -> TierError:
        """Return the error of a failed transfer of the span `name`."""
        verb = "read from" if lane == "read" else "written to"
        return TierError(f"rank {self.rank}: {name} could not be {verb} {self.path} at byte {offset:,}: {reason}")


@dataclass(frozen=True, slots=True, kw_only=True)
class MappedExtent:
    """Bytes [start, stop) of `pages`, stored at `offset` of a file."""

    pages: Pages
    start: int
    stop: int
    offset: int


class Job:
    """One read or write of an extent, for the span `name`; the thread that ends it calls `on_done`.

    Errors contain the parameters that `names` returns for elements of the extent's pages.
    """

    def __init__(self, lane: Lane, name: str, extent: MappedExtent, checksums: list[int], on_done: Callable[[Job], None], *,
                 block_bytes: int, names: Names = no_names):
        self.lane: Lane = lane
        self.name = name
        self.extent = extent
        self.block_bytes = block_bytes
        self.blocks = range(-(-(extent.stop - extent.start) // block_bytes))
        self.error: TierError | None = None
        self._checksums = checksums
        self._on_done = on_done
        self._names = names
        self._remaining = len(self.blocks)
        self._counting = threading.Lock()
        self._callbacks: list[Callable[[], None]] | None = []  # None once they were called
        self.done = False
        """Whether it has ended."""
        self._in_flight = threading.Lock()  # not an Event: an interrupted wait could leave that locked
        self._in_flight.acquire()

    @property
    def bytes(self) -> int:
        return self.extent.stop - self.extent.start

    def wait(self) -> None:
        """Block until the job has ended; its `error` tells whether it failed."""
        with self._in_flight:
            pass

    def then(self, callback: Callable[[], None]) -> None:
        """Call `callback` when the job has ended, before `wait` returns: in the thread that ends it, or here if it has."""
        with self._counting:
            if self._callbacks is not None:
                self._callbacks.append(callback)
                return
        callback()

    def transfer_block(self, index: int, file: SwapFile) -> None:
        """Transfer one block; a failure becomes the job's `error`."""
        if self.error is None:
            begin = time.perf_counter()
            first = index * self.block_bytes
            offset = self.extent.offset + first
            view = self.extent.pages.view(self.extent.start + first,
                                          min(self.extent.start + first + self.block_bytes, self.extent.stop))
            try:
                self._read(index, view, offset, file) if self.lane == "read" else self._write(index, view, offset, file)
            except TierError as error:
                self.error = error
            except Exception as error:  # the job must end: callers wait for it
                self.error = self.failure(file, offset, f"{type(error).__name__}: {error}")
            if file.trace is not None:
                file.trace.record(self.lane, self.name, begin, time.perf_counter(), bytes=len(view))
        self._count(1)

    def failure(self, file: SwapFile, offset: int, reason: str) -> TierError:
        """Return the error of the block at `offset` of the file."""
        first, width = self.extent.start + offset - self.extent.offset, self.extent.pages.tensor.element_size()
        last = min(first + self.block_bytes, self.extent.stop)
        names = self._names(range(first // width, -(-last // width)))
        more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
        parameters = f" (of {', '.join(map(repr, names[:SHOWN]))}{more})" if names else ""
        return file.error(self.lane, self.name + parameters, offset, reason)

    def fail(self, error: TierError, blocks: int | None = None) -> None:
        """Fail `blocks` blocks (default: all) that are in no queue any more."""
        self.error = self.error or error
        self._count(len(self.blocks) if blocks is None else blocks)

    def _count(self, ended: int) -> None:
        with self._counting:
            self._remaining -= ended
            last = self._remaining == 0
        if last:
            try:
                self._on_done(self)
                with self._counting:
                    callbacks, self._callbacks = self._callbacks, None
                for callback in callbacks or ():
                    callback()
            finally:
                self.done = True
                self._in_flight.release()

    def _read(self, index: int, view: memoryview, offset: int, file: SwapFile) -> None:
        try:
            count = _transfer(os.preadv, file, view, offset)
        except OSError as error:
            raise self.failure(file, offset, f"{error.strerror}; look at the disk (dmesg)") from error
        if count < len(view):
            raise self.failure(file, offset + count, "unexpected end of file: it was truncated. No other "
                               "process may touch the folder during training")
        if file.checksums and crc32(view) != self._checksums[index]:
            raise self.failure(file, offset, f"checksum mismatch in {len(view):,} bytes: the file was changed on "
                               f"disk. No other process may touch the folder; check the disk")

    def _write(self, index: int, view: memoryview, offset: int, file: SwapFile) -> None:
        if file.checksums:
            self._checksums[index] = crc32(view)
        try:
            count = _transfer(os.pwritev, file, view, offset)
            if not file.direct:  # the bytes are in memory already: free the page cache
                os.posix_fadvise(file.descriptor, offset, len(view), os.POSIX_FADV_DONTNEED)
        except OSError as error:
            raise self.failure(file, offset, describe(error, len(view), file.path.parent)) from error
        if count < len(view):
            raise self.failure(file, offset + count, "the write ended early; make room on the disk")


def _transfer(call: Callable[[int, Sequence[memoryview], int], int], file: SwapFile, view: memoryview, offset: int) -> int:
    """Call preadv or pwritev until all of `view` is transferred, or a call moves nothing; return the bytes transferred."""
    count = 0
    while count < len(view):
        moved = call(file.descriptor, [view[count:]], offset + count)
        if file.direct and count + moved < len(view):  # direct I/O continues only at an aligned offset
            moved = moved // ALIGNMENT * ALIGNMENT
        if moved == 0:
            break
        count += moved
    return count


def describe(error: OSError, needed: int, folder: Path) -> str:
    """Return the reason of a failed write, and the fix."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return (f"{error.strerror}: needed {needed:,} bytes, {free_bytes(folder):,} are free; make room, or give another "
                f"folder in nvme_path")
    return f"{error.strerror}; look at the disk (dmesg), or give another folder in nvme_path"


class PendingJobs:
    """The transfer of several jobs, and of errors of earlier ones."""

    def __init__(self, jobs: Iterable[Job], failed: Iterable[TierError] = ()):
        self._jobs = list(jobs)
        self._failed = list(failed)

    @property
    def done(self) -> bool:
        return all(job.done for job in self._jobs)

    def wait(self) -> None:
        for job in self._jobs:
            job.wait()
        for error in (*self._failed, *(job.error for job in self._jobs)):
            if error is not None:
                raise error

    def following(self) -> AbstractContextManager[object]:
        self.wait()
        return nullcontext()


class IoThreads:
    """Daemon threads that transfer the blocks of one file."""

    def __init__(self, file: SwapFile, count: int):
        self._file = file
        self._count = count
        self._queues: dict[Lane, deque[tuple[Job, int]]] = {"read": deque(), "write": deque()}
        self._tokens: SimpleQueue[bool] = SimpleQueue()  # True for each queued block; False ends a thread
        self._threads: list[threading.Thread] = []

    def submit(self, job: Job) -> None:
        """Start `job`."""
        enqueue, wake = self.prepare(job)
        try:
            enqueue()
        finally:
            wake()

    def prepare(self, job: Job) -> tuple[Callable[[], object], Callable[[], object]]:
        """Return two functions, which enqueue the blocks of `job` and wake the threads; no `stop` may run in between.

        Both are implemented in C, so that no KeyboardInterrupt can be raised within them.
        """
        if not self._threads:
            self._start()
        blocks = [(job, index) for index in job.blocks]
        tokens = map(self._tokens.put, repeat(True, len(blocks)))
        return partial(self._queues[job.lane].extend, blocks), partial(deque, tokens, 0)

    def stop(self) -> bool:
        """Fail queued blocks, wait for blocks in flight, and end the threads; return whether all ended in time."""
        self._fail_queued()
        for _ in self._threads:
            self._tokens.put(False)
        deadline = time.monotonic() + _CLOSE_TIMEOUT
        others = [thread for thread in self._threads if thread is not threading.current_thread()]
        for thread in others:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in others)

    def _start(self) -> None:
        if self._file.checksums:
            crc32(b"")  # build native code here, not in all threads at once
        lanes: tuple[Lane, Lane] = ("read", "write")
        for number in range(self._count):
            order = lanes if number % 2 == 0 else lanes[::-1]
            thread = threading.Thread(target=self._serve, args=(order,), name=f"shoal-disk-{number}", daemon=True)
            thread.start()
            self._threads.append(thread)

    def _serve(self, order: Sequence[Lane]) -> None:
        while self._tokens.get():
            block = self._next(order)
            if block is not None:
                block[0].transfer_block(block[1], self._file)
            del block  # a waiting thread must not keep a job and its memory alive

    def _next(self, order: Sequence[Lane]) -> tuple[Job, int] | None:
        """Take a block from the first queue that has one; None if `stop` emptied them."""
        while any(self._queues.values()):
            for lane in order:
                try:
                    return self._queues[lane].popleft()
                except IndexError:  # another thread was faster
                    continue
        return None

    def _fail_queued(self) -> None:
        while (block := self._next(("read", "write"))) is not None:
            job, _ = block
            job.fail(job.failure(self._file, job.extent.offset, "the file was closed before the transfer"), 1)
