"""A foreign checkpoint is a set of pieces that rest in mapped files, and of values; its snapshot fills any other piece."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from shoal.checkpoint import Piece, Ranks, Snapshot
from shoal.checkpoint.piece import overlaps
from shoal.errors import CheckpointError

__all__ = ["ForeignCheckpoint", "PieceSnapshot"]

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeignCheckpoint:
    """The tensors and values of one checkpoint, under the names that Shoal gives them (`engine/training_state.py`)."""

    step: int
    """Optimizer steps that had been taken."""
    ranks: int
    """Ranks that wrote the checkpoint."""
    shared: dict[str, object]
    pieces: dict[str, list[Piece]] = field(default_factory=dict[str, list[Piece]])
    groups: list[list[str]] = field(default_factory=list[list[str]])
    """The names of the parameters of each optimizer group; empty where they are not known."""
    unsure: set[str] = field(default_factory=set[str])
    """Names that are a parameter or a buffer: the checkpoint does not tell, and has them as both."""

    def add(self, name: str, shape: Sequence[int], start: int, data: Tensor) -> None:
        """Add elements [start, start + len(data)) of the tensor `name`."""
        self.pieces.setdefault(name, []).append(Piece(name=name, shape=tuple(shape), start=start, stop=start + len(data),
                                                      data=data))

    def add_whole(self, name: str, data: Tensor) -> None:
        """Add a whole tensor, unless another file has it already."""
        if name not in self.pieces:
            self.add(name, data.shape, 0, data.reshape(-1))

    def add_either(self, name: str, data: Tensor) -> None:
        """Add what may be a parameter or a buffer, unless a master shows that it is a parameter."""
        if f"weight/{name}" not in self.pieces:
            self.unsure.add(name)
            self.add_whole(f"weight/{name}", data)
            self.add_whole(f"buffer/{name}", data)

    def parameters(self) -> dict[str, list[int]]:
        """Return the shapes of what is known to be a parameter."""
        names = {name.partition("/")[2]: pieces for name, pieces in self.pieces.items() if name.startswith("weight/")}
        return {name: list(pieces[0].shape) for name, pieces in names.items() if name not in self.unsure}

    def add_groups(self, groups: Iterable[Iterable[str]]) -> None:
        """Add names to the optimizer groups, each to that of its index: pipeline stages hold parts of all groups."""
        for index, names in enumerate(groups):
            if index == len(self.groups):
                self.groups.append([])
            self.groups[index] += [name for name in names if name not in self.groups[index]]

    def add_missing(self, other: ForeignCheckpoint) -> None:
        """Add the tensors of `other` that are not there: pipeline stages save copies of what they share."""
        self.pieces.update({name: pieces for name, pieces in other.pieces.items() if name not in self.pieces})
        self.add_groups(other.groups)

    def rename(self, old: str, new: str) -> None:
        """Give the tensors of parameter `old` the name `new`."""
        for name in [name for name in self.pieces if name.partition("/")[2] == old]:
            kind = name.partition("/")[0]
            self.pieces[f"{kind}/{new}"] = [
                Piece(name=f"{kind}/{new}", shape=piece.shape, start=piece.start, stop=piece.stop, data=piece.data)
                for piece in self.pieces.pop(name)]
        self.groups[:] = [[new if name == old else name for name in group] for group in self.groups]

    def check_complete(self, path: Path) -> None:
        """Raise CheckpointError unless every element of every tensor is in exactly one piece."""
        faults: list[str] = []
        for name, pieces in self.pieces.items():
            end = 0
            for piece in sorted(pieces, key=lambda piece: piece.start):
                if piece.start != end:
                    break
                end = piece.stop
            if end != prod(pieces[0].shape) or end != sum(piece.stop - piece.start for piece in pieces):
                faults.append(f"{name}: elements from {end} of {prod(pieces[0].shape)} are missing or saved twice")
        if faults:
            raise CheckpointError("\n  ".join([f"{path}: the files of the ranks do not cover every tensor:", *faults]))


class PieceSnapshot(Snapshot):
    """A snapshot of `ForeignCheckpoint`."""

    def __init__(self, path: Path, contents: ForeignCheckpoint, ranks: Ranks) -> None:
        super().__init__(path, ranks)
        self._contents = contents
        self._sources = contents.pieces

    @property
    def step(self) -> int:
        return self._contents.step

    @property
    def ranks(self) -> int:
        return self._contents.ranks

    def names(self) -> list[str]:
        return list(self._sources)

    def __contains__(self, name: str) -> bool:
        return name in self._sources

    def shape(self, name: str) -> Shape:
        return self._first(name).shape

    def dtype(self, name: str) -> torch.dtype:
        return self._first(name).data.dtype

    @cached_property
    def shared(self) -> dict[str, object]:
        return self._contents.shared

    def private(self, rank: int) -> dict[str, object]:
        raise CheckpointError(f"{self.path}: DeepSpeed's checkpoints hold no values of single ranks")

    def _first(self, name: str) -> Piece:
        if name not in self._sources:
            raise CheckpointError(f"{self.path}: has no tensor {name!r}")
        return self._sources[name][0]

    @torch.no_grad()
    def _fill(self, pieces: list[Piece]) -> None:
        if faults := [fault for piece in pieces if (fault := self._fault(piece)) is not None]:
            raise CheckpointError("\n  ".join(["the checkpoint does not match the request:", *faults]))
        for piece in pieces:
            self._fill_one(piece)

    def _fill_one(self, piece: Piece) -> None:
        copies = [(source, copy) for source in self._sources[piece.name]
                  for copy in overlaps(source.interval, piece.interval)]
        missing = piece.interval.elements - sum(copy.elements for _, copy in copies)
        if missing:
            raise CheckpointError(f"{piece.name}: {missing} of elements [{piece.start}, {piece.stop}) were not saved")
        if piece.hold is None:
            for source, copy in copies:
                copy.copy(source.data, piece.data)
        else:
            with piece.hold(True):
                for source, copy in copies:
                    copy.copy(source.data, piece.data)


