"""A tensor file has the safetensors format: header length, JSON header, data.

Entries are sorted by element width, widest first, so that each is aligned without padding and the data can be streamed from
one buffer. The `safetensors` library can read these files.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import prod
from typing import cast

import torch
from torch import Tensor

from shoal.native.crc32 import crc32

__all__ = ["BLOCK", "CODES", "DTYPES", "Entry", "blocks", "checksums", "header", "memory", "widest_first", "write_all"]

BLOCK = 4 << 20
"""Bytes per checksum; a multiple of the width of every dtype."""

DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8, "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "C64": torch.complex64,
}
"""The dtypes of the format by their safetensors code."""

CODES: dict[torch.dtype, str] = {dtype: code for code, dtype in DTYPES.items()}

_ALIGNMENT = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """The key, dtype and shape of one tensor of a file."""

    key: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


def memory(data: Tensor) -> memoryview:
    """Return a memoryview that shares the bytes of a one-dimensional uint8 tensor on the CPU."""
    return memoryview(cast(bytearray, data.numpy()))  # numpy's stubs do not declare the buffer protocol


def widest_first(dtype: torch.dtype) -> int:
    """Return the sort key that aligns all entries without padding."""
    return -dtype.itemsize


def header(entries: Iterable[Entry], metadata: dict[str, str]) -> bytes:
    """Return the bytes before the data of a file that contains `entries` in order."""
    described: dict[str, object] = {"__metadata__": metadata}
    at = 0
    for entry in entries:
        described[entry.key] = {"dtype": CODES[entry.dtype], "shape": list(entry.shape),
                                "data_offsets": [at, at + entry.bytes]}
        at += entry.bytes
    text = json.dumps(described, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def blocks(data: memoryview) -> Iterator[memoryview]:
    """Split bytes into blocks of `BLOCK`."""
    for start in range(0, len(data), BLOCK):
        yield data[start : start + BLOCK]


def checksums(data: memoryview) -> list[int]:
    """Return the CRC-32 of each block."""
    return [crc32(block) for block in blocks(data)]


def write_all(descriptor: int, data: memoryview | bytes) -> None:
    """Write all of `data`, in as many system calls as needed."""
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(descriptor, rest) :]
