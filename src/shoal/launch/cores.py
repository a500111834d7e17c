"""Every rank gets its own share of the cores, in the machine's order, so that neighbours share caches and memory.

Only the cores that this process may use count. Cores are ordered by NUMA node, then by physical core, then by hardware
thread, and cut into contiguous shares that differ by at most one physical core.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

__all__ = ["CoreShare", "physical_cores", "read_list", "shares", "usable"]

SYSTEM = Path("/sys/devices/system")


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreShare:
    """What one rank gets: its logical cores (empty: not bound), and how many threads compute on them."""

    cores: tuple[int, ...]
    threads: int


def read_list(text: str) -> list[int]:
    """Read the kernel's notation for sets of cores: `0-3,8` is 0, 1, 2, 3 and 8."""
    cores: list[int] = []
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        cores.extend(range(int(first), int(last or first) + 1))
    return cores


def physical_cores(usable: Iterable[int], system: Path = SYSTEM) -> list[tuple[int, ...]]:
    """Group the usable logical cores by physical core, in NUMA order; without topology each logical core is its own."""
    usable = sorted(set(usable))
    node_of = {core: index for index, node in enumerate(_nodes(system)) for core in node}
    groups: dict[tuple[int, ...], list[int]] = {}
    for core in usable:
        listing = _read(system / f"cpu/cpu{core}/topology/thread_siblings_list")
        groups.setdefault(tuple(read_list(listing)) or (core,), []).append(core)
    return sorted((tuple(group) for group in groups.values()), key=lambda group: (node_of.get(group[0], 0), group[0]))


def shares(ranks: int, cores: Sequence[tuple[int, ...]]) -> list[CoreShare]:
    """Cut `cores` (physical cores as tuples of logical ones) into one contiguous share a rank.

    With more ranks than cores nobody is bound, and each rank computes on one thread.
    """
    if ranks > len(cores):
        return [CoreShare(cores=(), threads=1)] * ranks
    cuts = [rank * len(cores) // ranks for rank in range(ranks + 1)]
    return [CoreShare(cores=tuple(core for group in cores[start:stop] for core in group), threads=stop - start)
            for start, stop in pairwise(cuts)]


def usable() -> set[int]:
    """Return the logical cores that this process may run on."""
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))


def _nodes(system: Path) -> list[list[int]]:
    folders = sorted((system / "node").glob("node[0-9]*"), key=lambda folder: int(folder.name.removeprefix("node")))
    return [read_list(_read(folder / "cpulist")) for folder in folders]


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
