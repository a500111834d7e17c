"""Bytes travel between pages and a file in blocks, each carried by whichever thread is free; no byte is copied on the way.

    submit    a job's blocks join the queue of their lane, read or write
    carry     a thread takes a block: read, then compare its checksum; or note its checksum, then write
    settle    the thread that carried the last block of a job says so to the job's owner

Half of the threads look for reads first and half for writes, so that neither lane waits for the other's queue.
"""

from __future__ import annotations

import errno
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import repeat
from pathlib import Path
from queue import SimpleQueue
from typing import Literal

from shoal.errors import TierError
from shoal.tier.checksum import checksum
from shoal.tier.extents import ALIGNMENT
from shoal.tier.folder_check import free_bytes
from shoal.tier.pages import Pages
from shoal.tier.span import Names, unnamed
from shoal.tier.trace import Trace

__all__ = ["Job", "Lane", "PendingJobs", "Stretch", "SwapFile", "Threads", "refusal"]

Lane = Literal["read", "write"]
SHOWN = 3
"""Parameters that an error names before it counts the rest."""

_PATIENCE = 30.0  # seconds that the blocks under way have when their owner closes


@dataclass(slots=True, kw_only=True)
class SwapFile:
    """A file that blocks travel to and from, and how."""

    path: Path
    descriptor: int
    rank: int
    direct: bool
    checksums: bool
    trace: Trace | None = None

    def error(self, lane: Lane, name: str, offset: int, said: str) -> TierError:
        """Return what to raise when bytes of the span `name` did not travel, and what the system `said`."""
        verb = "read from" if lane == "read" else "written to"
        return TierError(f"rank {self.rank}: {name} could not be {verb} {self.path} at byte {offset:,}: {said}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Stretch:
    """Bytes [start, stop) of `pages` and their place in a file."""

    pages: Pages
    start: int
    stop: int
    offset: int


class Job:
    """A stretch on its way to or from the disk, for the span `name`; `settle` is called in the thread that ends it.

    Errors add the parameters that `names` finds among elements of the stretch's pages.
    """

    def __init__(self, lane: Lane, name: str, stretch: Stretch, sums: list[int], settle: Callable[[Job], None], *,
                 block_bytes: int, names: Names = unnamed):
        self.lane: Lane = lane
        self.name = name
        self.stretch = stretch
        self.block_bytes = block_bytes
        self.blocks = range(-(-(stretch.stop - stretch.start) // block_bytes))
        self.error: TierError | None = None
        self._sums = sums
        self._settle = settle
        self._names = names
        self._left = len(self.blocks)
        self._counting = threading.Lock()
        self.done = False
        """Whether it has ended."""
        self._under_way = threading.Lock()  # no event: an interrupt of one that waits could leave that locked
        self._under_way.acquire()

    @property
    def bytes(self) -> int:
        return self.stretch.stop - self.stretch.start

    def wait(self) -> None:
        """Block until the job has ended, well or not."""
        with self._under_way:
            pass

    def carry(self, index: int, file: SwapFile) -> None:
        """Let one block travel; what goes wrong is the job's `error`."""
        if self.error is None:
            begin = time.perf_counter()
            first = index * self.block_bytes
            offset = self.stretch.offset + first
            view = self.stretch.pages.view(self.stretch.start + first,
                                           min(self.stretch.start + first + self.block_bytes, self.stretch.stop))
            try:
                self._read(index, view, offset, file) if self.lane == "read" else self._write(index, view, offset, file)
            except TierError as error:
                self.error = error
            except Exception as error:  # whatever it is, somebody waits for the job
                self.error = self.refused(file, offset, f"{type(error).__name__}: {error}")
            if file.trace is not None:
                file.trace.record(self.lane, self.name, begin, time.perf_counter(), bytes=len(view))
        self._count(1)

    def refused(self, file: SwapFile, offset: int, said: str) -> TierError:
        """Return what to raise when the block at `offset` did not travel, and what the system `said`."""
        first, width = self.stretch.start + offset - self.stretch.offset, self.stretch.pages.tensor.element_size()
        last = min(first + self.block_bytes, self.stretch.stop)
        names = self._names(range(first // width, -(-last // width)))
        more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
        held = f" (of {', '.join(map(repr, names[:SHOWN]))}{more})" if names else ""
        return file.error(self.lane, self.name + held, offset, said)

    def fail(self, error: TierError, blocks: int | None = None) -> None:
        """End `blocks` blocks (default: all) that nobody will carry."""
        self.error = self.error or error
        self._count(len(self.blocks) if blocks is None else blocks)

    def _count(self, ended: int) -> None:
        with self._counting:
            self._left -= ended
            last = self._left == 0
        if last:
            try:
                self._settle(self)
            finally:
                self.done = True
                self._under_way.release()

    def _read(self, index: int, view: memoryview, offset: int, file: SwapFile) -> None:
        try:
            count = _travelled(os.preadv, file, view, offset)
        except OSError as error:
            raise self.refused(file, offset, f"{error.strerror}; look at the disk (dmesg)") from error
        if count < len(view):
            raise self.refused(file, offset + count, "the file ends there: it was truncated. Let nothing else "
                             "touch the folder while training runs")
        if file.checksums and checksum(view) != self._sums[index]:
            raise self.refused(file, offset, f"these {len(view):,} bytes are not what was written: the file was "
                             f"changed on disk. Let nothing else touch the folder; check the disk")

    def _write(self, index: int, view: memoryview, offset: int, file: SwapFile) -> None:
        if file.checksums:
            self._sums[index] = checksum(view)
        try:
            count = _travelled(os.pwritev, file, view, offset)
            if not file.direct:  # the bytes are in memory already: the system's cache need not keep them too
                os.posix_fadvise(file.descriptor, offset, len(view), os.POSIX_FADV_DONTNEED)
        except OSError as error:
            raise self.refused(file, offset, refusal(error, len(view), file.path.parent)) from error
        if count < len(view):
            raise self.refused(file, offset + count, "the system takes no more; make room on the disk")


def _travelled(call: Callable[[int, Sequence[memoryview], int], int], file: SwapFile, view: memoryview, offset: int) -> int:
    """Call preadv or pwritev until all of `view` has travelled or nothing more does; return the bytes that did."""
    count = 0
    while count < len(view):
        moved = call(file.descriptor, [view[count:]], offset + count)
        if file.direct and count + moved < len(view):  # direct I/O goes on only where a block begins
            moved = moved // ALIGNMENT * ALIGNMENT
        if moved == 0:
            break
        count += moved
    return count


def refusal(error: OSError, needed: int, folder: Path) -> str:
    """Return what the system said when it took no bytes, and what helps."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return (f"{error.strerror}: needed {needed:,} bytes, {free_bytes(folder):,} are free; make room, or give another "
                f"folder in nvme_path")
    return f"{error.strerror}; look at the disk (dmesg), or give another folder in nvme_path"


class PendingJobs:
    """The transfer of several jobs, some of which may have failed before."""

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


class Threads:
    """Daemon threads that carry the blocks of one file."""

    def __init__(self, file: SwapFile, count: int):
        self._file = file
        self._count = count
        self._queues: dict[Lane, deque[tuple[Job, int]]] = {"read": deque(), "write": deque()}
        self._tokens: SimpleQueue[bool] = SimpleQueue()  # one for each block in a queue, or False: the end
        self._threads: list[threading.Thread] = []

    def submit(self, job: Job) -> None:
        """Let `job` travel."""
        enqueue, wake = self.prepare(job)
        try:
            enqueue()
        finally:
            wake()

    def prepare(self, job: Job) -> tuple[Callable[[], object], Callable[[], object]]:
        """Return what puts the blocks of `job` into the queue, and what then wakes the threads; no `stop` may fall between.

        Neither runs Python code: no interrupt falls into the one, or between what stands before it and its call.
        """
        if not self._threads:
            self._start()
        blocks = [(job, index) for index in job.blocks]
        tokens = map(self._tokens.put, repeat(True, len(blocks)))
        return partial(self._queues[job.lane].extend, blocks), partial(deque, tokens, 0)

    def stop(self) -> bool:
        """Take no more: fail what is queued and let what is under way end, the threads too; returns whether they did."""
        self._fail_queued()
        for _ in self._threads:
            self._tokens.put(False)
        until = time.monotonic() + _PATIENCE
        others = [thread for thread in self._threads if thread is not threading.current_thread()]
        for thread in others:
            thread.join(max(0.0, until - time.monotonic()))
        return not any(thread.is_alive() for thread in others)

    def _start(self) -> None:
        if self._file.checksums:
            checksum(memoryview(bytearray()))  # native code is built now, and not by all threads at once
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
                block[0].carry(block[1], self._file)
            del block  # a thread that waits keeps no job, and so no memory, alive

    def _next(self, order: Sequence[Lane]) -> tuple[Job, int] | None:
        """Take a block from the first queue that has one; None when they were emptied by the end."""
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
            job.fail(job.refused(self._file, job.stretch.offset, "the file was closed meanwhile"), 1)
