"""Memory that comes and goes in place, while every view of it stays as it is.

A whole buffer, of which one part rests in a tier, grows for its use and shrinks after it:

    paged     the part rests in host memory: the pages of the rest go back to the system, and come back at the first write;
              the part stays where it is, and is never copied
    beneath   the part rests on disk, beneath host memory: all pages come and go, those of the part with their bytes
    resized   accelerators, and buffers of a few pages: the storage is emptied, and the part rests in a span of its own
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from shoal.tier.device_mirror import Arrival
from shoal.tier.disk_span import DiskSpan
from shoal.tier.memory import pageable
from shoal.tier.pages import Pages
from shoal.tier.span import DONE, Names, ResidentSpan, Span, Transfer, behind, unnamed
from shoal.tier.store import Disk, Memory, Store
from shoal.tier.streams import CopyStream, up
from shoal.tier.sub_span import JoinedTransfers, SubSpan

__all__ = ["Elastic", "elastic"]


class Elastic(Protocol):
    """A whole buffer of which one part rests. At first it is grown, and holds zeros."""

    full: Tensor
    """The whole buffer; outside the part undefined until it is written after `grow`."""
    rest: Span
    """The part that rests."""
    within: bool
    """Whether that is a part of the buffer itself: what is written there, rests."""

    def grow(self) -> Transfer:
        """Make the whole buffer usable; once the transfer is over, its part holds what rests."""
        ...

    def shrink(self, *, lent: bool = False) -> None:
        """Give up the buffer, but for what rests; one that is `lent` to somebody stays in memory until it shrinks again."""
        ...

    def keep(self) -> None:
        """Let what stands in the part of the grown buffer rest."""
        ...

    def renew(self) -> None:
        """Bring what rests into the part of the grown buffer."""
        ...


class Paged:
    """Host memory whose pages outside the part come and go."""

    within = True

    def __init__(self, size: int, dtype: torch.dtype, part: range):
        self._pages = Pages(size, dtype)
        self.full = self._pages.tensor
        self.rest: Span = ResidentSpan(self.full[part.start:part.stop])
        width = dtype.itemsize
        self._outside = [range(part.start * width), range(part.stop * width, size * width)]

    def grow(self) -> Transfer:
        return DONE  # the first write brings the pages

    def shrink(self, *, lent: bool = False) -> None:
        for outside in self._outside if not lent else ():
            self._pages.drop(outside.start, outside.stop)

    def keep(self) -> None:
        pass  # it rests within the buffer

    def renew(self) -> None:
        pass


class DiskBuffer:
    """Host memory above a disk."""

    within = True

    def __init__(self, size: int, dtype: torch.dtype, part: range, disk: Disk, name: str, names: Names):
        self._memory = DiskSpan(disk.swap, size, dtype, name, part=part, chunk=disk.granule, names=names)
        self._part = part
        self._changed = False
        self._lent = False
        self.full = self._memory.tensor
        self.rest: Span = SubSpan(self._memory, part)
        self.grow().wait()

    def grow(self) -> Transfer:
        return JoinedTransfers([self._memory.fetch(self._part.start, self._part.stop), self._memory.edges()])

    def shrink(self, *, lent: bool = False) -> None:
        if lent and not self._lent:
            self._memory.fetch(self._part.start, self._part.stop)
        changed, self._changed = self._changed, False
        self._memory.commit(self._part.start, self._part.stop, changed=changed)
        if self._lent and not lent:
            self._memory.commit(self._part.start, self._part.stop, changed=False)
        if not lent:
            self._memory.drop_outside()
        self._lent = lent

    def keep(self) -> None:
        self._changed = True  # written when it shrinks

    def renew(self) -> None:
        pass


class Resized:
    """Memory whose storage is emptied, beside a span for the part.

    What rests on the host comes in a stream of its own. What rests on the device itself was written by its computing, or is
    about to be: it is copied within that, in memory that nothing else was given.
    """

    within = False

    def __init__(self, size: int, dtype: torch.dtype, part: range, device: torch.device, rest: Span):
        self.full = torch.zeros(size, dtype=dtype, device=device)
        self.rest = rest
        self._own = self.full[part.start:part.stop]
        self._stream = CopyStream() if rest.tensor.device == self.full.device else up(device)

    def grow(self) -> Transfer:
        storage = self.full.untyped_storage()
        if not storage.nbytes():
            with self._stream.open():
                storage.resize_(self.full.numel() * self.full.element_size())
        return Arrival(self.rest, self._own, self._stream, after_compute=False)

    def shrink(self, *, lent: bool = False) -> None:
        if not lent:
            self._stream.free(self.full, computed=True)

    def keep(self) -> None:
        self.rest.fetch(fresh=True).wait()
        self.rest.tensor.copy_(self._own)
        self.rest.commit()

    def renew(self) -> None:
        Arrival(self.rest, self._own, self._stream, after_compute=True).wait()


def elastic(size: int, dtype: torch.dtype, part: range, device: torch.device, store: Store, name: str,
            names: Names = unnamed) -> Elastic:
    """Return a buffer of `size` elements on `device`, zeros, whose `part` rests in `store`."""
    if isinstance(store, Disk) and device == store.device:
        return DiskBuffer(size, dtype, part, store, name, names)
    if isinstance(store, Memory) and device == store.device and pageable(size, dtype, device):
        return Paged(size, dtype, part)
    return Resized(size, dtype, part, device, store.place(len(part), dtype, name, names=behind(names, part.start)))
