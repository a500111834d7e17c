"""Staging copies the pieces of a rank into one buffer in the order of its files, so that training may go on.

The buffer is kept between saves and grows only; it is pinned when a piece lies on an accelerator. What is written later
are slices of it, so a save holds one copy of the rank's state and never a second. State that does not rest in memory is
staged file by file, each in the same buffer.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from shoal.checkpoint.piece import Piece
from shoal.checkpoint.tensor_file import CODES, Entry, memory, widest_first
from shoal.errors import CheckpointError

__all__ = ["Staged", "StagedFile", "Staging"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StagedFile:
    """One file to be: its pieces in order, and the slice of the buffer that is its data."""

    pieces: list[Piece]
    """Without their data, which may be training again."""
    data: memoryview

    @property
    def entries(self) -> list[Entry]:
        return [Entry(key=_key(p), dtype=p.data.dtype, shape=(p.stop - p.start,)) for p in self.pieces]


@dataclass(frozen=True, slots=True, kw_only=True)
class Staged:
    """All that one rank is to write."""

    files: Iterable[StagedFile]
    """Each is undefined once the next is asked for, if they are staged one by one."""
    empty: list[Piece]
    """Pieces without elements: their tensors are known, and in no file."""
    bytes: int


class Staging:
    """A buffer of this machine's memory that is filled by one save after the other."""

    def __init__(self) -> None:
        self._buffer = torch.empty(0, dtype=torch.uint8)

    @torch.no_grad()
    def copy(self, pieces: Iterable[Piece], file_bytes: int) -> Staged:
        """Copy `pieces`, cut into files of about `file_bytes` at the pieces' boundaries.

        Where some have to be brought into memory, each file is staged as it is asked for: until then the pieces must stay
        as they are. Raises CheckpointError for pieces that do not fit their tensors or whose dtype the format lacks.
        """
        given = sorted(pieces, key=lambda piece: widest_first(piece.data.dtype))
        _refuse_faults(given)
        kept = [piece for piece in given if piece.start < piece.stop]
        groups, sizes = _groups(kept, file_bytes), [_bytes(piece) for piece in kept]
        away = any(piece.hold is not None for piece in kept)
        self._reserve(max((sum(map(_bytes, group)) for group in groups), default=0) if away else sum(sizes),
                      pinned=any(piece.data.is_cuda for piece in kept))
        files = (self._stage(group, 0) for group in groups)
        if not away:
            starts = accumulate((sum(map(_bytes, group)) for group in groups), initial=0)
            files = [self._stage(group, start) for group, start in zip(groups, starts, strict=False)]
        empty = [_without_data(piece) for piece in given if piece.start == piece.stop]
        return Staged(files=files, empty=empty, bytes=sum(sizes))

    @torch.no_grad()
    def _stage(self, group: list[Piece], start: int) -> StagedFile:
        """Copy the pieces of one file to byte `start` of the buffer."""
        at = start
        for piece in group:
            with nullcontext() if piece.hold is None else piece.hold(False):
                self._buffer[at:at + _bytes(piece)].view(piece.data.dtype).copy_(piece.data, non_blocking=True)
            at += _bytes(piece)
        for device in {piece.data.device for piece in group if piece.data.is_cuda}:
            torch.cuda.current_stream(device).synchronize()
        return StagedFile(pieces=[_without_data(piece) for piece in group], data=memory(self._buffer)[start:at])

    def _reserve(self, size: int, *, pinned: bool) -> None:
        if self._buffer.numel() < size or (pinned and not self._buffer.is_pinned()):
            self._buffer = torch.empty(0, dtype=torch.uint8)  # free the old one first
            self._buffer = torch.empty(size, dtype=torch.uint8, pin_memory=pinned)


def _groups(pieces: list[Piece], file_bytes: int) -> list[list[Piece]]:
    """Divide pieces into files of about `file_bytes`, a larger piece alone."""
    groups: list[list[Piece]] = []
    room = 0
    for piece in pieces:
        if not groups or _bytes(piece) > room:
            groups.append([])
            room = file_bytes
        groups[-1].append(piece)
        room -= _bytes(piece)
    return groups


def _bytes(piece: Piece) -> int:
    return (piece.stop - piece.start) * piece.data.dtype.itemsize


def _refuse_faults(pieces: Iterable[Piece]) -> None:
    faults = [f"{piece.name}: {fault}" for piece in pieces if (fault := piece.fault() or _dtype_fault(piece.data))]
    if faults:
        raise CheckpointError("pieces that cannot be saved:\n  " + "\n  ".join(faults))


def _dtype_fault(data: Tensor) -> str | None:
    if data.dtype in CODES:
        return None
    return f"got {data.dtype}, a checkpoint holds {', '.join(str(d).removeprefix('torch.') for d in CODES)}"


def _without_data(piece: Piece) -> Piece:
    box = piece.cut.box if piece.offset is not None else None
    return Piece(name=piece.name, shape=tuple(piece.shape), start=piece.start, stop=piece.stop,
                 data=torch.empty(0, dtype=piece.data.dtype), offset=box and tuple(box.offset), size=box and tuple(box.size))


def _key(piece: Piece) -> str:
    box = "" if piece.offset is None else f"@{piece.offset}+{piece.size}".replace(" ", "")
    return f"{piece.name}{box}[{piece.start}:{piece.stop}]"
