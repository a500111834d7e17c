"""The index locates every element of a checkpoint: name -> shape, dtype, ranges; range -> file, byte offset, checksums.

`index.json` is one JSON object. Its first fields (format, version, checksum) can be read by any version. The checksum
covers its last field, `index`. Each rank describes its own files in a `RankPart`, and rank 0 merges the parts.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import combinations, pairwise
from math import prod
from pathlib import Path

from pydantic import JsonValue, TypeAdapter, ValidationError

from shoal.checkpoint.piece import Box, Interval, intersect, overlaps
from shoal.checkpoint.tensor_file import DTYPES
from shoal.errors import CheckpointDamaged, CheckpointError

__all__ = ["INDEX", "VERSION", "File", "Index", "Range", "RankPart", "StoredTensor", "gaps", "merge", "parse", "parse_part"]

INDEX = "index.json"
FORMAT = "shoal checkpoint"
VERSION = 1

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class File:
    """One file of one rank."""

    name: str
    rank: int
    size: int
    header: int
    """Bytes before the data."""
    checksum: int
    """CRC-32 of the header; the checksums of the ranges cover the data."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Range:
    """Elements [start, stop) of a box of a tensor, stored contiguously in a file."""

    file: str
    at: int
    """Byte offset of the range in the file."""
    start: int
    stop: int
    offset: Shape
    size: Shape
    checksums: tuple[int, ...]
    """CRC-32 of each block of `tensor_file.BLOCK` bytes."""

    @property
    def interval(self) -> Interval:
        return Interval(Box(self.offset, self.size), self.start, self.stop)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """One full tensor of the checkpoint."""

    shape: Shape
    dtype: str
    """The safetensors code: F32, BF16, ..."""
    ranges: list[Range]

    @property
    def elements(self) -> int:
        return prod(self.shape)

    @property
    def bytes(self) -> int:
        return self.elements * DTYPES[self.dtype].itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPart:
    """The files, tensor ranges and values that one rank wrote."""

    files: list[File] = field(default_factory=list[File])
    tensors: dict[str, StoredTensor] = field(default_factory=dict[str, StoredTensor])
    shared: JsonValue = None
    private: JsonValue = None

    def dump(self) -> bytes:
        return _PART.dump_json(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Index:
    """The contents of a checkpoint."""

    step: int
    files: list[File]
    tensors: dict[str, StoredTensor]
    shared: JsonValue
    private: list[JsonValue]
    """By rank."""

    def dump(self) -> bytes:
        body = _INDEX.dump_json(self)
        head = json.dumps({"format": FORMAT, "version": VERSION, "checksum": zlib.crc32(body)})
        return head.removesuffix("}").encode() + _INDEX_FIELD + body + b"}\n"


_PART = TypeAdapter(RankPart)
_INDEX = TypeAdapter(Index)
_INDEX_FIELD = b', "index": '


def parse_part(text: bytes) -> RankPart:
    """Parse the output of `RankPart.dump`."""
    return _PART.validate_json(text)


def parse(text: bytes, path: Path) -> Index:
    """Parse the output of `Index.dump`; `path` is for error messages.

    Raises CheckpointDamaged if the text is not an index or is damaged, CheckpointError if it has an unknown version.
    """
    head, _, rest = text.partition(_INDEX_FIELD)
    body = rest.removesuffix(b"}\n")
    try:
        fields = json.loads(head + b"}")
        form, version, checksum = fields["format"], fields["version"], fields["checksum"]
    except (ValueError, KeyError, TypeError):
        raise CheckpointDamaged(f"{path}: damaged, it does not begin with the fields of an index") from None
    if form != FORMAT:
        raise CheckpointError(f"{path}: got the format {form!r}, expected {FORMAT!r}")
    if version != VERSION:
        raise CheckpointError(f"{path}: got format version {version}, this version of Shoal reads {VERSION}; "
                              "use the version of Shoal that wrote it, or a later one")
    if zlib.crc32(body) != checksum or not text.endswith(b"}\n"):
        raise CheckpointDamaged(f"{path}: damaged, the checksum of the index does not match")
    try:
        index = _INDEX.validate_json(body)
    except ValidationError as error:
        raise CheckpointError(f"{path}: this version of Shoal cannot read the index: {error}") from None
    for file in index.files:
        if Path(file.name).name != file.name:
            raise CheckpointError(f"{path}: names the file {file.name!r}, which is outside the checkpoint")
    return index


def merge(parts: Iterable[RankPart], step: int) -> Index:
    """Merge the parts of all ranks. Raises CheckpointError unless the pieces cover every tensor exactly once."""
    files: list[File] = []
    tensors: dict[str, StoredTensor] = {}
    shared: list[JsonValue] = []
    private: list[JsonValue] = []
    faults: list[str] = []
    for rank, part in enumerate(parts):
        files += part.files
        shared.append(part.shared)
        private.append(part.private)
        for name, ours in part.tensors.items():
            stored = tensors.setdefault(name, StoredTensor(shape=ours.shape, dtype=ours.dtype, ranges=[]))
            if (stored.shape, stored.dtype) != (ours.shape, ours.dtype):
                faults.append(f"{name}: rank {rank} has {ours.dtype} {ours.shape}, an earlier rank has "
                              f"{stored.dtype} {stored.shape}")
            else:
                stored.ranges.extend(ours.ranges)
    faults = faults or [f"{name}: {fault}" for name, stored in tensors.items() for fault in gaps(stored)]
    if faults:
        raise CheckpointError("the pieces do not cover every tensor exactly once:\n  " + "\n  ".join(faults))
    return Index(step=step, files=files, tensors=tensors, shared=shared[0], private=private)


def gaps(stored: StoredTensor) -> Iterator[str]:
    """Yield a message for each place where the ranges do not cover a tensor exactly once."""
    covered = sum(r.stop - r.start for r in stored.ranges)
    by_box: dict[Box, list[Interval]] = {}
    for entry in stored.ranges:
        by_box.setdefault(entry.interval.box, []).append(entry.interval)
    for intervals in by_box.values():
        intervals.sort(key=lambda interval: interval.start)
        for before, after in pairwise(intervals):
            if after.start < before.stop:
                yield f"elements [{after.start}, {min(before.stop, after.stop)}) of {_box_name(after.box)} are saved twice"
    for one, other in combinations(by_box, 2):
        if intersect(one, other) is not None and _overlap(by_box[one], by_box[other]):
            yield f"{_box_name(one)} and {_box_name(other)} overlap, so some elements are saved twice"
    if covered < stored.elements:
        where = "".join(_holes(stored, by_box)) if len(by_box) == 1 else ""
        yield f"{stored.elements - covered} of {stored.elements} elements are in no piece{where}"


def _overlap(ones: list[Interval], others: list[Interval]) -> bool:
    return any(next(overlaps(one, other), None) is not None for one in ones for other in others)


def _holes(stored: StoredTensor, by_box: dict[Box, list[Interval]]) -> Iterator[str]:
    ((box, intervals),) = by_box.items()
    if box.elements == stored.elements:
        ends = [0, *(interval.stop for interval in intervals)]
        starts = [*(interval.start for interval in intervals), stored.elements]
        first = next((end, start) for end, start in zip(ends, starts, strict=True) if end < start)
        yield f", the first are [{first[0]}, {first[1]})"


def _box_name(box: Box) -> str:
    return f"the box at {list(box.offset)} of size {list(box.size)}"
