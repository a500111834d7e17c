"""A checkpoint can be looked at, and checked to the last byte, without the model that it came from."""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from shoal.checkpoint import folder as folders
from shoal.checkpoint.index import File, Index, Range, gaps
from shoal.checkpoint.tensor_file import BLOCK, DTYPES

__all__ = ["Summary", "TensorLine", "VerifyReport", "inspect", "verify"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorLine:
    """One tensor of a checkpoint."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    bytes: int
    ranges: int
    ranks: list[int]
    """The ranks that wrote a range of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """What a checkpoint holds."""

    path: Path
    step: int
    ranks: int
    files: int
    bytes: int
    """Bytes of all its files, without the index."""
    tensors: list[TensorLine]


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyReport:
    """What a check of every byte found."""

    path: Path
    tensors: int
    files: int
    bytes: int
    faults: list[str]


def inspect(folder: str | os.PathLike[str], tag: str | None = None) -> Summary:
    """Summarise the checkpoint `folder/tag` (None: the latest) from its index; raises CheckpointError if there is none."""
    path, index = _load(folder, tag)
    rank_of = {file.name: file.rank for file in index.files}
    lines = [TensorLine(name=name, shape=stored.shape, dtype=DTYPES[stored.dtype], bytes=stored.bytes,
                        ranges=len(stored.ranges), ranks=sorted({rank_of[r.file] for r in stored.ranges}))
             for name, stored in index.tensors.items()]
    return Summary(path=path, step=index.step, ranks=len(index.private), files=len(index.files),
                   bytes=sum(file.size for file in index.files), tensors=lines)


def verify(folder: str | os.PathLike[str], tag: str | None = None) -> VerifyReport:
    """Check every checksum of the checkpoint `folder/tag` (None: the latest), and that every element is there once.

    Raises CheckpointError when there is no checkpoint or its index is damaged; anything else is in the verdict.
    """
    path, index = _load(folder, tag)
    faults = folders.faults(path, index)
    faults += [f"{name}: {gap}" for name, stored in index.tensors.items() for gap in gaps(stored)]
    for file in index.files:
        with suppress(FileNotFoundError):  # among the faults already
            faults += _check(path / file.name, file, index)
    return VerifyReport(path=path, tensors=len(index.tensors), files=len(index.files), faults=faults,
                   bytes=sum(file.size for file in index.files))


def _load(folder: str | os.PathLike[str], tag: str | None) -> tuple[Path, Index]:
    place = Path(folder)
    name = folders.resolve(place, tag)
    path = folders.locate(place, name) or place / name
    return path, folders.load_index(path)


def _check(path: Path, file: File, index: Index) -> Iterator[str]:
    """Read one file to its end and say which of its tensors are damaged."""
    with path.open("rb", buffering=0) as data:
        if zlib.crc32(_read(data.fileno(), file.header, 0)) != file.checksum:
            yield f"{path} (rank {file.rank}): its header is damaged"
        for name, stored in index.tensors.items():
            for found in stored.ranges:
                if found.file == file.name and not _intact(data.fileno(), found, DTYPES[stored.dtype].itemsize):
                    yield f"{name}: damaged in {path} (rank {file.rank}), elements [{found.start}, {found.stop})"


def _intact(descriptor: int, found: Range, width: int) -> bool:
    end = found.at + found.cut.elements * width
    starts = range(found.at, end, BLOCK)
    sums = [zlib.crc32(_read(descriptor, min(BLOCK, end - start), start)) for start in starts]
    return sums == list(found.checksums)


def _read(descriptor: int, size: int, at: int) -> bytes:
    """Read `size` bytes, or as many as there are."""
    data = b""
    while len(data) < size and (more := os.pread(descriptor, size - len(data), at + len(data))):
        data += more
    return data
