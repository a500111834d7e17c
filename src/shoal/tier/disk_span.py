"""A span that rests in a swap file: fetch reads its pages from the file, commit writes and releases them, in place.

The span is cut into chunks, each of which is in one of three states:

    absent    the file holds it; or it was never written, reads as zeros, and needs no read
    present   memory holds it: it was fetched, and not yet committed as often
    leaving   it was committed and is being written; a fetch makes it present again

A failed read leaves the chunk absent, and the next fetch tries again. A failed write leaves it present.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from shoal.errors import TierError
from shoal.tier.extents import Extent
from shoal.tier.pages import PAGE, Pages, whole_pages
from shoal.tier.span import DONE, Names, Transfer, no_names
from shoal.tier.swap import Swap
from shoal.tier.transfer import Job, Lane, MappedExtent, PendingJobs

__all__ = ["CHUNK", "DiskSpan"]

CHUNK = 1 << 20
"""Elements of a chunk, the unit of reads, writes and releases."""


@dataclass(slots=True, kw_only=True, eq=False)
class _Chunk:
    """The state of a chunk; `Swap.lock` guards it."""

    extent: MappedExtent
    """Its bytes in memory and in the file."""
    checksums: list[int]
    """The checksum of each block in the file."""
    written: bool = False
    """Whether the file holds it; else it is zeros."""
    pins: int = 0
    """Fetches that are not yet committed."""
    present: bool = False
    dirty: bool = False
    """Memory is newer than the file, and no job is in flight: a job clears the flag when it starts."""
    job: Job | None = None
    """The read or write in flight."""
    error: TierError | None = None
    """The error of the last job."""


class DiskSpan:
    """`size` elements of `dtype`, zeros at first, of which `part` (default: all) has an extent in the file of `swap`.

    Pages at the edges of `part` are read and written as a whole. Errors contain `name` and the parameters that `names`
    returns. Raises `TierError` when the disk is full.
    """

    def __init__(self, swap: Swap, size: int, dtype: torch.dtype, name: str, *, part: range | None = None,
                 chunk: int = CHUNK, names: Names = no_names):
        assert chunk > 0
        self.part = range(size) if part is None else part
        self._swap, self._name, self._names, self._width = swap, name, names, dtype.itemsize
        whole = range(self.part.start * self._width // PAGE * PAGE, whole_pages(self.part.stop * self._width))
        self._bytes = whole = whole if self.part else range(0)  # `part` in bytes, extended to whole pages
        self._pages = Pages(size, dtype, aligned=whole.start)
        self.tensor = self._pages.tensor
        self._chunk_bytes = whole_pages(chunk * self._width)
        extent = self._swap.allocate(len(whole), self._name)
        self._chunks = [self._chunk(extent, start) for start in whole[::self._chunk_bytes]]

    def _chunk(self, extent: Extent, start: int) -> _Chunk:
        stop = min(self._bytes.stop, start + self._chunk_bytes)
        blocks = -(-(stop - start) // self._swap.block_bytes)
        mapped = MappedExtent(pages=self._pages, start=start, stop=stop, offset=extent.offset + start - self._bytes.start)
        return _Chunk(extent=mapped, checksums=[0] * blocks)

    def fetch(self, start: int = 0, stop: int | None = None, *, fresh: bool = False) -> Transfer:
        self._swap.check_owner(self._name)
        wanted = self._stored(start, stop)
        arriving: list[Job] = []
        failed: list[TierError] = []
        for chunk in self._chunks_over(wanted):
            job, error = self._bring(chunk, overwritten=fresh and self._is_within(chunk, wanted))
            if job is not None:
                arriving.append(job)
            elif error is not None:
                failed.append(error)
        return PendingJobs(arriving, failed) if arriving or failed else DONE

    def deliver(self, receive: Callable[[range], None]) -> Transfer:
        """Call `receive` with the elements of each chunk once memory holds them, for as long as the call takes.

        The thread that has read a chunk calls it; this one does for chunks that are in memory. The transfer ends with the
        last call. `receive` raises nothing.
        """
        self._swap.check_owner(self._name)
        arriving: list[Job] = []
        failed: list[TierError] = []
        for chunk in self._chunks:
            job, error = self._bring(chunk, overwritten=False)
            if job is not None:
                arriving.append(job)
                job.then(partial(self._hand_over, chunk, job, receive))
            else:
                failed += [] if error is None else [error]
                self._hand_over(chunk, None, receive)
        return PendingJobs(arriving, failed)

    def _hand_over(self, chunk: _Chunk, job: Job | None, receive: Callable[[range], None]) -> None:
        """Give `receive` a chunk that `job` has read, unless it failed, and end the fetch."""
        if (chunk.error if job is None else job.error) is None:
            receive(self._stored(chunk.extent.start // self._width, chunk.extent.stop // self._width))
        self._unpin(chunk, changed=False)

    def _bring(self, chunk: _Chunk, *, overwritten: bool) -> tuple[Job | None, TierError | None]:
        """Fetch a chunk; return the read that brings it, or the error of one that could not start or of an earlier write."""
        self._pin(chunk)
        with self._swap.lock:
            if not chunk.present:
                chunk.error = None
                self._provide_pages(chunk, zeros=not (chunk.written or overwritten))
                if chunk.written and not overwritten:
                    self._start("read", chunk)
                else:
                    chunk.present = True
            job = chunk.job if chunk.job is not None and chunk.job.lane == "read" else None
            return job, chunk.error if job is None else None

    def _provide_pages(self, chunk: _Chunk, *, zeros: bool) -> None:
        """Provide pages for a chunk: zeros, or pages with undefined contents."""
        if zeros:
            self._swap.page_pool.drop(self._pages, chunk.extent.start, chunk.extent.stop)
        else:
            self._swap.page_pool.take(self._pages, chunk.extent.start, chunk.extent.stop)

    def _release_pages(self, chunk: _Chunk) -> None:
        """Give the pages of an unused chunk to the pool."""
        self._swap.page_pool.give(self._pages, chunk.extent.start, chunk.extent.stop)

    def _pin(self, chunk: _Chunk) -> None:
        """Keep a chunk in memory; if its pages are being released, wait until they are."""
        with self._swap.lock:
            chunk.pins += 1
            releasing = None if chunk.present else chunk.job
        if releasing is not None:
            releasing.wait()

    def commit(self, start: int = 0, stop: int | None = None, *, changed: bool = True) -> Transfer:
        self._swap.check_owner(self._name)
        leaving: list[Job] = []
        failed: list[TierError] = []
        for chunk in self._chunks_over(self._stored(start, stop)):
            if (job := self._unpin(chunk, changed)) is not None:
                leaving.append(job)
            elif chunk.error is not None:
                failed.append(chunk.error)
        return PendingJobs(leaving, failed) if leaving or failed else DONE

    def _unpin(self, chunk: _Chunk, changed: bool) -> Job | None:
        """End one fetch of a chunk; after the last one write it if it is dirty, else release it. Return the write."""
        if changed and (earlier := chunk.job) is not None:  # a write of older contents, or a read not waited for
            earlier.wait()
        with self._swap.lock:
            assert chunk.pins > 0, f"{self._name}: committed without having been fetched"
            chunk.pins -= 1
            chunk.dirty |= changed and chunk.present
            if chunk.dirty:
                self._wait_for_room(chunk)
            if chunk.pins or chunk.job is not None:  # the job releases the chunk when it ends
                return chunk.job if chunk.job is not None and chunk.job.lane == "write" else None
            if not chunk.dirty:
                chunk.present = False
                self._release_pages(chunk)
                return None
            return self._start("write", chunk)

    def _wait_for_room(self, chunk: _Chunk) -> None:
        """Block until the write-ahead limit admits the chunk, or it is fetched again; the caller holds the lock."""
        bytes = chunk.extent.stop - chunk.extent.start
        self._swap.write_ended.wait_for(lambda: chunk.pins > 0 or chunk.job is not None or self._swap.has_room(bytes))

    def _start(self, lane: Lane, chunk: _Chunk) -> Job:
        """Read or write a chunk; the caller holds the lock. An interrupt cannot leave a visible job that never runs."""
        job = Job(lane, self._name, chunk.extent, chunk.checksums, partial(self._finish, chunk),
                  block_bytes=self._swap.block_bytes, names=lambda at: self._names(self._stored(at.start, at.stop)))
        enqueue, wake = self._swap.prepare(job)
        try:
            chunk.dirty, chunk.job, chunk.present = False, job, True
            enqueue()
        finally:
            wake()
        return job

    def _finish(self, chunk: _Chunk, job: Job) -> None:
        """Record the result of a job of `chunk`, and release an unused chunk; called in the thread that ended the job."""
        with self._swap.lock:
            chunk.error = job.error
            if job.lane == "read":
                chunk.present = job.error is None
            else:
                chunk.dirty |= job.error is not None
                chunk.written |= job.error is None
            self._swap.record_completion(job)
            if chunk.pins or chunk.dirty:
                chunk.job = None
                return
            chunk.present = False  # a fetch now waits for the end of this job
        self._release_pages(chunk)
        chunk.job = None

    def discard(self) -> None:
        for chunk in self._chunks:
            self._reset(chunk)

    def _reset(self, chunk: _Chunk) -> None:
        """Wait for the job of a chunk, then make the chunk zeros."""
        assert not chunk.pins, f"{self._name}: discarded while it is fetched"
        if (job := chunk.job) is not None:
            job.wait()
        if chunk.present:  # its write failed
            self._release_pages(chunk)
        chunk.present = chunk.dirty = chunk.written = False
        chunk.error = None

    def edges(self) -> Transfer:
        """Return the transfers of the edge pages, which include elements outside `part`: wait before writing to those."""
        if len(self.part) == self.tensor.numel():
            return DONE
        jobs = [chunk.job for chunk in (*self._chunks[:1], *self._chunks[-1:])]
        return PendingJobs([job for job in jobs if job is not None])

    def drop_outside(self) -> None:
        """Release the pages that hold no element of `part`."""
        self._pages.drop(0, self._bytes.start)
        self._pages.drop(self._bytes.stop, self._pages.bytes)

    def close(self) -> None:
        for chunk in self._chunks:
            if (job := chunk.job) is not None:
                job.wait()
            self._swap.page_pool.drop(self._pages, chunk.extent.start, chunk.extent.stop)
        chunks, self._chunks = self._chunks, []
        self._swap.free([_file_extent(chunk.extent) for chunk in chunks])

    def _stored(self, start: int, stop: int | None) -> range:
        """Return the elements of [start, stop) that lie in `part`."""
        stop = self.part.stop if stop is None else min(stop, self.part.stop)
        return range(max(start, self.part.start), stop)

    def _chunks_over(self, wanted: range) -> list[_Chunk]:
        """Return the chunks that contain any of the elements `wanted`."""
        if not wanted:
            return []
        first, last = (at * self._width - self._bytes.start for at in (wanted.start, wanted.stop))
        return self._chunks[first // self._chunk_bytes:-(-last // self._chunk_bytes)]

    def _is_within(self, chunk: _Chunk, wanted: range) -> bool:
        """Whether all elements of the chunk, apart from those outside `part`, are among `wanted`."""
        start = max(chunk.extent.start, self.part.start * self._width)
        stop = min(chunk.extent.stop, self.part.stop * self._width)
        return wanted.start * self._width <= start and stop <= wanted.stop * self._width


def _file_extent(mapped: MappedExtent) -> Extent:
    return Extent(mapped.offset, mapped.stop - mapped.start)
