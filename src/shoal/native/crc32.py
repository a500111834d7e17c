"""CRC-32, the values of `zlib.crc32` at memory bandwidth: native code where the processor has instructions, else zlib."""

from __future__ import annotations

import ctypes
import zlib
from functools import cache

import numpy

from shoal.native.build import load

__all__ = ["crc32"]

_VERSION = 1


def crc32(data: bytes | memoryview) -> int:
    """Return the CRC-32 of contiguous `data`, as `zlib.crc32` does; other threads of Python run meanwhile."""
    library = _library()
    if library is None or not data:
        return zlib.crc32(data)
    values = numpy.frombuffer(data, numpy.uint8)
    return library.shoal_crc32(values.ctypes.data, values.size)


@cache
def _library() -> ctypes.CDLL | None:
    library = load("crc32")
    if library is None or library.shoal_crc32_version() != _VERSION or not library.shoal_crc32_is_fast():
        return None
    library.shoal_crc32.argtypes = (ctypes.c_void_p, ctypes.c_int64)
    library.shoal_crc32.restype = ctypes.c_uint32
    return library
