"""A rank copies its pieces to a staging buffer, then streams each file from the buffer to disk.

Where checkpoints are in memory themselves, pieces are staged in the file that becomes a part of the checkpoint.

Training continues once the copy is done. The buffer is kept between saves, and only grows. What is on an accelerator reaches
it through a small ring of page-locked memory. Files are slices of the buffer, so a save holds one copy of the rank's state.
State that is offloaded to disk is staged one file at a time, each in the same buffer. A save that its caller waits for is
streamed: what rests in host memory is written from there, and only the rest is staged, one file at a time.

A file is synced once and, on request, read back from the disk. Each block has a CRC-32 checksum, so that a reader can
verify the part that it reads.
"""

from __future__ import annotations

import errno
import os
import shutil
import sys
from collections.abc import Generator, Iterable
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import torch
from torch import Tensor

from shoal.checkpoint.index import File, Range
from shoal.checkpoint.memory_file import FilePool
from shoal.checkpoint.piece import Piece
from shoal.checkpoint.tensor_file import BLOCK, CODES, Entry, checksums, header, memory, widest_first, write_all
from shoal.device import HOST, on_accelerator, set_current, stream_of_thread, within
from shoal.errors import CheckpointError
from shoal.native.crc32 import crc32
from shoal.tier.streams import PinnedRing

