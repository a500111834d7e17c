"""Flat memory: buffers that shrink to one span and grow again in place, and a pool of what collectives borrow.

Parameters are views of their unit's buffer. Shrinking and growing leaves every view, and every tensor that autograd
saved, as it is: they only lose the memory outside this rank's span meanwhile. There are two ways to do that:

    paged     host memory: the pages of the other spans go back to the system, and come back at the first write; this
              rank's span stays where it is, and is never copied
    resized   accelerators, and buffers of a few pages: the storage is emptied, and the span rests in a buffer of its own
"""

from __future__ import annotations

import ctypes
import mmap
from contextlib import suppress
from typing import Protocol

import torch
from torch import Tensor

PAGED_FROM = 1 << 20
"""Bytes from which host memory is paged: below, whole pages hardly fit between the spans."""


class Elastic(Protocol):
    """A whole buffer of which one span is always there."""

    full: Tensor
    """The whole buffer; outside the span undefined until it is written after `grow`."""
    rest: Tensor
    """The span, which rests."""

    def grow(self) -> None:
        """Make the whole buffer usable; its span holds what rests."""
        ...

    def shrink(self) -> None:
        """Give up what is outside the span."""
        ...


class Paged:
    """Host memory whose pages outside the span come and go."""

    def __init__(self, size: int, dtype: torch.dtype, span: range):
        self.full, self._pages = _mapped(size, dtype)
        self.rest = self.full[span.start:span.stop]
        page, width = mmap.PAGESIZE, dtype.itemsize
        before = range(span.start * width // page * page)
        after = range(-(-span.stop * width // page) * page, len(self._pages))
        self._outside = [part for part in (before, after) if part]

    def grow(self) -> None:
        pass  # the first write brings the pages

    def shrink(self) -> None:
        for part in self._outside:
            self._pages.madvise(mmap.MADV_DONTNEED, part.start, len(part))


class Resized:
    """Memory whose storage is emptied, beside a copy of the span."""

    def __init__(self, size: int, dtype: torch.dtype, span: range, device: torch.device):
        self.full = torch.zeros(size, dtype=dtype, device=device)
        self.rest = torch.zeros(len(span), dtype=dtype, device=device)
        self._own = self.full[span.start:span.stop]

    def grow(self) -> None:
        self.full.untyped_storage().resize_(self.full.numel() * self.full.element_size())
        self._own.copy_(self.rest)

    def shrink(self) -> None:
        self.full.untyped_storage().resize_(0)


def elastic(size: int, dtype: torch.dtype, span: range, device: torch.device) -> Elastic:
    """Return a buffer of `size` elements, zeros, that shrinks to `span`."""
    if _pageable(size, dtype, device):
        return Paged(size, dtype, span)
    return Resized(size, dtype, span, device)


def zeros(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a 1-D tensor of zeros; on the host, in large pages where the system has them."""
    if _pageable(size, dtype, device):
        return _mapped(size, dtype)[0]
    return torch.zeros(size, dtype=dtype, device=device)


def trim() -> None:
    """Give what was freed back to the system: glibc keeps freed tensors of up to 32 MiB in its heap, with holes between."""
    if (malloc_trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:  # other C libraries have none
        malloc_trim(0)


def _pageable(size: int, dtype: torch.dtype, device: torch.device) -> bool:
    return device.type == "cpu" and size * dtype.itemsize >= PAGED_FROM and hasattr(mmap, "MADV_HUGEPAGE")  # Linux


def _mapped(size: int, dtype: torch.dtype) -> tuple[Tensor, mmap.mmap]:
    """Return private anonymous memory as a tensor of zeros, and its pages."""
    pages = mmap.mmap(-1, _whole_pages(size * dtype.itemsize), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel without large pages
        pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=dtype, count=size), pages


def _whole_pages(size: int) -> int:
    return -(-size // mmap.PAGESIZE) * mmap.PAGESIZE


class Pool:
    """Lends flat tensors of any dtype, and keeps what comes back: the memory is that of the most lent at once."""

    def __init__(self, device: torch.device):
        self.device = device
        self._free: list[Tensor] = []
        self._lent: dict[int, Tensor] = {}

    def borrow(self, elements: int, dtype: torch.dtype) -> Tensor:
        """Return an undefined 1-D tensor of `elements` of `dtype`."""
        size = max(1, elements * dtype.itemsize)
        fitting = [block for block in self._free if block.numel() >= size]
        if fitting:
            block = min(fitting, key=lambda block: block.numel())
            self._free = [other for other in self._free if other is not block]
        else:
            if self._free:  # replace the largest block instead of keeping one that never fits
                largest = max(self._free, key=lambda block: block.numel())
                self._free = [other for other in self._free if other is not largest]
            block = zeros(size, torch.uint8, self.device)
        tensor = block[:elements * dtype.itemsize].view(dtype)
        self._lent[id(tensor)] = block
        return tensor

    def give_back(self, tensor: Tensor) -> None:
        """Take back a tensor that this pool lent."""
        self._free.append(self._lent.pop(id(tensor)))

    @property
    def bytes(self) -> int:
        """Bytes that the pool holds, lent or not."""
        return sum(block.numel() for block in [*self._free, *self._lent.values()])
