"""A tensor file is the safetensors layout, laid out before its bytes exist: header length, JSON header, data.

Entries are ordered by the width of their elements, widest first, so each lies aligned without holes, and the data may be
streamed from one buffer. The `safetensors` library reads what is written here.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import prod
from typing import cast

import torch
from torch import Tensor

__all__ = ["BLOCK", "CODES", "DTYPES", "Entry", "blocks", "checksums", "header", "memory", "widest_first", "write_all"]

BLOCK = 4 << 20
"""Bytes that share one checksum; a multiple of the width of every dtype."""

DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8, "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "C64": torch.complex64,
}
"""The dtypes of the format by their code there."""

CODES: dict[torch.dtype, str] = {dtype: code for code, dtype in DTYPES.items()}

_ALIGNMENT = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One tensor of a file: its key, dtype and shape."""

    key: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


def memory(data: Tensor) -> memoryview:
    """Return the bytes of a one-dimensional uint8 tensor of this machine's memory, shared with it."""
    return memoryview(cast(bytearray, data.numpy()))  # numpy's stubs hide that arrays are buffers


def widest_first(dtype: torch.dtype) -> int:
    """Sort key under which entries that follow each other without holes are all aligned."""
    return -dtype.itemsize


def header(entries: Iterable[Entry], metadata: dict[str, str]) -> bytes:
    """Return everything before the data of a file that holds `entries` one after the other."""
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
    """Cut bytes into blocks of `BLOCK`."""
    for start in range(0, len(data), BLOCK):
        yield data[start : start + BLOCK]


def checksums(data: memoryview) -> list[int]:
    """Return the CRC-32 of each block."""
    return [zlib.crc32(block) for block in blocks(data)]


def write_all(descriptor: int, data: memoryview | bytes) -> None:
    """Write all of `data`, however little the system takes at a time."""
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(descriptor, rest) :]
