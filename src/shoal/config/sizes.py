"""Sizes in bytes as people write and read them.

`KB`, `MB`, `GB` and `TB` are powers of 1000, `KiB` to `TiB` powers of 1024. A letter alone (`512M`) is a power of 1024, as
fio, docker and dd take it.
"""

from __future__ import annotations

import re

__all__ = ["format_bytes", "parse_bytes"]

_SHOWN = ("B", "KiB", "MiB", "GiB", "TiB")
_PREFIXES = "KMGT"


def parse_bytes(text: str) -> int:
    """Return the bytes that a text such as "512", "64M", "12GB" or "1.5 GiB" names. Raises `ValueError` for another one."""
    match = re.fullmatch(r"(\d{1,18}(?:\.\d{1,18})?)\s*(?:([KMGT])(I?B)?|B)?", text.strip().upper(), re.ASCII)
    if match is None:
        raise ValueError(f"got {text!r}; give a size such as 512MiB, 64M or 12GB")
    number, prefix, ending = match.groups()
    unit = 1 if prefix is None else (1000 if ending == "B" else 1024) ** (_PREFIXES.index(prefix) + 1)
    return int(number) * unit if number.isdigit() else int(float(number) * unit)


def format_bytes(size: float) -> str:
    """Return a size with its unit: 1536 is 1.5 KiB."""
    power = 0
    while size >= 1024 and power < len(_SHOWN) - 1:
        size, power = size / 1024, power + 1
    return f"{size:.4g} {_SHOWN[power]}"
