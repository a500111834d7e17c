"""A snapshot is an open checkpoint; it fills any piece of a saved tensor, regardless of how the tensor was sharded.

`Snapshot` is what loading needs of a checkpoint, in any format; `IndexedSnapshot` reads Shoal's own. A request is checked
before any byte is read. Files are opened on first use and read in blocks, each with its own checksum. Nothing is unpickled.
"""

from __future__ import annotations

import errno
import os
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Self, cast

import torch
from torch import Tensor

from shoal.checkpoint import folder as folders
from shoal.checkpoint.index import Index, Range, StoredTensor
from shoal.checkpoint.piece import Interval, Overlap, Piece, overlaps
from shoal.checkpoint.ranks import Ranks
from shoal.checkpoint.tensor_file import BLOCK, DTYPES, memory
from shoal.checkpoint.values import decode
from shoal.checkpoint.writer import PRIVATE, SHARED
from shoal.errors import CheckpointDamaged, CheckpointError
from shoal.native.crc32 import crc32

__all__ = ["BlockRead", "IndexedSnapshot", "Snapshot", "read", "read_unpublished"]

UNREADABLE = (errno.ENOENT, errno.EIO)
"""The errors of a file that is gone, or whose medium fails: damage, as other bytes are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockRead:
    """One block to read, and the copies from it to pieces."""

    name: str
    file: str
    at: int
    bytes: int
    checksum: int
    dtype: torch.dtype
    copies: list[tuple[Overlap, Piece]] = field(default_factory=list[tuple[Overlap, Piece]])


def read(folder: str | os.PathLike[str], tag: str | None = None, *, ranks: Ranks | None = None,
         verify: bool = True) -> IndexedSnapshot:
    """Open the checkpoint `folder/tag`; a tag of None means the latest. A collective call of `ranks`.

    With `verify` the checksum of every block that is read is compared. Raises CheckpointError on every rank if the folder
    or tag does not exist (with the existing tags), the index is missing, damaged or of another version, or a file is
    missing or truncated (with the newest intact checkpoint in the folder).
    """
    ranks = ranks or Ranks()
    path = Path(folder)
    with ranks.lock:
        resolved = ranks.run_collectively("could not load", lambda: folders.resolve(path, tag) if ranks.rank == 0 else "")
        name = ranks.all_gather(resolved.encode())[0].decode()
        return ranks.run_collectively("could not load", lambda: _open(path, name, ranks, verify))


def read_unpublished(path: Path) -> IndexedSnapshot:
    """Open the complete checkpoint in `path` that this save has not published yet (`Writer.write`). Not collective."""
    return IndexedSnapshot(path, folders.load_index(path), Ranks(), verify=False)


def _open(folder: Path, tag: str, ranks: Ranks, verify: bool) -> IndexedSnapshot:
    path = folders.locate(folder, tag)
    if path is None:
        raise CheckpointError(f"{folder}: rank 0 sees the checkpoint {tag!r}, this rank does not; "
                              "a checkpoint needs a folder that all ranks share")
    try:
        index = folders.load_index(path)
        if faults := folders.faults(path, index):
            raise CheckpointDamaged("\n  ".join([f"{path}: damaged", *faults]))
    except CheckpointError as error:
        raise type(error)(f"{error}; {folders.intact_alternative(folder, tag)}") from None
    return IndexedSnapshot(path, index, ranks, verify=verify)


class Snapshot(ABC):
    """A checkpoint open for reading, until it is closed. It is its own context manager.

    A subclass knows one format: its names, shapes and values, and how the data of a piece is read.
    """

    def __init__(self, path: Path, ranks: Ranks) -> None:
        self.path = path
        self._ranks = ranks
        self._resources = ExitStack()
        self.close = weakref.finalize(self, self._resources.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def tag(self) -> str:
        return self.path.name.removeprefix(folders.REPLACED)

    @property
    @abstractmethod
    def step(self) -> int:
        """The optimizer steps that had been taken."""

    @property
    @abstractmethod
    def ranks(self) -> int:
        """The number of ranks that saved the checkpoint."""

    @abstractmethod
    def names(self) -> list[str]:
        """Return the names of all tensors."""

    @abstractmethod
    def __contains__(self, name: str) -> bool: ...

    @abstractmethod
    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a full tensor. Raises CheckpointError if there is no such tensor."""

    @abstractmethod
    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype in which a tensor was saved."""

    @cached_property
    @abstractmethod
    def shared(self) -> dict[str, object]:
        """The values that are the same on every rank."""

    @abstractmethod
    def private(self, rank: int) -> dict[str, object]:
        """Return the `private` values that `rank` saved. Raises CheckpointError if no such rank saved."""

    def tensor(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        """Return one full tensor on the CPU, in `dtype` (None: as saved). Not a collective call."""
        data = torch.empty(prod(self.shape(name)), dtype=dtype or self.dtype(name), device="cpu")
        self._fill([Piece(name=name, shape=self.shape(name), start=0, stop=data.numel(), data=data)])
        return data.view(self.shape(name))

    def fill(self, pieces: Iterable[Piece]) -> None:
        """Fill the data of `pieces` from the checkpoint, cast to their dtypes. A collective call of the ranks.

        Raises CheckpointError on every rank. One message lists all missing names, different shapes and elements that
        were not saved, before any piece is filled. Damaged bytes (with tensor, file and rank) are found while pieces are
        filled.
        """
        requested = list(pieces)
        with self._ranks.lock:
            self._ranks.run_collectively(f"could not load {self.path}", lambda: self._fill(requested))

    @abstractmethod
    def _fill(self, pieces: list[Piece]) -> None:
        """Fill the data of `pieces`."""

    def _fault(self, piece: Piece) -> str | None:
        """Return why the checkpoint cannot serve `piece`, whatever elements it has, or None."""
        if piece.name not in self:
            close = get_close_matches(piece.name, self.names(), n=1)
            return f"{piece.name}: not in the checkpoint" + (f"; did you mean {close[0]}?" if close else "")
        if (shape := self.shape(piece.name)) != tuple(piece.shape):
            return f"{piece.name}: saved with shape {shape}, requested with {tuple(piece.shape)}"
        if fault := piece.fault():
            return f"{piece.name}: {fault}"
        return None if piece.data.is_contiguous() else f"{piece.name}: the data to fill is not contiguous"


class IndexedSnapshot(Snapshot):
    """A checkpoint in Shoal's own format; its folder, if there is one, is locked against removal until it is closed."""

    def __init__(self, path: Path, index: Index, ranks: Ranks, *, verify: bool) -> None:
        super().__init__(path, ranks)
        self.index = index
        self._verify = verify
        self._folder = self._resources.enter_context(folders.lock(path, shared=True)) if path.is_dir() else None
        self._open: dict[str, int] = {}
        self._block = torch.empty(BLOCK, dtype=torch.uint8, device="cpu")

    @property
    def step(self) -> int:
        return self.index.step

    @property
    def ranks(self) -> int:
        return len(self.index.private)

    def names(self) -> list[str]:
        return [name for name in self.index.tensors if not name.startswith((SHARED, PRIVATE))]

    def __contains__(self, name: str) -> bool:
        return name in self.index.tensors

    def shape(self, name: str) -> tuple[int, ...]:
        return self._stored(name).shape

    def dtype(self, name: str) -> torch.dtype:
        return DTYPES[self._stored(name).dtype]

    @cached_property
    def shared(self) -> dict[str, object]:
        """The `shared` values that rank 0 saved."""
        return cast("dict[str, object]", decode(self.index.shared, lambda at: self.tensor(f"{SHARED}{at}")))

    def private(self, rank: int) -> dict[str, object]:
        if not 0 <= rank < self.ranks:
            raise CheckpointError(f"{self.path}: saved by ranks 0 to {self.ranks - 1}, got rank {rank}")
        json = self.index.private[rank]
        return cast("dict[str, object]", decode(json, lambda at: self.tensor(f"{PRIVATE}{rank}/{at}")))

    @torch.no_grad()
    def _fill(self, pieces: list[Piece]) -> None:
        self._copy(self._plan(pieces), self._load)

    def _copy(self, reads: Sequence[BlockRead], load: Callable[[BlockRead], Tensor]) -> None:
        """Copy each block, as `load` returns it, to its pieces."""
        last = {piece: read for read in reads for _, piece in read.copies}  # pieces are resident from first to last copy
        resident: dict[Piece, ExitStack] = {}
        with ExitStack() as stack:
            for read in reads:
                source = load(read)
                for overlap, piece in read.copies:
                    if piece not in resident:
                        resident[piece] = stack.enter_context(ExitStack())
                        if piece.hold is not None:
                            resident[piece].enter_context(piece.hold(True))
                    overlap.copy(source, piece.data)
                for piece in {piece for _, piece in read.copies if last[piece] is read}:
                    resident.pop(piece).close()

    def _plan(self, pieces: list[Piece]) -> list[BlockRead]:
        """Return the blocks to read, in the order of the files.

        Raises CheckpointError if any part of the request cannot be served.
        """
        faults = [fault for piece in pieces if (fault := self._fault(piece)) is not None]
        reads: dict[tuple[str, int], BlockRead] = {}
        for piece in pieces if not faults else ():
            stored = self._stored(piece.name)
            missing = piece.interval.elements
            width = DTYPES[stored.dtype].itemsize
            for entry in stored.ranges:
                for block in _blocks(entry, piece.interval, width):
                    copies = list(overlaps(_block_interval(entry, block, width), piece.interval))
                    if copies:
                        read = reads.setdefault((entry.file, entry.at + block * BLOCK),
                                                _block_read(piece.name, stored, entry, block))
                        read.copies.extend((copy, piece) for copy in copies)
                        missing -= sum(copy.elements for copy in copies)
            if missing:
                faults.append(f"{piece.name}: {missing} of elements [{piece.start}, {piece.stop}) were not saved")
        if faults:
            raise CheckpointError("\n  ".join(["the checkpoint does not match the request:", *faults]))
        return sorted(reads.values(), key=lambda read: (read.file, read.at))

    def _stored(self, name: str) -> StoredTensor:
        if name not in self.index.tensors:
            raise CheckpointError(f"{self.path}: has no tensor {name!r}")
        return self.index.tensors[name]

    def _load(self, read: BlockRead) -> Tensor:
        """Read one block into the buffer that all blocks share."""
        data = self._block[: read.bytes]
        view = memory(data)
        filled = 0
        while filled < read.bytes:
            try:
                count = os.preadv(self._descriptor(read.file), [view[filled:]], read.at + filled)
            except OSError as error:
                if error.errno not in UNREADABLE:
                    raise
                raise CheckpointDamaged(self._damage(read, str(error))) from error
            if count == 0:
                raise CheckpointDamaged(self._damage(read, f"ends at byte {read.at + filled}"))
            filled += count
        return self._checked(read, data)

    def _checked(self, read: BlockRead, data: Tensor) -> Tensor:
        """Return the bytes `data` of a block as elements. Raises CheckpointDamaged if they are not those that were saved."""
        if self._verify and crc32(memory(data)) != read.checksum:
            raise CheckpointDamaged(self._damage(read, f"wrong checksum of bytes [{read.at}, {read.at + read.bytes})"))
        return data.view(read.dtype)

    def _damage(self, read: BlockRead, reason: str) -> str:
        rank = next(file.rank for file in self.index.files if file.name == read.file)
        return (f"{read.name}: damaged in {read.file} of rank {rank}: {reason}; "
                f"{folders.intact_alternative(self.path.parent, self.tag)}")

    def _descriptor(self, name: str) -> int:
        if name not in self._open:
            descriptor = os.open(name, os.O_RDONLY, dir_fd=self._folder)
            self._resources.callback(os.close, descriptor)
            self._open[name] = descriptor
        return self._open[name]


def _blocks(entry: Range, requested: Interval, width: int) -> range:
    """Return the indices of the blocks of a range that can contain requested elements of `width` bytes."""
    count = len(entry.checksums)
    if entry.interval.box != requested.box:
        return range(count)
    block_elements = BLOCK // width
    first = max(0, requested.start - entry.start) // block_elements
    return range(first, max(first, min(count, -(-(requested.stop - entry.start) // block_elements))))


def _block_interval(entry: Range, block: int, width: int) -> Interval:
    start = entry.start + block * (BLOCK // width)
    return Interval(entry.interval.box, start, min(entry.stop, start + BLOCK // width))


def _block_read(name: str, stored: StoredTensor, entry: Range, block: int) -> BlockRead:
    dtype = DTYPES[stored.dtype]
    size = _block_interval(entry, block, dtype.itemsize).elements * dtype.itemsize
    return BlockRead(name=name, file=entry.file, at=entry.at + block * BLOCK, bytes=size,
                      checksum=entry.checksums[block], dtype=dtype)
