"""The index says where every element of a checkpoint lies: name -> shape, dtype, ranges; range -> file, byte, checksums.

`index.json` is one JSON object whose first fields (format, version, checksum) may be read by any version, and whose last
field, `index`, is covered by the checksum. Each rank describes its own files in a `RankPart`; rank 0 merges the parts.
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
from shoal.errors import CheckpointError

__all__ = ["INDEX", "VERSION", "File", "Index", "Range", "RankPart", "Stored", "gaps", "merge", "parse", "parse_part"]

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
    """CRC-32 of the header; the data is covered by the ranges."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Range:
    """Elements [start, stop) of a box of a tensor, stored one after the other in a file."""

    file: str
    at: int
    """The byte of the file where the range begins."""
    start: int
    stop: int
    offset: Shape
    size: Shape
    checksums: tuple[int, ...]
    """CRC-32 of each block of `tensor_file.BLOCK` bytes."""

    @property
    def cut(self) -> Interval:
        return Interval(Box(self.offset, self.size), self.start, self.stop)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """One logical tensor."""

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
    """What one rank wrote."""

    files: list[File] = field(default_factory=list[File])
    tensors: dict[str, Stored] = field(default_factory=dict[str, Stored])
    shared: JsonValue = None
    private: JsonValue = None

    def dump(self) -> bytes:
        return _PART.dump_json(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Index:
    """A whole checkpoint."""

    step: int
    files: list[File]
    tensors: dict[str, Stored]
    shared: JsonValue
    private: list[JsonValue]
    """By rank."""

    def dump(self) -> bytes:
        body = _INDEX.dump_json(self)
        head = json.dumps({"format": FORMAT, "version": VERSION, "checksum": zlib.crc32(body)})
        return head.removesuffix("}").encode() + _SEAM + body + b"}\n"


_PART = TypeAdapter(RankPart)
_INDEX = TypeAdapter(Index)
_SEAM = b', "index": '


def parse_part(text: bytes) -> RankPart:
    """Read what `RankPart.dump` wrote."""
    return _PART.validate_json(text)


def parse(text: bytes, path: Path) -> Index:
    """Read what `Index.dump` wrote; `path` is for messages.

    Raises CheckpointError when the text is no index, is of an unknown version, or is damaged.
    """
    head, _, rest = text.partition(_SEAM)
    body = rest.removesuffix(b"}\n")
    try:
        facts = json.loads(head + b"}")
        form, version, checksum = facts["format"], facts["version"], facts["checksum"]
    except (ValueError, KeyError, TypeError):
        raise CheckpointError(f"{path}: damaged, its first bytes are no head of an index") from None
    if form != FORMAT:
        raise CheckpointError(f"{path}: got the format {form!r}, expected {FORMAT!r}")
    if version != VERSION:
        raise CheckpointError(f"{path}: got format version {version}, this Shoal reads version {VERSION}; "
                              "read it with the Shoal that wrote it, or a later one")
    if zlib.crc32(body) != checksum or not text.endswith(b"}\n"):
        raise CheckpointError(f"{path}: damaged, the checksum of the index does not match")
    try:
        index = _INDEX.validate_json(body)
    except ValidationError as error:
        raise CheckpointError(f"{path}: not an index that this Shoal can read: {error}") from None
    for file in index.files:
        if Path(file.name).name != file.name:
            raise CheckpointError(f"{path}: names the file {file.name!r}, which is outside of the checkpoint")
    return index


def merge(parts: Iterable[RankPart], step: int) -> Index:
    """Join what the ranks wrote; raises CheckpointError unless the pieces cover every tensor exactly once."""
    files: list[File] = []
    tensors: dict[str, Stored] = {}
    shared: list[JsonValue] = []
    private: list[JsonValue] = []
    faults: list[str] = []
    for rank, part in enumerate(parts):
        files += part.files
        shared.append(part.shared)
        private.append(part.private)
        for name, ours in part.tensors.items():
            stored = tensors.setdefault(name, Stored(shape=ours.shape, dtype=ours.dtype, ranges=[]))
            if (stored.shape, stored.dtype) != (ours.shape, ours.dtype):
                faults.append(f"{name}: rank {rank} has {ours.dtype} {ours.shape}, a rank before it has "
                              f"{stored.dtype} {stored.shape}")
            else:
                stored.ranges.extend(ours.ranges)
    faults = faults or [f"{name}: {fault}" for name, stored in tensors.items() for fault in gaps(stored)]
    if faults:
        raise CheckpointError("the pieces do not make whole tensors:\n  " + "\n  ".join(faults))
    return Index(step=step, files=files, tensors=tensors, shared=shared[0], private=private)


def gaps(stored: Stored) -> Iterator[str]:
    """Say where the ranges of a tensor fail to cover it exactly once."""
    held = sum(r.stop - r.start for r in stored.ranges)
    by_box: dict[Box, list[Interval]] = {}
    for found in stored.ranges:
        by_box.setdefault(found.cut.box, []).append(found.cut)
    for cuts in by_box.values():
        cuts.sort(key=lambda cut: cut.start)
        for before, after in pairwise(cuts):
            if after.start < before.stop:
                yield f"elements [{after.start}, {min(before.stop, after.stop)}) of {_named(after.box)} are held twice"
    for one, other in combinations(by_box, 2):
        if intersect(one, other) is not None and _touch(by_box[one], by_box[other]):
            yield f"{_named(one)} and {_named(other)} hold some elements twice"
    if held < stored.elements:
        where = "".join(_holes(stored, by_box)) if len(by_box) == 1 else ""
        yield f"{stored.elements - held} of {stored.elements} elements are in no piece{where}"


def _touch(ones: list[Interval], others: list[Interval]) -> bool:
    return any(next(overlaps(one, other), None) is not None for one in ones for other in others)


def _holes(stored: Stored, by_box: dict[Box, list[Interval]]) -> Iterator[str]:
    ((box, cuts),) = by_box.items()
    if box.elements == stored.elements:
        ends = [0, *(cut.stop for cut in cuts)]
        starts = [*(cut.start for cut in cuts), stored.elements]
        first = next((end, start) for end, start in zip(ends, starts, strict=True) if end < start)
        yield f", the first are [{first[0]}, {first[1]})"


def _named(box: Box) -> str:
    return f"the box at {list(box.offset)} of size {list(box.size)}"
