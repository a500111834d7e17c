"""`inspect` lists the tensors of a checkpoint and `verify` checks every byte, both without the model."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from shoal.checkpoint import folder as folders
from shoal.checkpoint.index import File, Index, Range, gaps
from shoal.checkpoint.tensor_file import BLOCK, DTYPES
from shoal.native.crc32 import crc32

__all__ = ["Summary", "TensorLine", "VerifyReport", "inspect", "verify"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorLine:
    """The properties of one tensor of a checkpoint."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    bytes: int
    ranges: int
    ranks: list[int]
    """The ranks that wrote a range of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """The contents of a checkpoint."""

    path: Path
    step: int
    ranks: int
    files: int
    bytes: int
    """Bytes of all files, without the index."""
    tensors: list[TensorLine]


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyReport:
    """The result of a check of every byte."""

    path: Path
    tensors: int
    files: int
    bytes: int
    faults: list[str]


def inspect(folder: str | os.PathLike[str], tag: str | None = None) -> Summary:
    """Summarise the checkpoint `folder/tag` (None: the latest) from its index. Raises CheckpointError if there is none."""
    path, index = _load(folder, tag)
    rank_of = {file.name: file.rank for file in index.files}
    lines = [TensorLine(name=name, shape=stored.shape, dtype=DTYPES[stored.dtype], bytes=stored.bytes,
                        ranges=len(stored.ranges), ranks=sorted({rank_of[r.file] for r in stored.ranges}))
             for name, stored in index.tensors.items()]
    return Summary(path=path, step=index.step, ranks=len(index.private), files=len(index.files),
                   bytes=sum(file.size for file in index.files), tensors=lines)


def verify(folder: str | os.PathLike[str], tag: str | None = None) -> VerifyReport:
    """Check every checksum of the checkpoint `folder/tag` (None: the latest), and that every element is saved once.

    Raises CheckpointError if there is no checkpoint or its index is damaged; the report lists all other faults.
    """
    path, index = _load(folder, tag)
    faults = folders.faults(path, index)
    faults += [f"{name}: {gap}" for name, stored in index.tensors.items() for gap in gaps(stored)]
    for file in index.files:
        with suppress(FileNotFoundError):  # already reported as missing
            faults += _check(path / file.name, file, index)
    return VerifyReport(path=path, tensors=len(index.tensors), files=len(index.files), faults=faults,
                        bytes=sum(file.size for file in index.files))


def _load(folder: str | os.PathLike[str], tag: str | None) -> tuple[Path, Index]:
    parent = Path(folder)
    name = folders.resolve(parent, tag)
    path = folders.locate(parent, name) or parent / name
    return path, folders.load_index(path)


def _check(path: Path, file: File, index: Index) -> Iterator[str]:
    """Read one whole file and yield a message for each damaged tensor range."""
    with path.open("rb", buffering=0) as data:
        if crc32(_read(data.fileno(), file.header, 0)) != file.checksum:
            yield f"{path} (rank {file.rank}): its header is damaged"
        for name, stored in index.tensors.items():
            for entry in stored.ranges:
                if entry.file == file.name and not _intact(data.fileno(), entry, DTYPES[stored.dtype].itemsize):
                    yield f"{name}: damaged in {path} (rank {file.rank}), elements [{entry.start}, {entry.stop})"


def _intact(descriptor: int, entry: Range, width: int) -> bool:
    end = entry.at + entry.interval.elements * width
    starts = range(entry.at, end, BLOCK)
    sums = [crc32(_read(descriptor, min(BLOCK, end - start), start)) for start in starts]
    return sums == list(entry.checksums)


def _read(descriptor: int, size: int, at: int) -> bytes:
    """Read `size` bytes, or fewer at the end of the file."""
    data = b""
    while len(data) < size and (more := os.pread(descriptor, size - len(data), at + len(data))):
        data += more
    return data
