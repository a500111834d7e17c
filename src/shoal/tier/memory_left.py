"""The memory that a process can still allocate: the minimum over the machine and all control groups of the process.

    /proc/meminfo    MemAvailable: memory that can be allocated without swapping
    cgroup v2        <folder>/memory.max less memory.current, for the group in `/proc/self/cgroup` and all its parents
    cgroup v1        the same with <folder>/memory.limit_in_bytes and memory.usage_in_bytes

The file cache of a group is added: it counts as used, but the kernel reclaims it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

__all__ = ["memory_left"]

_UNLIMITED = 1 << 60  # cgroup v1 reports a number near 2^63 for no limit


@dataclass(frozen=True, slots=True, kw_only=True)
class _FileNames:
    limit: str
    current: str
    cache: str


_V1 = _FileNames(limit="memory.limit_in_bytes", current="memory.usage_in_bytes", cache="total_inactive_file")
_V2 = _FileNames(limit="memory.max", current="memory.current", cache="inactive_file")


def memory_left(root: Path = Path("/")) -> int | None:
    """Return the bytes that this process can still allocate; None if the file system under `root` does not tell."""
    limits = [*_of_machine(root / "proc/meminfo"), *_of_groups(root)]
    return max(0, min(limits)) if limits else None


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


def _of_group(folder: Path, names: _FileNames) -> Iterator[int]:
    limit = int((folder / names.limit).read_text())
    if limit < _UNLIMITED:
        cache = _field(folder / "memory.stat", names.cache)
        yield limit - int((folder / names.current).read_text()) + cache


def _field(file: Path, name: str) -> int:
    """Return the number after `name` in a file of such lines; raises ValueError if there is none."""
    for line in file.read_text().splitlines():
        words = line.split()
        if words and words[0] == name:
            return int(words[1])
    raise ValueError(f"{file} has no line {name}")
