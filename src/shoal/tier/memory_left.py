"""How much memory a process may still take: what the machine has left, and every control group that the process is in.

    /proc/meminfo       MemAvailable: what can be taken without swapping
    version 2           <folder>/memory.max less memory.current, for the group of `/proc/self/cgroup` and those around it
    version 1           the same of <folder>/memory.limit_in_bytes and memory.usage_in_bytes

A group's cache of files counts as taken, and goes when memory is needed: it is left.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

__all__ = ["memory_left"]

_ENDLESS = 1 << 60  # version 1 has no word for it, but a number near 2^63


@dataclass(frozen=True, slots=True, kw_only=True)
class _Names:
    limit: str
    current: str
    cache: str


_V1 = _Names(limit="memory.limit_in_bytes", current="memory.usage_in_bytes", cache="total_inactive_file")
_V2 = _Names(limit="memory.max", current="memory.current", cache="inactive_file")


def memory_left(root: Path = Path("/")) -> int | None:
    """Return the bytes that this process may still take, as the file system under `root` says; None where it does not."""
    found = [*_of_machine(root / "proc/meminfo"), *_of_groups(root)]
    return max(0, min(found)) if found else None


def _of_machine(file: Path) -> Iterator[int]:
    with suppress(OSError, ValueError):
        yield _field(file, "MemAvailable:") * 1024


def _of_groups(root: Path) -> Iterator[int]:
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        number, controllers, path = line.split(":", 2)
        if number == "0":
            names, top = _V2, root / "sys/fs/cgroup"
        elif "memory" in controllers.split(","):
            names, top = _V1, root / "sys/fs/cgroup/memory"
        else:
            continue
        inner = PurePosixPath(path).relative_to("/")
        for folder in (top / inner, *(top / outer for outer in inner.parents)):
            with suppress(OSError, ValueError):  # no such file, or no limit
                yield from _of_group(folder, names)


def _of_group(folder: Path, names: _Names) -> Iterator[int]:
    limit = int((folder / names.limit).read_text())
    if limit < _ENDLESS:
        cache = _field(folder / "memory.stat", names.cache)
        yield limit - int((folder / names.current).read_text()) + cache


def _field(file: Path, name: str) -> int:
    """Return the number behind `name` in a file of such lines; raises ValueError if there is none."""
    for line in file.read_text().splitlines():
        words = line.split()
        if words and words[0] == name:
            return int(words[1])
    raise ValueError(f"{file} has no line {name}")
