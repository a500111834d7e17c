"""Host memory in pages of its own: a tensor of zeros whose pages go back to the system, and come back as zeros.

The memory is private and anonymous, so that a page costs nothing until it is written, and its address never changes. Large
pages hold it where the system has them: they come and go many at a time.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from contextlib import suppress
from functools import cache

import torch

__all__ = ["LARGE", "PAGE", "Pages", "whole_pages"]

PAGE = mmap.PAGESIZE
LARGE = 2 << 20
"""Bytes of a large page, and of memory from which large pages are asked for."""

_NO_RESERVE = 0x4000  # MAP_NORESERVE, which mmap names from Python 3.13 on
_DONT_NEED, _HUGE, _NOT_HUGE = 4, 14, 15
_MOVED = 1 | 2 | 4  # MREMAP_MAYMOVE, _FIXED, and _DONTUNMAP: where the pages were, memory stays
_KIND = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE
_FIXED = 0x10


class Pages:
    """Memory of `size` elements of `dtype`; byte `aligned`, where a page begins, also begins a large page."""

    def __init__(self, size: int, dtype: torch.dtype, *, aligned: int = 0):
        assert aligned % PAGE == 0, aligned
        self.bytes = whole_pages(size * dtype.itemsize)
        large = self.bytes >= LARGE
        self._large = large
        self._map = mmap.mmap(-1, max(PAGE, self.bytes) + large * LARGE, flags=_KIND)
        base = torch.frombuffer(self._map, dtype=torch.uint8).data_ptr()
        self._lead = -(base + aligned) % LARGE if large else 0
        self.address = base + self._lead
        self.tensor = torch.frombuffer(self._map, dtype=dtype, count=size, offset=self._lead) if size else torch.empty(
            0, dtype=dtype)
        if large:
            self._ask_for_large_pages()

    def _ask_for_large_pages(self) -> None:
        """Ask for large pages up to the end: one that reached beyond would never go back to the system as a whole."""
        with suppress(OSError):  # a kernel without large pages
            _advise(self.address, self.bytes, _HUGE)
            _advise(self.address + self.bytes, LARGE - self._lead, _NOT_HUGE)

    def view(self, start: int, stop: int) -> memoryview:
        """Return bytes [start, stop)."""
        return memoryview(self._map)[self._lead + start:self._lead + stop]

    def give(self, start: int, size: int, other: Pages, at: int) -> bool:
        """Let the pages of bytes [start, start + size) become those of `other` from byte `at` on, whose own go.

        All are multiples of `PAGE`. What was here are zeros then. Returns False, with nothing moved, where the system
        cannot.
        """
        source, target = self.address + start, other.address + at
        library = _library(held=True)
        if library.mremap(source, size, size, _MOVED, target) != target:
            return False
        # The memory left behind still counts from where it once was; new memory joins what is around it, and a process
        # may have only so many parts.
        library.mmap(source, size, mmap.PROT_READ | mmap.PROT_WRITE, _KIND | _FIXED, -1, 0)
        if self._large:
            library.madvise(source, size, _HUGE)  # fails where a kernel has none
        return True

    def drop(self, start: int, stop: int) -> None:
        """Give the whole pages within bytes [start, stop) back to the system."""
        start, stop = whole_pages(start), stop // PAGE * PAGE
        if start < stop:
            _advise(self.address + start, stop - start, _DONT_NEED)


def whole_pages(size: int) -> int:
    """Return `size` bytes rounded up to whole pages."""
    return -(-size // PAGE) * PAGE


def _advise(address: int, size: int, advice: int) -> None:
    """Call madvise without holding the interpreter, which mmap's own method does."""
    if _library().madvise(address, size, advice):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


@cache
def _library(*, held: bool = False) -> ctypes.CDLL:
    """Return the system's library, whose calls let the interpreter go on; or are over sooner than that, if it is `held`."""
    library = (ctypes.PyDLL if held else ctypes.CDLL)(None, use_errno=True)
    address, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    library.mremap.argtypes = (address, size, size, number, address)
    library.mmap.argtypes = (address, size, number, number, number, size)
    library.mremap.restype = library.mmap.restype = address
    library.madvise.argtypes = (address, size, number)
    return library
