"""A full buffer of which one shard rests in a store: it grows for use and shrinks after it, and its tensors stay valid.

    PagedBuffer    the shard rests in host memory: shrinking returns the pages outside the shard to the system, which come
                   back at the next write; the shard stays in place and is never copied
    WholeBuffer    the shard is all of the buffer, and rests on the device: nothing grows, shrinks or is copied
    DiskBuffer     the shard rests on disk: all pages are released and populated again, those of the shard from the file
    ResizedBuffer  on accelerators, and for buffers of a few pages: shrinking frees the storage; the shard has its own span
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from shoal.device import record_use, stream_of_thread
from shoal.tier.device_mirror import CopiesEnded, CopyTransfer, ResidentCopy, copy_to_device
from shoal.tier.disk_span import DiskSpan
from shoal.tier.pages import Pages, pageable
from shoal.tier.span import DONE, JoinedTransfers, Names, ResidentSpan, Span, SubSpan, Transfer, no_names, offset_names
from shoal.tier.store import Disk, Memory, Store
from shoal.tier.streams import CopyStream, allocate, free

__all__ = ["Elastic", "elastic"]


class Elastic(Protocol):
    """A full buffer with one resting shard. It starts grown, and holds zeros."""

    full: Tensor
    """The full buffer; outside the shard it is undefined from `grow` until it is written."""
    shard: Span
    """The part that rests in the store."""
    shard_in_full: bool
    """Whether the shard is a part of `full`, so that writes to `full` reach it."""
    own: Tensor | None
    """The shard's memory, where `grow` leaves the shard's part of `full` to the gather that reads it; None elsewhere."""

    def grow(self) -> Transfer:
        """Allocate the full buffer; when the transfer is done, it holds the shard's contents, unless `own` does."""
        ...

    def shrink(self, *, retain: bool = False) -> None:
        """Release the memory outside the shard; with `retain` it stays until a later `shrink` without."""
        ...

    def use(self) -> None:
        """Keep the buffer, when it is freed, until all that the current stream was given by then is done."""
        ...

    def save_shard(self) -> None:
        """Copy the shard's part of the grown buffer to the shard."""
        ...

    def load_shard(self) -> None:
        """Copy the shard to its part of the grown buffer."""
        ...


class PagedBuffer:
    """Host memory that returns its pages outside the shard."""

    shard_in_full = True
    own: Tensor | None = None

    def __init__(self, size: int, dtype: torch.dtype, part: range):
        self._pages = Pages(size, dtype)
        self.full = self._pages.tensor
        self.shard: Span = ResidentSpan(self.full[part.start:part.stop])
        width = dtype.itemsize
        self._outside = [range(part.start * width), range(part.stop * width, size * width)]

    def grow(self) -> Transfer:
        return DONE  # the first write brings the pages

    def shrink(self, *, retain: bool = False) -> None:
        for outside in self._outside if not retain else ():
            self._pages.drop(outside.start, outside.stop)

    def use(self) -> None:
        pass  # host memory belongs to no stream

    def save_shard(self) -> None:
        pass  # the shard is a part of the buffer

    def load_shard(self) -> None:
        pass


class WholeBuffer:
    """Memory of a device that is its own shard: one rank has all weights."""

    shard_in_full = True
    own: Tensor | None = None

    def __init__(self, size: int, dtype: torch.dtype, device: torch.device):
        self.full = torch.zeros(size, dtype=dtype, device=device)
        self.shard: Span = ResidentSpan(self.full)

    def grow(self) -> Transfer:
        return DONE

    def shrink(self, *, retain: bool = False) -> None:
        pass

    def use(self) -> None:
        pass  # it stays in memory

    def save_shard(self) -> None:
        pass  # the shard is the buffer

    def load_shard(self) -> None:
        pass


