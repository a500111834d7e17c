"""Host memory in pages of its own: tensors of zeros whose pages are returned to the system, moved, and reused.

    Pages       private, anonymous memory: a page costs nothing until it is written, its address never changes, and a dropped
                page reads as zeros again. It uses huge pages where the system has them: they come and go in larger units.
    PagePool    dropped pages that wait for their next use. Moving a page (mremap) is cheaper than clearing a new one, which
                takes more processor time than reading the same bytes from a disk.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from shoal.device import HOST, lock_pages, registers_pages

__all__ = ["HUGE", "PAGE", "PAGED_FROM", "PagePool", "Pages", "copy_bytes", "pageable", "pinned_zeros",
           "storage_use_count", "trim", "whole_pages", "zeros"]

PAGE = mmap.PAGESIZE
HUGE = 2 << 20
"""Bytes of a huge page, and of memory from which huge pages are requested."""
PAGED_FROM = 1 << 20
"""Bytes from which host memory gets pages of its own; smaller buffers are better on the heap."""

_NO_RESERVE = 0x4000  # MAP_NORESERVE, which mmap names from Python 3.13 on
_DONT_NEED, _DONT_FORK, _HUGE_PAGE, _NO_HUGE_PAGE = 4, 10, 14, 15
_REMAP = 1 | 2 | 4  # MREMAP_MAYMOVE, _FIXED, and _DONTUNMAP: the source range stays mapped
_KIND = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE
_FIXED = 0x10


class _Mapping(mmap.mmap):
    """A mapping that its last user unlocks, if its pages are locked, before it ends."""

    unlock: Callable[[], object] | None = None

    def __del__(self) -> None:
        if self.unlock is not None:
            self.unlock()


class Pages:
    """Memory of `size` elements of `dtype`; a huge page begins at byte `aligned`, a multiple of PAGE."""

    def __init__(self, size: int, dtype: torch.dtype, *, aligned: int = 0):
        assert aligned % PAGE == 0, aligned
        self.bytes = whole_pages(size * dtype.itemsize)
        huge = self.bytes >= HUGE
        self._huge = huge
        self._map = _Mapping(-1, max(PAGE, self.bytes) + huge * HUGE, flags=_KIND)
        base = torch.frombuffer(self._map, dtype=torch.uint8).data_ptr()
        self._lead = -(base + aligned) % HUGE if huge else 0
        self.address = base + self._lead
        self.tensor = torch.frombuffer(self._map, dtype=dtype, count=size, offset=self._lead) if size else torch.empty(
            0, dtype=dtype, device="cpu")
        if huge:
            self._request_huge_pages()

    def _request_huge_pages(self) -> None:
        """Request huge pages up to the end; one that reached beyond it could never be dropped as a whole."""
        with suppress(OSError):  # a kernel without huge pages
            _advise(self.address, self.bytes, _HUGE_PAGE)
            _advise(self.address + self.bytes, HUGE - self._lead, _NO_HUGE_PAGE)

    def lock(self) -> None:
        """Page-lock the memory for copies to and from a device, for as long as it is used.

        Forked processes, such as workers of a loader, do not have it: the system would copy locked pages for each at once.
        """
        if self.bytes:
            self._map.unlock = lock_pages(self.address, self.bytes)
            with suppress(OSError):  # a system that cannot leave pages out
                _advise(self.address, self.bytes, _DONT_FORK)

    def view(self, start: int, stop: int) -> memoryview:
        """Return bytes [start, stop)."""
        return memoryview(self._map)[self._lead + start:self._lead + stop]

    def move(self, start: int, size: int, target: Pages, at: int) -> bool:
        """Move the pages of bytes [start, start + size) to byte `at` of `target`, whose own pages there are dropped.

        All arguments are multiples of `PAGE`. The source reads as zeros afterwards. Returns False, with nothing moved, if
        the system cannot.
        """
        source, destination = self.address + start, target.address + at
        library = _library(keep_gil=True)
        if library.mremap(source, size, size, _REMAP, destination) != destination:
            return False
        # The kernel accounts the source range as a mapping of its own. A fresh mapping merges with its neighbours, and the
        # number of mappings of a process is limited.
        library.mmap(source, size, mmap.PROT_READ | mmap.PROT_WRITE, _KIND | _FIXED, -1, 0)
        if self._huge:
            library.madvise(source, size, _HUGE_PAGE)  # fails on a kernel without huge pages
        return True

    def drop(self, start: int, stop: int) -> None:
        """Return the whole pages within bytes [start, stop) to the system."""
        start, stop = whole_pages(start), stop // PAGE * PAGE
        if start < stop:
            _advise(self.address + start, stop - start, _DONT_NEED)


def whole_pages(size: int) -> int:
    """Return `size` bytes rounded up to whole pages."""
    return -(-size // PAGE) * PAGE


def _advise(address: int, size: int, advice: int) -> None:
    """Call madvise without the GIL, which the method of `mmap` holds."""
    if _library().madvise(address, size, advice):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


@cache
def _library(*, keep_gil: bool = False) -> ctypes.CDLL:
    """Return the C library; its calls release the GIL, unless `keep_gil`, which suits calls that end sooner than that."""
    library = (ctypes.PyDLL if keep_gil else ctypes.CDLL)(None, use_errno=True)
    address, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    library.mremap.argtypes = (address, size, size, number, address)
    library.mmap.argtypes = (address, size, number, number, number, size)
    library.mremap.restype = library.mmap.restype = address
    library.madvise.argtypes = (address, size, number)
    return library


def zeros(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a 1-D tensor of zeros; on the host in pages of its own if it is large enough."""
    if pageable(size, dtype, device):
        return Pages(size, dtype).tensor
    return torch.zeros(size, dtype=dtype, device=device)


