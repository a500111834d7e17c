"""Lists of cores, and the prefix that binds a process to its share of them."""

from __future__ import annotations

import os
import shutil
import subprocess

__all__ = ["check_for_numactl_pkg", "get_numa_cores", "get_numactl_cmd", "parse_range", "parse_range_list"]


def parse_range(rng: str) -> range:
    """Return the range of `3` or `3-5`, its end included. Raises ValueError for another form."""
    ends = [int(end) for end in rng.split("-")] if rng and rng.count("-") <= 1 and rng[0].isalnum() and (
        "-" in rng or rng.isdigit()) else None
    if ends is None:
        raise ValueError(f"Bad range: '{rng}', range must be either a number or two number separated by dash")
    if ends[-1] < ends[0]:
        raise ValueError(f"Bad range: '{rng}', range end must larger than or equal to start")
    return range(ends[0], ends[-1] + 1)


def parse_range_list(range_str: str) -> list[int]:
    """Return the numbers of `0-2,5`. Raises ValueError unless they ascend."""
    numbers: list[int] = []
    for part in range_str.split(","):
        own = parse_range(part)
        if numbers and own[0] <= numbers[-1]:
            raise ValueError(f"Bad range: '{range_str}', sub ranges must not overlap with each other and should be in "
                             "ascend order")
        numbers += own
    return numbers


def get_numa_cores() -> list[list[int]]:
    """Return the cores of each memory node, by `numactl --hardware`; nothing without that command."""
    if shutil.which("numactl") is None:
        return []
    shown = subprocess.run(["numactl", "--hardware"], capture_output=True, text=True, check=False).stdout
    return [[int(core) for core in line.partition(":")[2].split()] for line in shown.splitlines()
            if line.startswith("node ") and " cpus:" in line]


def check_for_numactl_pkg() -> bool:
    """Whether the command numactl is installed."""
    return shutil.which("numactl") is not None


def get_numactl_cmd(bind_core_list: str | None, num_local_procs: int, local_rank: int) -> tuple[int, list[str]]:
    """Return the cores of each of `num_local_procs` processes, and the prefix that binds process `local_rank` to its own.

    Without `bind_core_list` all cores that this process may use are shared.
    """
    cores = sorted(os.sched_getaffinity(0)) if bind_core_list is None else parse_range_list(bind_core_list)
    share = len(cores) // num_local_procs
    own = cores[local_rank * share:(local_rank + 1) * share]
    if not own:
        raise ValueError(f"bind_core_list: {len(cores)} cores for {num_local_procs} processes; give at least one for each")
    return share, ["numactl", "-C", f"{own[0]}-{own[-1]}" if own == list(range(own[0], own[-1] + 1)) and len(own) > 1
                   else ",".join(map(str, own))]