class DiskBuffer:
    """Host memory whose shard rests on disk."""

    shard_in_full = True
    own: Tensor | None = None

    def __init__(self, size: int, dtype: torch.dtype, part: range, disk: Disk, name: str, names: Names):
        self._memory = DiskSpan(disk.swap, size, dtype, name, part=part, chunk=disk.granule, names=names)
        self._part = part
        self._changed = False
        self._retained = False
        self.full = self._memory.tensor
        self.shard: Span = SubSpan(self._memory, part)
        self.grow().wait()

    def grow(self) -> Transfer:
        return JoinedTransfers([self._memory.fetch(self._part.start, self._part.stop), self._memory.edges()])

    def shrink(self, *, retain: bool = False) -> None:
        if retain and not self._retained:
            self._memory.fetch(self._part.start, self._part.stop)
        changed, self._changed = self._changed, False
        self._memory.commit(self._part.start, self._part.stop, changed=changed)
        if self._retained and not retain:
            self._memory.commit(self._part.start, self._part.stop, changed=False)
        if not retain:
            self._memory.drop_outside()
        self._retained = retain

    def use(self) -> None:
        pass  # host memory belongs to no stream

    def save_shard(self) -> None:
        self._changed = True  # `shrink` writes it

    def load_shard(self) -> None:
        pass


class _LastCopy:
    """The last copy of a resting shard to a device."""

    def __init__(self) -> None:
        self._copy: CopyTransfer | None = None

    def set(self, copy: CopyTransfer) -> CopyTransfer:
        self._copy = copy
        return copy

    def finish(self) -> None:
        """Wait until the copy has read the shard."""
        if self._copy is not None:
            self._copy.finish()


class CopiedSpan(ResidentSpan):
    """Host memory that is copied to a device: a fetch, after which the host may write, waits for the last copy of it."""

    def __init__(self, tensor: Tensor, last: _LastCopy):
        super().__init__(tensor)
        self._last = last

    def fetch(self, start: int = 0, stop: int | None = None, *, fresh: bool = False) -> Transfer:
        return CopiesEnded(self._last.finish)

    def part(self, part: range) -> ResidentSpan:
        return CopiedSpan(self.tensor[part.start:part.stop], self._last)


class ResizedBuffer:
    """Memory whose storage is freed, beside a span for the shard.

    The compute stream owns the memory: what it frees is at once another unit's, however far the host runs ahead of the
    device. Where a script computes in several streams, the owner is the one that allocated the memory, which the `use` of
    another keeps until that has done its work too. A shard on the host is copied in a stream of its own, which waits for the
    allocation. A shard on the device is written by the compute stream, and `load_shard` copies it there; a gather over ranks
    reads it where it rests.
    """

    shard_in_full = False

    def __init__(self, size: int, dtype: torch.dtype, part: range, device: torch.device, shard: Span):
        self.full = torch.zeros(size, dtype=dtype, device=device)
        self._owner = stream_of_thread(device)
        self._source, self._last = shard, _LastCopy()
        self._is_apart = shard.tensor.device != self.full.device
        copied = isinstance(shard, ResidentSpan) and self._is_apart
        self.shard: Span = CopiedSpan(shard.tensor, self._last) if copied else shard
        self.own: Tensor | None = None if self._is_apart or len(part) == size else shard.tensor
        self._part = self.full[part.start:part.stop]
        self._device = device

    def grow(self) -> Transfer:
        if allocate(self.full):
            self._owner = stream_of_thread(self._device)
        return DONE if self.own is not None else self._copy()

    def shrink(self, *, retain: bool = False) -> None:
        if not retain:
            free(self.full)

    def use(self) -> None:
        if stream_of_thread(self._device) != self._owner:
            record_use(self.full)

    def save_shard(self) -> None:
        self.shard.fetch(fresh=True).wait()
        self.shard.tensor.copy_(self._part)
        self.shard.commit()

    def load_shard(self) -> None:
        self._copy().wait()

    def _copy(self) -> CopyTransfer:
        if not self._is_apart:
            return ResidentCopy(self._source.tensor, self._part, CopyStream())
        return self._last.set(copy_to_device(self._source, self._part, self._device))


def elastic(size: int, dtype: torch.dtype, part: range, device: torch.device, store: Store, name: str,
            names: Names = no_names) -> Elastic:
    """Return a buffer of `size` zeros on `device`, whose shard `part` rests in `store`."""
    if isinstance(store, Disk) and device == store.device:
        return DiskBuffer(size, dtype, part, store, name, names)
    if isinstance(store, Memory) and device == store.device and pageable(size, dtype, device):
        return PagedBuffer(size, dtype, part)
    if isinstance(store, Memory) and device == store.device and len(part) == size:
        return WholeBuffer(size, dtype, device)
    shard = store.place(len(part), dtype, name, names=offset_names(names, part.start))
    return ResizedBuffer(size, dtype, part, device, shard)
