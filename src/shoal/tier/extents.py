"""The allocation map of a file: a first-fit allocator of extents that merges adjacent free ones."""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass

__all__ = ["ALIGNMENT", "Extent", "Extents"]

ALIGNMENT = 4096
"""Offsets and sizes are multiples of this many bytes, as direct I/O requires."""


@dataclass(frozen=True, slots=True, order=True)
class Extent:
    """A range of bytes of a file."""

    offset: int
    bytes: int

    @property
    def stop(self) -> int:
        """The first byte after the extent."""
        return self.offset + self.bytes


class Extents:
    """The allocated and free extents of a file of `size` bytes."""

    def __init__(self) -> None:
        self.size = 0
        self._free: list[Extent] = []

    @property
    def allocated(self) -> int:
        """Allocated bytes."""
        return self.size - sum(hole.bytes for hole in self._free)

    def shortage(self, bytes: int) -> int:
        """Return by how many bytes the file must grow to have a free extent of `bytes`."""
        wanted = aligned(bytes)
        if any(hole.bytes >= wanted for hole in self._free):
            return 0
        last = self._free[-1] if self._free and self._free[-1].stop == self.size else Extent(self.size, 0)
        return wanted - last.bytes

    def grow(self, bytes: int) -> None:
        """Extend the file by `bytes`."""
        old, self.size = self.size, self.size + bytes
        self.free(Extent(old, bytes))

    def allocate(self, bytes: int) -> Extent:
        """Return the first free extent of `bytes`, rounded up to the alignment; `shortage` must be 0."""
        wanted = aligned(bytes)
        if not wanted:
            return Extent(0, 0)
        index = next(index for index, hole in enumerate(self._free) if hole.bytes >= wanted)
        hole = self._free[index]
        rest = Extent(hole.offset + wanted, hole.bytes - wanted)
        self._free[index:index + 1] = [rest] if rest.bytes else []
        return Extent(hole.offset, wanted)

    def free(self, extent: Extent) -> None:
        """Free `extent`."""
        if not extent.bytes:
            return
        insort(self._free, extent)
        joined: list[Extent] = []
        for hole in self._free:
            assert not joined or joined[-1].stop <= hole.offset, f"{extent} was free already"
            if joined and joined[-1].stop == hole.offset:
                hole = Extent(joined[-1].offset, joined.pop().bytes + hole.bytes)
            joined.append(hole)
        self._free = joined


def aligned(bytes: int) -> int:
    """Return `bytes` rounded up to the alignment."""
    return -(-bytes // ALIGNMENT) * ALIGNMENT
