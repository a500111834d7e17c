"""Staging copies the pieces of a rank into one buffer in the order of its files, so that training may go on.

The buffer is kept between saves and grows only; it is pinned when a piece lies on an accelerator. What is written later
are slices of it, so a save holds one copy of the rank's state and never a second.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

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

    files: list[StagedFile]
    empty: list[Piece]
    """Pieces without elements: their tensors are known, and in no file."""

    @property
    def bytes(self) -> int:
        return sum(len(file.data) for file in self.files)


class Staging:
    """A buffer of this machine's memory that is filled by one save after the other."""

    def __init__(self) -> None:
        self._buffer = torch.empty(0, dtype=torch.uint8)

    @torch.no_grad()
    def copy(self, pieces: Iterable[Piece], file_bytes: int) -> Staged:
        """Copy `pieces`, cut into files of about `file_bytes` at the pieces' boundaries.

        Raises CheckpointError for pieces that do not fit their tensors or whose dtype the format lacks.
        """
        given = sorted(pieces, key=lambda piece: widest_first(piece.data.dtype))
        _refuse_faults(given)
        kept = [piece for piece in given if piece.start < piece.stop]
        self._reserve(sum(_bytes(p) for p in kept), pinned=any(p.data.is_cuda for p in kept))
        room = memory(self._buffer)
        files: list[StagedFile] = []
        start = at = 0
        group: list[Piece] = []
        for piece in kept:
            if group and at + _bytes(piece) - start > file_bytes:
                files.append(StagedFile(pieces=group, data=room[start:at]))
                start, group = at, []
            place = self._buffer[at : at + _bytes(piece)].view(piece.data.dtype)
            place.copy_(piece.data, non_blocking=True)
            group.append(_without_data(piece))
            at += _bytes(piece)
        files.append(StagedFile(pieces=group, data=room[start:at]))
        for device in {piece.data.device for piece in kept if piece.data.is_cuda}:
            torch.cuda.current_stream(device).synchronize()
        empty = [_without_data(piece) for piece in given if piece.start == piece.stop]
        return Staged(files=files if kept else [], empty=empty)

    def _reserve(self, size: int, *, pinned: bool) -> None:
        if self._buffer.numel() < size or (pinned and not self._buffer.is_pinned()):
            self._buffer = torch.empty(0, dtype=torch.uint8)  # free the old one first
            self._buffer = torch.empty(size, dtype=torch.uint8, pin_memory=pinned)


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
