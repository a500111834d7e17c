"""A snapshot answers names and fills pieces: whoever asks for a cut of a tensor gets it, however it was cut when saved.

Files are opened when first needed and read in the blocks that carry checksums; what is asked for is checked against the
index before the first byte is read. Nothing is unpickled.
"""

from __future__ import annotations

import os
import weakref
import zlib
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import cached_property
from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from shoal.checkpoint import folder as folders
from shoal.checkpoint.index import Index, Range, Stored
from shoal.checkpoint.piece import Interval, Overlap, Piece, overlaps
from shoal.checkpoint.ranks import Ranks
from shoal.checkpoint.tensor_file import BLOCK, DTYPES, memory
from shoal.checkpoint.values import decode
from shoal.checkpoint.writer import PRIVATE, SHARED
from shoal.errors import CheckpointError

__all__ = ["Snapshot", "read"]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Read:
    """One block to read, and what to copy from it where."""

    name: str
    file: str
    at: int
    bytes: int
    checksum: int
    dtype: torch.dtype
    copies: list[tuple[Overlap, Piece]] = field(default_factory=list[tuple[Overlap, Piece]])


def read(folder: str | os.PathLike[str], tag: str | None = None, *, ranks: Ranks | None = None,
         verify: bool = True) -> Snapshot:
    """Open the checkpoint `folder/tag`; None takes the tag that `latest` names. A collective call of `ranks`.

    With `verify` the checksum of every block that is read is compared. Raises CheckpointError, on every rank: no such
    folder or tag (with the tags that are there), an index that is missing, damaged or of another version, a file that is
    missing or truncated (with the newest intact checkpoint beside it).
    """
    ranks = ranks or Ranks()
    path = Path(folder)
    with ranks.turn:
        found = ranks.together("could not load", lambda: folders.resolve(path, tag) if ranks.rank == 0 else "")
        name = ranks.exchange(found.encode())[0].decode()
        return ranks.together("could not load", lambda: _open(path, name, ranks, verify))


def _open(folder: Path, tag: str, ranks: Ranks, verify: bool) -> Snapshot:
    path = folders.locate(folder, tag)
    if path is None:
        raise CheckpointError(f"{folder}: rank 0 sees the checkpoint {tag!r} there, this rank does not; "
                              "a checkpoint needs a folder that all ranks share")
    try:
        index = folders.load_index(path)
        if found := folders.faults(path, index):
            raise CheckpointError("\n  ".join([f"{path}: damaged", *found]))
    except CheckpointError as error:
        raise CheckpointError(f"{error}; {folders.beside(folder, tag)}") from None
    return Snapshot(path, index, ranks, verify=verify)


