"""`crc32` gives the values of `zlib.crc32`, with native code and without it."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.native import crc32 as module
from shoal.native.crc32 import crc32


@given(st.binary(max_size=700), st.integers(0, 80))
def test_the_values_are_those_of_zlib_at_any_size_and_address(content: bytes, start: int) -> None:
    assert crc32(memoryview(content)[start:]) == zlib.crc32(content[start:])


@pytest.mark.parametrize("size", [0, 1, 15, 16, 63, 64, 65, 127, 128, 4095, 4096, (4 << 20) - 1, 4 << 20])
def test_memory_that_can_be_written_has_the_same_value(size: int) -> None:
    content = bytearray(Random(size).randbytes(size))
    assert crc32(memoryview(content)) == zlib.crc32(content)


@pytest.fixture
def reloaded() -> Iterator[None]:
    """The library is loaded anew in the test, and again after it."""
    module._library.cache_clear()  # pyright: ignore[reportPrivateUsage]
    yield
    module._library.cache_clear()  # pyright: ignore[reportPrivateUsage]


def test_without_native_code_zlib_computes(reloaded: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "load", dict[str, None]().get)
    assert crc32(b"shoal" * 100) == zlib.crc32(b"shoal" * 100)


def test_native_code_computes_where_the_processor_has_instructions(reloaded: None, monkeypatch: pytest.MonkeyPatch) -> None:
    library = module.load("crc32")
    if library is None or not library.shoal_crc32_is_fast():
        pytest.skip("native code needs a C++ compiler, and PCLMULQDQ or the CRC instructions of ARM")
    monkeypatch.setattr(zlib, "crc32", None)
    assert crc32(b"123456789") == 0xCBF43926  # the check value of the catalogues of CRCs