__all__ = ["LinkedStaging", "Staged", "StagedFile", "Staging", "WrittenFile", "disk_full", "write_rank_file"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StagedFile:
    """One staged file: its pieces in order, and their bytes in the buffer or, if streamed, where they rest."""

    pieces: list[Piece]
    """The pieces without their data, which training may have changed since."""
    data: list[memoryview]
    """One for each piece."""
    path: Path | None = None
    """The file that has these bytes already."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Staged:
    """The files that one rank will write."""

    files: Iterable[StagedFile]
    """If files are staged one at a time, each is valid until the next is requested."""
    empty: list[Piece]
    """Pieces without elements; the index lists their tensors, and no file contains them."""
    bytes: int


class Staging:
    """A host memory buffer that successive saves reuse."""

    def __init__(self) -> None:
        self._buffer = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._rings: dict[torch.device, PinnedRing] = {}

    @torch.no_grad()
    def copy(self, pieces: Iterable[Piece], file_bytes: int, *, streamed: bool = False) -> Staged:
        """Copy `pieces`, grouped into files of about `file_bytes` at piece boundaries.

        If `streamed`, or if some pieces have a `hold` (their data is not resident), each file is staged when it is
        requested, and the pieces must not change until then: any thread may request it, and gets what the device's stream
        of this call computed. Raises CheckpointError for pieces that do not fit their tensors, or whose dtype the format
        does not support.
        """
        ordered = sorted(pieces, key=lambda piece: widest_first(piece.data.dtype))
        _raise_faults(ordered)
        nonempty = [piece for piece in ordered if piece.start < piece.stop]
        groups, in_place = _groups(nonempty, file_bytes), streamed
        streamed = streamed or any(piece.hold is not None for piece in nonempty)
        sizes = [sum(_bytes(piece) for piece in group if not (in_place and _readable(piece))) for group in groups]
        self._reserve(groups, max(sizes, default=0) if streamed else sum(sizes))
        device = next((piece.data.device for piece in nonempty if on_accelerator(piece.data)), HOST)
        stream = stream_of_thread(device)
        files = (self._stage_later(group, device, stream, in_place=in_place) for group in groups)
        if not streamed:
            starts = accumulate(sizes, initial=0)
            files = [self._stage(group, start) for group, start in zip(groups, starts, strict=False)]
        empty = [_without_data(piece) for piece in ordered if piece.start == piece.stop]
        return Staged(files=files, empty=empty, bytes=sum(map(_bytes, nonempty)))

    def _stage_later(self, group: list[Piece], device: torch.device, stream: torch.Stream | None, *,
                     in_place: bool) -> StagedFile:
        """Copy the pieces of one file, in any thread, as the device's work in `stream` has left them.

        A new thread would begin with the default stream of the first device, which follows no other, and end by making that
        device current, which takes its memory.
        """
        set_current(device)
        with within(stream):
            return self._stage(group, 0, in_place=in_place)

    @torch.no_grad()
    def _stage(self, group: list[Piece], start: int, *, in_place: bool = False) -> StagedFile:
        """Copy the pieces of one file to byte `start` of the buffer; if `in_place`, but for those in host memory."""
        at, data = 0, list[memoryview]()
        pieces = [_without_data(piece) for piece in group]
        buffer, path = self._memory(pieces, start)
        for piece in group:
            if in_place and _readable(piece):
                data.append(memory(piece.data.detach().view(torch.uint8)))
                continue
            part = buffer[at:at + _bytes(piece)]
            with nullcontext() if piece.hold is None else piece.hold(False):
                if on_accelerator(piece.data):
                    self._ring(piece.data.device).download(piece.data, part)
                    if piece.hold is not None:  # its end releases the source
                        self._ring(piece.data.device).finish()
                else:
                    part.view(piece.data.dtype).copy_(piece.data)
            data.append(memory(part))
            at += _bytes(piece)
        for ring in self._rings.values():
            ring.finish()
        return StagedFile(pieces=pieces, data=data, path=path)

    def _memory(self, pieces: list[Piece], start: int) -> tuple[Tensor, Path | None]:
        """Return the memory for the data of one file, from byte `start` of the buffer, and the file that is this memory."""
        return self._buffer[start:], None

    def _ring(self, device: torch.device) -> PinnedRing:
        if device not in self._rings:
            self._rings[device] = PinnedRing(device)
        return self._rings[device]

    def _reserve(self, groups: list[list[Piece]], size: int) -> None:
        """Have memory for a save of these `groups`, one a file, of which at most `size` bytes are staged at once."""
        if self._buffer.numel() < size:
            self._buffer = torch.empty(0, dtype=torch.uint8, device="cpu")  # free the old one first
            self._buffer = torch.empty(size, dtype=torch.uint8, device="cpu")


class LinkedStaging(Staging):
    """Files that successive checkpoints link to, and reuse: what is staged is not copied again."""

    def __init__(self, folder: Path, rank: int) -> None:
        """Have the files of this `rank` in `folder`, which is its own and on the file system of the checkpoints."""
        super().__init__()
        self._folder, self._rank = folder, rank
        self._pool = FilePool(folder)

    def copy(self, pieces: Iterable[Piece], file_bytes: int, *, streamed: bool = False) -> Staged:
        """Copy `pieces`, also those that may stay where they rest, for they become a part of the checkpoint here.

        Raises CheckpointError also where memory has no room.
        """
        return super().copy(pieces, file_bytes)

    def _memory(self, pieces: list[Piece], start: int) -> tuple[Tensor, Path | None]:
        head = _header(pieces, self._rank)
        with self._refused(self._size(pieces)):
            path, file = self._pool.take(self._size(pieces))
        file[:len(head)] = torch.frombuffer(bytearray(head), dtype=torch.uint8)
        return file[len(head):], path

    def _reserve(self, groups: list[list[Piece]], size: int) -> None:
        sizes = [self._size([_without_data(piece) for piece in group]) for group in groups]
        with self._refused(sum(sizes)):
            self._pool.begin(sizes)

    def _size(self, pieces: list[Piece]) -> int:
        """Return the bytes of the file of `pieces`, its header included."""
        return len(_header(pieces, self._rank)) + sum(map(_bytes, pieces))

    @contextmanager
    def _refused(self, needed: int) -> Generator[None]:
        try:
            yield
        except OSError as error:
            raise CheckpointError(disk_full(error, self._folder, needed) or f"{self._folder}: {error}") from error


def _groups(pieces: list[Piece], file_bytes: int) -> list[list[Piece]]:
    """Group pieces into files of about `file_bytes`; a larger piece has its own file."""
    groups: list[list[Piece]] = []
    room = 0
    for piece in pieces:
        if not groups or _bytes(piece) > room:
            groups.append([])
            room = file_bytes
        groups[-1].append(piece)
        room -= _bytes(piece)
    return groups


def _readable(piece: Piece) -> bool:
    """Whether the bytes of `piece` can be written from where they rest."""
    return piece.hold is None and piece.data.device.type == "cpu" and piece.data.is_contiguous()


def _bytes(piece: Piece) -> int:
    return (piece.stop - piece.start) * piece.data.dtype.itemsize


def _raise_faults(pieces: Iterable[Piece]) -> None:
    faults = [f"{piece.name}: {fault}" for piece in pieces if (fault := piece.fault() or _dtype_fault(piece.data))]
    if faults:
        raise CheckpointError("these pieces cannot be saved:\n  " + "\n  ".join(faults))


def _dtype_fault(data: Tensor) -> str | None:
    if data.dtype in CODES:
        return None
    return f"got {data.dtype}, allowed are {', '.join(str(d).removeprefix('torch.') for d in CODES)}"


def _without_data(piece: Piece) -> Piece:
    box = piece.interval.box if piece.offset is not None else None
    return Piece(name=piece.name, shape=tuple(piece.shape), start=piece.start, stop=piece.stop,
                 data=torch.empty(0, dtype=piece.data.dtype, device="cpu"), offset=box and tuple(box.offset),
                 size=box and tuple(box.size))


def _header(pieces: Iterable[Piece], rank: int) -> bytes:
    entries = [Entry(key=_key(p), dtype=p.data.dtype, shape=(p.stop - p.start,)) for p in pieces]
    return header(entries, {"format": "pt", "rank": str(rank)})


def _key(piece: Piece) -> str:
    box = "" if piece.offset is None else f"@{piece.offset}+{piece.size}".replace(" ", "")
    return f"{piece.name}{box}[{piece.start}:{piece.stop}]"


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenFile:
    """One file on disk and the range of each of its pieces, in order."""

    file: File
    ranges: list[Range]


def write_rank_file(path: Path, staged: StagedFile, rank: int, *, read_back: bool) -> WrittenFile:
    """Write `staged` to the new file `path` and sync it, or link it where a file has its bytes.

    Raises OSError, and CheckpointError if `read_back` finds other bytes on the disk.
    """
    head = _header(staged.pieces, rank)
    size = len(head) + sum(map(len, staged.data))
    file = File(name=path.name, rank=rank, size=size, header=len(head), checksum=crc32(head))
    if staged.path is not None:
        os.link(staged.path, path)
    descriptor = os.open(path, os.O_RDWR | (os.O_CREAT | os.O_EXCL if staged.path is None else 0), 0o666)
    try:
        for data in [memoryview(head), *staged.data] if staged.path is None else []:
            write_all(descriptor, data)
        ranges = _ranges(file, staged)  # overlaps with the write-back of the page cache
        os.fsync(descriptor)
        if read_back:
            _compare(descriptor, path, file, ranges)
    finally:
        os.close(descriptor)
    return WrittenFile(file=file, ranges=ranges)


def _ranges(file: File, staged: StagedFile) -> list[Range]:
    ranges: list[Range] = []
    at = 0
    for piece, data in zip(staged.pieces, staged.data, strict=True):
        box = piece.interval.box
        ranges.append(Range(file=file.name, at=file.header + at, start=piece.start, stop=piece.stop, offset=box.offset,
                            size=box.size, checksums=tuple(checksums(data))))
        at += len(data)
    return ranges


def _compare(descriptor: int, path: Path, file: File, ranges: list[Range]) -> None:
    """Read a synced file back, past the page cache where the system allows it, and compare the checksums."""
    if sys.platform == "linux":  # elsewhere the read is served from the page cache
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    ends = [*(entry.at for entry in ranges[1:]), file.size]
    intact = crc32(os.pread(descriptor, file.header, 0)) == file.checksum
    for entry, end in zip(ranges, ends, strict=True):
        for block, checksum in enumerate(entry.checksums):
            start = entry.at + block * BLOCK
            intact = intact and crc32(os.pread(descriptor, min(BLOCK, end - start), start)) == checksum
    if not intact:
        raise CheckpointError(f"{path}: the disk contains other bytes than were written; check the disk")


def disk_full(error: BaseException, folder: Path, needed: int) -> str | None:
    """Return a message with the needed and free bytes if `error` means that the disk is full, else None."""
    reasons = {errno.ENOSPC: "no space is left", errno.EDQUOT: "the disk quota is exceeded",
               errno.EFBIG: "the file size limit is exceeded"}
    if not isinstance(error, OSError) or error.errno not in reasons:
        return None
    free = shutil.disk_usage(folder).free
    return (f"{reasons[error.errno]} in {folder}: this rank needs {needed:,} bytes, {free:,} are free there now "
            "(the files of this save included); free space, or save elsewhere")
