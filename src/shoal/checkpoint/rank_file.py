"""A rank's file is streamed from the staging buffer, synced once, and read back from the disk.

Checksums are CRC-32 (`zlib.crc32`, 2 GB/s a core here, without the interpreter lock), one for each block, so that a
reader checks what it reads without reading more.
"""

from __future__ import annotations

import errno
import os
import shutil
import sys
import zlib
from dataclasses import dataclass
from pathlib import Path

from shoal.checkpoint.index import File, Range
from shoal.checkpoint.staging import StagedFile
from shoal.checkpoint.tensor_file import BLOCK, checksums, header, write_all
from shoal.errors import CheckpointError

__all__ = ["WrittenFile", "disk_full", "write_rank_file"]


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenFile:
    """One file on disk: what it is, and the range of each of its pieces, in their order."""

    file: File
    ranges: list[Range]


def write_rank_file(path: Path, staged: StagedFile, rank: int, *, read_back: bool) -> WrittenFile:
    """Write `staged` to the new file `path` and make it durable.

    Raises OSError, and CheckpointError when `read_back` finds other bytes on the disk.
    """
    head = header(staged.entries, {"format": "pt", "rank": str(rank)})
    file = File(name=path.name, rank=rank, size=len(head) + len(staged.data), header=len(head), checksum=zlib.crc32(head))
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        write_all(descriptor, head)
        write_all(descriptor, staged.data)
        ranges = _ranges(file, staged)  # while the system may already be writing
        os.fsync(descriptor)
        if read_back:
            _compare(descriptor, path, file, ranges)
    finally:
        os.close(descriptor)
    return WrittenFile(file=file, ranges=ranges)


def _ranges(file: File, staged: StagedFile) -> list[Range]:
    ranges: list[Range] = []
    at = 0
    for piece, entry in zip(staged.pieces, staged.entries, strict=True):
        box = piece.cut.box
        ranges.append(Range(file=file.name, at=file.header + at, start=piece.start, stop=piece.stop, offset=box.offset,
                            size=box.size, checksums=tuple(checksums(staged.data[at : at + entry.bytes]))))
        at += entry.bytes
    return ranges


def _compare(descriptor: int, path: Path, file: File, ranges: list[Range]) -> None:
    """Read a synced file from the disk itself, where the system allows it, and compare the checksums."""
    if sys.platform == "linux":  # elsewhere the page cache answers
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    ends = [*(found.at for found in ranges[1:]), file.size]
    right = zlib.crc32(os.pread(descriptor, file.header, 0)) == file.checksum
    for found, end in zip(ranges, ends, strict=True):
        for block, checksum in enumerate(found.checksums):
            start = found.at + block * BLOCK
            right = right and zlib.crc32(os.pread(descriptor, min(BLOCK, end - start), start)) == checksum
    if not right:
        raise CheckpointError(f"{path}: the disk holds other bytes than were written; check the disk")


def disk_full(error: BaseException, folder: Path, needed: int) -> str | None:
    """Say how much room a save needed and how much there is, when `error` means that the room ran out."""
    reasons = {errno.ENOSPC: "no space is left", errno.EDQUOT: "the disk quota is used up",
               errno.EFBIG: "the limit of a file's size is reached"}
    if not isinstance(error, OSError) or error.errno not in reasons:
        return None
    free = shutil.disk_usage(folder).free
    return (f"{reasons[error.errno]} in {folder}: this rank needs {needed:,} bytes, {free:,} are free there now "
            "(with what this save wrote still in place); make room, or save elsewhere")
