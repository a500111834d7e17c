"""A span that rests in a swap file. Its memory keeps its address; its pages come with the bytes of the file, and go.

The span is cut into chunks, and a chunk is all or nothing:

    absent    the file holds it, or nobody wrote it yet: then it is zeros, and nothing is read
    present   memory holds it: it was fetched, and not yet committed as often
    leaving   it was committed and is being written; if it is fetched now it stays

A read that fails leaves the chunk absent, and the next fetch tries again. A write that fails leaves it present.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch

from shoal.errors import TierError
from shoal.tier.extents import Extent
from shoal.tier.pages import PAGE, Pages, whole_pages
from shoal.tier.span import DONE, Names, Transfer, unnamed
from shoal.tier.swap import Swap
from shoal.tier.transfer import Job, Lane, PendingJobs, Stretch

__all__ = ["CHUNK", "DiskSpan"]

CHUNK = 1 << 20
"""Elements of a chunk: what is read, written and dropped as one."""


@dataclass(slots=True, kw_only=True, eq=False)
class _Chunk:
    """Bytes that come and go together, where they are, and who needs them."""

    stretch: Stretch
    """Where it is in memory and in the file."""
    sums: list[int]
    """The checksum of each block in the file."""
    written: bool = False
    """Whether the file holds it; else it is zeros."""
    pins: int = 0
    present: bool = False
    dirty: bool = False
    """Memory holds what the file does not. No job is under way then: it begins by taking the mark away."""
    job: Job | None = None
    error: TierError | None = None
    """Why the last job failed."""


class DiskSpan:
    """`size` elements of `dtype`, zeros at first, of which `part` (default: all) has a place in the file of `swap`.

    Pages at the edges of `part` come and go with it, whole. Errors call the span `name`, and parameters within it as `names`
    does. Raises `TierError` when the disk is full.
    """

    def __init__(self, swap: Swap, size: int, dtype: torch.dtype, name: str, *, part: range | None = None,
                 chunk: int = CHUNK, names: Names = unnamed):
        assert chunk > 0
        self.part = range(size) if part is None else part
        self._swap, self._name, self._names, self._width = swap, name, names, dtype.itemsize
        hull = range(self.part.start * self._width // PAGE * PAGE, whole_pages(self.part.stop * self._width))
        self._hull = hull = hull if self.part else range(0)
        self._pages = Pages(size, dtype, aligned=hull.start)
        self.tensor = self._pages.tensor
        self._chunk_bytes = whole_pages(chunk * self._width)
        extent = self._swap.allocate(len(hull), self._name)
        self._chunks = [self._chunk(extent, start) for start in hull[::self._chunk_bytes]]

    def _chunk(self, extent: Extent, start: int) -> _Chunk:
        stop = min(self._hull.stop, start + self._chunk_bytes)
        blocks = -(-(stop - start) // self._swap.block_bytes)
        return _Chunk(sums=[0] * blocks, stretch=Stretch(pages=self._pages, start=start, stop=stop,
                                                         offset=extent.offset + start - self._hull.start))

    def fetch(self, start: int = 0, stop: int | None = None, *, fresh: bool = False) -> Transfer:
        self._swap.check_owner(self._name)
        wanted = self._wanted(start, stop)
        arriving: list[Job] = []
        failed: list[TierError] = []
        for chunk in self._over(wanted):
            self._pin(chunk)
            with self._swap.lock:
                if not chunk.present:
                    chunk.error = None
                    overwritten = fresh and self._is_within(chunk, wanted)
                    self._populate(chunk, zeros=not (chunk.written or overwritten))
                    if chunk.written and not overwritten:
                        self._send("read", chunk)
                    else:
                        chunk.present = True
                if chunk.job is not None and chunk.job.lane == "read":
                    arriving.append(chunk.job)
                elif chunk.error is not None:
                    failed.append(chunk.error)
        return PendingJobs(arriving, failed) if arriving or failed else DONE

    def _populate(self, chunk: _Chunk, *, zeros: bool) -> None:
        """Have memory for a chunk: zeros, or whatever pages are there already."""
        if zeros:
            self._swap.spare.forget(self._pages, chunk.stretch.start, chunk.stretch.stop)
        else:
            self._swap.spare.lend(self._pages, chunk.stretch.start, chunk.stretch.stop)

    def _drop(self, chunk: _Chunk) -> None:
        """Give up the memory of a chunk that nobody needs."""
        self._swap.spare.keep(self._pages, chunk.stretch.start, chunk.stretch.stop)

    def _pin(self, chunk: _Chunk) -> None:
        """Keep a chunk from being dropped; if that has begun, wait until it is over."""
        with self._swap.lock:
            chunk.pins += 1
            dropping = None if chunk.present else chunk.job
        if dropping is not None:
            dropping.wait()

    def commit(self, start: int = 0, stop: int | None = None, *, changed: bool = True) -> Transfer:
        self._swap.check_owner(self._name)
        leaving: list[Job] = []
        failed: list[TierError] = []
        for chunk in self._over(self._wanted(start, stop)):
            if (job := self._unpin(chunk, changed)) is not None:
                leaving.append(job)
            elif chunk.error is not None:
                failed.append(chunk.error)
        return PendingJobs(leaving, failed) if leaving or failed else DONE

    def _unpin(self, chunk: _Chunk, changed: bool) -> Job | None:
        """Let a chunk go that nobody else needs; return the write that this waits for."""
        if changed and (earlier := chunk.job) is not None:  # a write of older contents, or a read that nobody waited for
            earlier.wait()
        with self._swap.lock:
            assert chunk.pins > 0, f"{self._name}: committed without having been fetched"
            chunk.pins -= 1
            chunk.dirty |= changed and chunk.present
            if chunk.dirty:
                self._await_room(chunk)
            if chunk.pins or chunk.job is not None:  # the job drops the chunk when it ends
                return chunk.job if chunk.job is not None and chunk.job.lane == "write" else None
            if not chunk.dirty:
                chunk.present = False
                self._drop(chunk)
                return None
            return self._send("write", chunk)  # from here on a fetch knows that it leaves

    def _await_room(self, chunk: _Chunk) -> None:
        """Wait until a chunk may be on its way to the disk, or somebody has it in use; the caller holds the lock."""
        bytes = chunk.stretch.stop - chunk.stretch.start
        self._swap.changed.wait_for(lambda: chunk.pins > 0 or chunk.job is not None or self._swap.has_room(bytes))

    def _send(self, lane: Lane, chunk: _Chunk) -> Job:
        """Let a chunk travel; the caller holds the lock. What others can wait for is carried, whatever interrupts this."""
        job = Job(lane, self._name, chunk.stretch, chunk.sums, partial(self._settle, chunk),
                  block_bytes=self._swap.block_bytes, names=lambda at: self._names(self._wanted(at.start, at.stop)))
        travels, wake = self._swap.prepare(job)
        writing = job.bytes if lane == "write" else 0
        try:
            self._swap.writing_bytes += writing
            chunk.dirty, chunk.job, chunk.present = False, job, True
            travels()
        finally:
            wake()
        return job

    def _settle(self, chunk: _Chunk, job: Job) -> None:
        """Note how a job of `chunk` ended, and drop what nobody needs; called in the thread that ended it."""
        with self._swap.lock:
            chunk.error = job.error
            if job.lane == "read":
                chunk.present = job.error is None
            else:
                chunk.dirty |= job.error is not None
                chunk.written |= job.error is None
            self._swap.count(job)
            if chunk.pins or chunk.dirty:
                chunk.job = None
                return
            chunk.present = False  # a fetch from now on waits for the end of this job
        self._drop(chunk)
        chunk.job = None

    def discard(self) -> None:
        for chunk in self._chunks:
            self._forget(chunk)
            chunk.written = False

    def _forget(self, chunk: _Chunk) -> None:
        """Drop what memory holds of a chunk, once its job has ended."""
        assert not chunk.pins, f"{self._name}: forgotten while it is fetched"
        if (job := chunk.job) is not None:
            job.wait()
        if chunk.present:  # its write failed
            self._drop(chunk)
        chunk.present = chunk.dirty = False
        chunk.error = None

    def edges(self) -> Transfer:
        """Return what must be over before somebody writes just outside `part`: pages at its edges travel whole."""
        if len(self.part) == self.tensor.numel():
            return DONE
        jobs = [chunk.job for chunk in (*self._chunks[:1], *self._chunks[-1:])]
        return PendingJobs([job for job in jobs if job is not None])

    def drop_outside(self) -> None:
        """Give up the pages that hold nothing of `part`."""
        self._pages.drop(0, self._hull.start)
        self._pages.drop(self._hull.stop, self._pages.bytes)

    def close(self) -> None:
        for chunk in self._chunks:
            if (job := chunk.job) is not None:
                job.wait()
            self._swap.spare.forget(self._pages, chunk.stretch.start, chunk.stretch.stop)
        chunks, self._chunks = self._chunks, []
        self._swap.free([_extent(chunk.stretch) for chunk in chunks])

    def _wanted(self, start: int, stop: int | None) -> range:
        """Return the elements of [start, stop) that have a place on disk."""
        stop = self.part.stop if stop is None else min(stop, self.part.stop)
        return range(max(start, self.part.start), stop)

    def _over(self, wanted: range) -> list[_Chunk]:
        """Return the chunks that hold any of `wanted`."""
        if not wanted:
            return []
        first, last = (at * self._width - self._hull.start for at in (wanted.start, wanted.stop))
        return self._chunks[first // self._chunk_bytes:-(-last // self._chunk_bytes)]

    def _is_within(self, chunk: _Chunk, wanted: range) -> bool:
        """Whether all elements of the chunk are among `wanted`; those outside `part` do not count."""
        start = max(chunk.stretch.start, self.part.start * self._width)
        stop = min(chunk.stretch.stop, self.part.stop * self._width)
        return wanted.start * self._width <= start and stop <= wanted.stop * self._width


def _extent(stretch: Stretch) -> Extent:
    return Extent(stretch.offset, stretch.stop - stretch.start)
