"""A process can allocate the minimum of what its machine and its control groups have left."""

from __future__ import annotations

from pathlib import Path

import pytest

from shoal.tier.memory_left import memory_left

MEBI = 1 << 20


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text + "\n")
    return root


def machine(mebi: int) -> dict[str, str]:
    return {"proc/meminfo": f"MemTotal: 999999999 kB\nMemAvailable: {mebi * 1024} kB"}


def group(folder: str, limit: str, current: int, cache: int) -> dict[str, str]:
    return {f"{folder}/memory.max": limit, f"{folder}/memory.current": str(current),
            f"{folder}/memory.stat": f"anon 1\ninactive_file {cache}"}


def old_group(folder: str, limit: int, current: int, cache: int) -> dict[str, str]:
    return {f"{folder}/memory.limit_in_bytes": str(limit), f"{folder}/memory.usage_in_bytes": str(current),
            f"{folder}/memory.stat": f"inactive_file 7\ntotal_inactive_file {cache}"}


CASES: dict[str, tuple[dict[str, str], int | None]] = {
    "no information": ({}, None),
    "no group": (machine(900), 900 * MEBI),
    "no memory in the file": ({"proc/meminfo": "MemTotal: 5 kB"}, None),
    "a cgroup v2": (
        {**machine(900), "proc/self/cgroup": "0::/user/job",
         **group("sys/fs/cgroup/user/job", str(512 * MEBI), 300 * MEBI, 40 * MEBI)}, 252 * MEBI),
    "its parent": (
        {**machine(900), "proc/self/cgroup": "0::/user/job", **group("sys/fs/cgroup/user/job", "max", 300 * MEBI, 0),
         **group("sys/fs/cgroup/user", str(400 * MEBI), 390 * MEBI, 0)}, 10 * MEBI),
    "the root of a container": (
        {**machine(900), "proc/self/cgroup": "0::/", **group("sys/fs/cgroup", str(100 * MEBI), 90 * MEBI, 0)}, 10 * MEBI),
    "the machine has less": (
        {**machine(5), "proc/self/cgroup": "0::/", **group("sys/fs/cgroup", str(100 * MEBI), 90 * MEBI, 0)}, 5 * MEBI),
    "over the limit": (
        {**machine(900), "proc/self/cgroup": "0::/", **group("sys/fs/cgroup", str(100 * MEBI), 101 * MEBI, 0)}, 0),
    "a cgroup v1": (
        {**machine(900), "proc/self/cgroup": "9:cpu:/elsewhere\n4:memory:/job\n0::/",
         **old_group("sys/fs/cgroup/memory/job", 512 * MEBI, 300 * MEBI, 40 * MEBI),
         **old_group("sys/fs/cgroup/memory", 9223372036854771712, 800 * MEBI, 0)}, 252 * MEBI),
    "a group without files": ({**machine(900), "proc/self/cgroup": "0::/gone"}, 900 * MEBI),
}


@pytest.mark.parametrize("case", CASES)
def test_memory_left_is_the_minimum_over_machine_and_groups(case: str, tmp_path: Path) -> None:
    files, left = CASES[case]
    assert memory_left(write(tmp_path, files)) == left


def test_memory_left_is_known_on_linux() -> None:
    left = memory_left()
    assert left is None or left > 0
    assert left is not None or not Path("/proc/meminfo").exists()
