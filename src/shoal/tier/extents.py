"""The map of a file: extents that somebody holds, and free ones between them, which join where they touch."""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass

__all__ = ["ALIGNMENT", "Extent", "Extents"]

ALIGNMENT = 4096
"""What offsets and sizes are multiples of: direct I/O asks for it."""


@dataclass(frozen=True, slots=True, order=True)
class Extent:
    """A range of bytes of a file."""

    offset: int
    bytes: int

    @property
    def stop(self) -> int:
        """The first byte behind it."""
        return self.offset + self.bytes


class Extents:
    """The extents of a file of `size` bytes."""

    def __init__(self) -> None:
        self.size = 0
        self._free: list[Extent] = []

    @property
    def held(self) -> int:
        """Bytes that somebody holds."""
        return self.size - sum(hole.bytes for hole in self._free)

    def shortage(self, bytes: int) -> int:
        """Return how many bytes the file lacks to give `bytes` in one piece."""
        wanted = aligned(bytes)
        if any(hole.bytes >= wanted for hole in self._free):
            return 0
        last = self._free[-1] if self._free and self._free[-1].stop == self.size else Extent(self.size, 0)
        return wanted - last.bytes

    def grow(self, bytes: int) -> None:
        """Let the file be `bytes` longer."""
        old, self.size = self.size, self.size + bytes
        self.free(Extent(old, bytes))

    def allocate(self, bytes: int) -> Extent:
        """Return the first free extent of `bytes`, rounded up to the alignment; there is one where `shortage` is 0."""
        wanted = aligned(bytes)
        if not wanted:
            return Extent(0, 0)
        index = next(index for index, hole in enumerate(self._free) if hole.bytes >= wanted)
        hole = self._free[index]
        rest = Extent(hole.offset + wanted, hole.bytes - wanted)
        self._free[index:index + 1] = [rest] if rest.bytes else []
        return Extent(hole.offset, wanted)

    def free(self, extent: Extent) -> None:
        """Take `extent` back."""
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
