"""The checksum of a block of memory: native code where it can be built, else CRC-32. Valid in this process only."""

from __future__ import annotations

import ctypes
import zlib
from functools import cache

from shoal.native.build import load

__all__ = ["checksum"]

_VERSION = 1


def checksum(block: memoryview) -> int:
    """Return the checksum of the writable `block`; it depends on the value and the position of every byte."""
    library = _library()
    if library is None:
        return zlib.crc32(block)
    return library.shoal_checksum(ctypes.addressof(ctypes.c_char.from_buffer(block)) if block else None, block.nbytes)


@cache
def _library() -> ctypes.CDLL | None:
    library = load("checksum")
    if library is None or library.shoal_checksum_version() != _VERSION:
        return None
    library.shoal_checksum.argtypes = (ctypes.c_void_p, ctypes.c_int64)
    library.shoal_checksum.restype = ctypes.c_uint64
    return library
