"""Each rank is bound to a contiguous share of the CPU cores, so that the cores of one rank share caches and NUMA memory.

Only cores in this process's affinity mask are used. They are ordered by NUMA node, then by physical core, then by
hardware thread, and divided into contiguous shares that differ by at most one physical core. Ranks whose GPUs are nearer to
the first NUMA nodes have the first shares.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from shoal.errors import LaunchError

__all__ = ["CoreShare", "gpu_nodes", "parse_cpu_list", "physical_cores", "restrict", "shares", "usable"]

SYSTEM = Path("/sys/devices/system")
NVIDIA, PCI = Path("/proc/driver/nvidia/gpus"), Path("/sys/bus/pci/devices")


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreShare:
    """The logical cores of one rank (empty: not bound) and its number of compute threads."""

    cores: tuple[int, ...]
    threads: int


def parse_cpu_list(text: str) -> list[int]:
    """Parse the kernel's notation for CPU lists: `0-3,8` is 0, 1, 2, 3 and 8."""
    cores: list[int] = []
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        cores.extend(range(int(first), int(last or first) + 1))
    return cores


def check_usable(cores: Sequence[int]) -> None:
    """Raise `LaunchError` where this process may not use one of these cores."""
    if wrong := sorted(set(cores) - set(usable())):
        raise LaunchError(f"--core-list: {socket.gethostname()} has no core {wrong[0]} for this job; choose from "
                          f"{','.join(map(str, sorted(usable())))}")


def restrict(cores: Sequence[int]) -> None:
    """Use these cores alone from now on; none given: all. Raises `LaunchError` where this process may not use one."""
    check_usable(cores)
    if cores:
        os.sched_setaffinity(0, cores)


def physical_cores(usable: Iterable[int], system: Path = SYSTEM) -> list[tuple[int, ...]]:
    """Group the usable logical cores by physical core, in NUMA order.

    If the kernel gives no topology, each logical core is its own group.
    """
    usable = sorted(set(usable))
    node_of = {core: index for index, node in enumerate(_nodes(system)) for core in node}
    groups: dict[tuple[int, ...], list[int]] = {}
    for core in usable:
        listing = _read(system / f"cpu/cpu{core}/topology/thread_siblings_list")
        groups.setdefault(tuple(parse_cpu_list(listing)) or (core,), []).append(core)
    return sorted((tuple(group) for group in groups.values()), key=lambda group: (node_of.get(group[0], 0), group[0]))


def shares(ranks: int, cores: Sequence[tuple[int, ...]], near: Sequence[int] = ()) -> list[CoreShare]:
    """Divide `cores` (physical cores as tuples of logical ones) into one contiguous share per rank.

    `near` is the NUMA node of each rank's GPU, in whose order ranks get their shares; empty where it is not known. With more
    ranks than cores, no rank is bound, and each rank uses one thread.
    """
    if ranks > len(cores):
        return [CoreShare(cores=(), threads=1)] * ranks
    bounds = [rank * len(cores) // ranks for rank in range(ranks + 1)]
    divided = [CoreShare(cores=tuple(core for group in cores[start:stop] for core in group), threads=stop - start)
               for start, stop in pairwise(bounds)]
    order = sorted(range(ranks), key=lambda rank: near[rank]) if near else range(ranks)
    return [share for _, share in sorted(zip(order, divided, strict=True), key=lambda pair: pair[0])]


def gpu_nodes(ranks: int, visible: str | None = None, *, driver: Path = NVIDIA, bus: Path = PCI) -> list[int]:
    """Return the NUMA node of the GPU of each of `ranks`, without starting CUDA; empty where it is not known.

    `visible` is CUDA_VISIBLE_DEVICES. GPUs have CUDA's numbers in the order of their PCI addresses, if they are of one kind.
    """
    addresses = sorted(folder.name for folder in driver.iterdir()) if driver.is_dir() else []
    if visible is not None:
        chosen = visible.split(",")
        if not all(number.isdecimal() and int(number) < len(addresses) for number in chosen):
            return []
        addresses = [addresses[int(number)] for number in chosen]
    nodes = [_read(bus / address.lower() / "numa_node").strip() for address in addresses]
    if not nodes or not all(node.isdecimal() for node in nodes):
        return []
    return [int(nodes[rank % len(nodes)]) for rank in range(ranks)]


def usable() -> set[int]:
    """Return the logical cores that this process may run on."""
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))


def _nodes(system: Path) -> list[list[int]]:
    folders = sorted((system / "node").glob("node[0-9]*"), key=lambda folder: int(folder.name.removeprefix("node")))
    return [parse_cpu_list(_read(folder / "cpulist")) for folder in folders]


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
