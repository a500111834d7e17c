"""Sizes: every spelling, and the unit that a person reads."""

from __future__ import annotations

import argparse

import pytest

from shoal.config.sizes import format_bytes, parse_bytes
from shoal.launch.console import size_argument


@pytest.mark.parametrize(("text", "size"), [
    ("0", 0), ("512", 512), ("512B", 512),
    (" 1 kb ", 1000), ("1K", 1024), ("1KiB", 1024), ("64m", 64 << 20), ("64MB", 64 * 10**6),
    ("1.5 GiB", 3 << 29),
    ("0.5T", 1 << 39), ("2TB", 2 * 10**12), ("9007199254740993", 9007199254740993)])
def test_a_size_is_bytes_by_its_unit(text: str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "GB", "-1", "1e9", "12 apples", "1.5.2M", "1PB", "٣", "1iB", "nan", "9" * 5000])
def test_what_is_no_size_is_named_with_the_form(text: str) -> None:
    with pytest.raises(ValueError, match=r"^got .*; give a size such as 512MiB, 64M or 12GB$"):
        parse_bytes(text)


def test_an_option_takes_one_byte_or_more() -> None:
    assert size_argument("1") == 1
    with pytest.raises(argparse.ArgumentTypeError, match="got '0'; give 1 byte or more"):
        size_argument("0")


@pytest.mark.parametrize(("size", "text"), [
    (0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (64 << 20, "64 MiB"),
    (108_100_000, "103.1 MiB"), (5 << 50, "5120 TiB")])
def test_sizes_are_shown_with_their_unit(size: int, text: str) -> None:
    assert format_bytes(size) == text