class Snapshot:
    """One checkpoint, open for reading. Close it, or use it as a context, to let others remove the checkpoint."""

    def __init__(self, path: Path, index: Index, ranks: Ranks, *, verify: bool) -> None:
        self.path = path
        self.index = index
        self._ranks = ranks
        self._verify = verify
        self._held = ExitStack()
        self.close = weakref.finalize(self, self._held.close)
        self._folder = self._held.enter_context(folders.lock(path, shared=True))
        self._open: dict[str, int] = {}
        self._block = torch.empty(BLOCK, dtype=torch.uint8)

    def __enter__(self) -> Snapshot:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def tag(self) -> str:
        return self.path.name.removeprefix(folders.REPLACED)

    @property
    def step(self) -> int:
        return self.index.step

    @property
    def ranks(self) -> int:
        """The ranks that saved it."""
        return len(self.index.private)

    def names(self) -> list[str]:
        """Return the names of all tensors, as the pieces had them."""
        return [name for name in self.index.tensors if not name.startswith((SHARED, PRIVATE))]

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a whole tensor."""
        return self._stored(name).shape

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype in which a tensor was saved."""
        return DTYPES[self._stored(name).dtype]

    @cached_property
    def shared(self) -> dict[str, object]:
        """What rank 0 shared when it saved."""
        return cast("dict[str, object]", decode(self.index.shared, lambda at: self.tensor(f"{SHARED}{at}")))

    def private(self, rank: int) -> dict[str, object]:
        """Return what `rank` kept for itself when it saved; raises CheckpointError when there was no such rank."""
        if not 0 <= rank < self.ranks:
            raise CheckpointError(f"{self.path}: saved by ranks 0 to {self.ranks - 1}, there is no rank {rank}")
        json = self.index.private[rank]
        return cast("dict[str, object]", decode(json, lambda at: self.tensor(f"{PRIVATE}{rank}/{at}")))

    def tensor(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        """Return one whole tensor on the CPU, in `dtype` (None: as it was saved). Not a collective call."""
        data = torch.empty(self._stored(name).elements, dtype=dtype or self.dtype(name))
        self._fill([Piece(name=name, shape=self.shape(name), start=0, stop=data.numel(), data=data)])
        return data.view(self.shape(name))

    def fill(self, pieces: Iterable[Piece]) -> None:
        """Fill the data of `pieces` from the checkpoint, casting to their dtypes. A collective call of the ranks.

        Raises CheckpointError on every rank: names that are not there, shapes that differ and elements that were not
        saved (all in one message, before anything is filled), damaged bytes (tensor, file and rank; some pieces may
        have been filled by then).
        """
        wanted = list(pieces)
        with self._ranks.turn:
            self._ranks.together(f"could not load {self.path}", lambda: self._fill(wanted))

    @torch.no_grad()
    def _fill(self, pieces: list[Piece]) -> None:
        reads = sorted(self._plan(pieces), key=lambda read: (read.file, read.at))
        last = {piece: read for read in reads for _, piece in read.copies}  # a piece is held from its first to its last copy
        holding: dict[Piece, ExitStack] = {}
        with ExitStack() as held:
            for read in reads:
                source = self._load(read)
                for overlap, piece in read.copies:
                    if piece not in holding:
                        holding[piece] = held.enter_context(ExitStack())
                        if piece.hold is not None:
                            holding[piece].enter_context(piece.hold(True))
                    overlap.copy(source, piece.data)
                for piece in {piece for _, piece in read.copies if last[piece] is read}:
                    holding.pop(piece).close()

    def _plan(self, pieces: list[Piece]) -> Iterable[_Read]:
        """Find the blocks to read; refuse the request as a whole if any of it cannot be served."""
        faults = [fault for piece in pieces if (fault := self._fault(piece)) is not None]
        reads: dict[tuple[str, int], _Read] = {}
        for piece in pieces if not faults else ():
            stored = self._stored(piece.name)
            missing = piece.cut.elements
            for found in stored.ranges:
                for block in _blocks(found, piece.cut, DTYPES[stored.dtype].itemsize):
                    copies = list(overlaps(_block_cut(found, block, DTYPES[stored.dtype].itemsize), piece.cut))
                    if copies:
                        read = reads.setdefault((found.file, found.at + block * BLOCK),
                                                _read_of(piece.name, stored, found, block))
                        read.copies.extend((copy, piece) for copy in copies)
                        missing -= sum(copy.elements for copy in copies)
            if missing:
                faults.append(f"{piece.name}: {missing} of elements [{piece.start}, {piece.stop}) were not saved")
        if faults:
            raise CheckpointError("\n  ".join(["it does not fit what is asked for:", *faults]))
        return reads.values()

    def _fault(self, piece: Piece) -> str | None:
        stored = self.index.tensors.get(piece.name)
        if stored is None:
            close = get_close_matches(piece.name, self.names(), n=1)
            return f"{piece.name}: not in the checkpoint" + (f"; did you mean {close[0]}?" if close else "")
        if stored.shape != tuple(piece.shape):
            return f"{piece.name}: saved with shape {stored.shape}, asked for {tuple(piece.shape)}"
        if fault := piece.fault():
            return f"{piece.name}: {fault}"
        return None if piece.data.is_contiguous() else f"{piece.name}: the data to fill is not contiguous"

    def _stored(self, name: str) -> Stored:
        if name not in self.index.tensors:
            raise CheckpointError(f"{self.path}: has no tensor {name!r}")
        return self.index.tensors[name]

    def _load(self, read: _Read) -> Tensor:
        """Read one block into the buffer that the next block will overwrite."""
        data = self._block[: read.bytes]
        room = memory(data)
        got = 0
        while got < read.bytes:
            count = os.preadv(self._descriptor(read.file), [room[got:]], read.at + got)
            if count == 0:
                raise CheckpointError(self._damage(read, f"ends at byte {read.at + got}"))
            got += count
        if self._verify and zlib.crc32(room) != read.checksum:
            raise CheckpointError(self._damage(read, f"bytes [{read.at}, {read.at + read.bytes}) are not what was saved"))
        return data.view(read.dtype)

    def _damage(self, read: _Read, what: str) -> str:
        rank = next(file.rank for file in self.index.files if file.name == read.file)
        return (f"{read.name}: damaged in {read.file} of rank {rank}: {what}; "
                f"{folders.beside(self.path.parent, self.tag)}")

    def _descriptor(self, name: str) -> int:
        if name not in self._open:
            descriptor = os.open(name, os.O_RDONLY, dir_fd=self._folder)
            self._held.callback(os.close, descriptor)
            self._open[name] = descriptor
        return self._open[name]


def _blocks(found: Range, wanted: Interval, width: int) -> range:
    """Return the numbers of the blocks of a range that may hold wanted elements."""
    count = len(found.checksums)
    if found.cut.box != wanted.box:
        return range(count)
    step = BLOCK // width
    first = max(0, wanted.start - found.start) // step
    return range(first, max(first, min(count, -(-(wanted.stop - found.start) // step))))


def _block_cut(found: Range, block: int, width: int) -> Interval:
    start = found.start + block * (BLOCK // width)
    return Interval(found.cut.box, start, min(found.stop, start + BLOCK // width))


def _read_of(name: str, stored: Stored, found: Range, block: int) -> _Read:
    dtype = DTYPES[stored.dtype]
    size = _block_cut(found, block, dtype.itemsize).elements * dtype.itemsize
    return _Read(name=name, file=found.file, at=found.at + block * BLOCK, bytes=size, checksum=found.checksums[block],
                 dtype=dtype)