def pinned_zeros(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a 1-D tensor of zeros in host memory that is page-locked for copies to and from `device`.

    It takes the bytes that it has, and returns them when it is freed. Devices for which pages cannot be locked one by one
    have torch's own pinned memory.
    """
    if not (registers_pages(device) and pageable(size, dtype, HOST)):
        return torch.zeros(size, dtype=dtype, pin_memory=True, device="cpu")
    pages = Pages(size, dtype)
    pages.lock()
    return pages.tensor


def copy_bytes(source: Tensor, target: Tensor) -> None:
    """Copy contiguous host memory in this thread alone: torch would start a team of threads for each thread that copies."""
    assert source.nbytes == target.nbytes, (source.nbytes, target.nbytes)
    ctypes.memmove(target.data_ptr(), source.data_ptr(), source.nbytes)


def pageable(size: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether a buffer of `size` elements on `device` gets pages of its own."""
    return device.type == "cpu" and size * dtype.itemsize >= PAGED_FROM and hasattr(mmap, "MADV_HUGEPAGE")  # Linux


def storage_use_count(tensor: Tensor) -> int:
    """Return the use count of the storage of `tensor`: tensors and numpy arrays that share it; compare it with another."""
    return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)  # pyright: ignore[reportPrivateUsage]


def trim() -> None:
    """Return freed heap memory to the system: glibc keeps freed tensors of up to 32 MiB, with holes between them."""
    if (malloc_trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:  # glibc only
        malloc_trim(0)


_Kind = tuple[int, int]
"""The size of a range in bytes, and its offset within a huge page if it holds one: moves within a kind keep them whole."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _PageRange:
    """Bytes [start, stop) of `pages`."""

    pages: Pages
    start: int
    stop: int

    @property
    def bytes(self) -> int:
        return self.stop - self.start

    @property
    def address(self) -> int:
        return self.pages.address + self.start

    @property
    def kind(self) -> _Kind:
        return self.bytes, self.address % HUGE if self.bytes >= HUGE else 0

    def drop(self) -> None:
        self.pages.drop(self.start, self.stop)


class PagePool:
    """At most `limit` bytes of unused pages, which stay where they were, contents included, until they are taken."""

    def __init__(self, limit: int):
        self.bytes = 0
        self._limit = limit
        self._ranges: dict[int, _PageRange] = {}
        """By address, the oldest first."""
        self._by_kind: dict[_Kind, dict[int, _PageRange]] = {}
        """The same ranges by kind."""
        self._lock = threading.Lock()

    def give(self, pages: Pages, start: int, stop: int) -> None:
        """Add the unused bytes [start, stop); the oldest ranges are dropped to make room."""
        given = _PageRange(pages=pages, start=start, stop=stop)
        with self._lock:
            while self._ranges and self.bytes + given.bytes > self._limit:
                self._remove(next(iter(self._ranges.values()))).drop()
            if given.bytes > self._limit:
                given.drop()
                return
            self._ranges[given.address] = self._by_kind.setdefault(given.kind, {})[given.address] = given
            self.bytes += given.bytes

    def take(self, pages: Pages, start: int, stop: int) -> None:
        """Move pooled pages to bytes [start, stop), if there are any; their contents are undefined."""
        wanted = _PageRange(pages=pages, start=start, stop=stop)
        with self._lock:
            candidates = self._by_kind.get(wanted.kind)
            if not candidates:
                return
            source = self._remove(candidates.get(wanted.address) or next(iter(candidates.values())))
            if source.address != wanted.address and not source.pages.move(source.start, source.bytes, pages, start):
                source.drop()

    def drop(self, pages: Pages, start: int, stop: int) -> None:
        """Return bytes [start, stop) to the system if they are in the pool; they read as zeros then."""
        with self._lock:
            if (pooled := self._ranges.get(pages.address + start)) is not None:
                self._remove(pooled).drop()

    def _remove(self, pooled: _PageRange) -> _PageRange:
        """Remove a range from the pool."""
        del self._ranges[pooled.address]
        alike = self._by_kind[pooled.kind]
        del alike[pooled.address]
        if not alike:
            del self._by_kind[pooled.kind]
        self.bytes -= pooled.bytes
        return pooled
