"""The machine and the versions that a measurement was made with."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from datetime import date
from functools import cache
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).parents[1]
BEFORE = os.getloadavg()[0]
"""Processes that were busy or waited for a processor before this program began, the mean of a minute."""
PEERS = ROOT / ".venv-peers" / "bin" / "python"
_EXTENSIONS = ROOT / "out" / "benchmarks" / "extensions"
"""Where DeepSpeed builds its operators."""


def peer_environment() -> dict[str, str]:
    """Return the variables of a process in the peers' environment: DeepSpeed on the CPU, with that environment's ninja."""
    _unlock_extensions()
    return {"DS_ACCELERATOR": "cpu", "TORCH_EXTENSIONS_DIR": str(_EXTENSIONS),
            "PATH": f"{PEERS.parent}{os.pathsep}{os.environ['PATH']}"}


@cache
def _unlock_extensions() -> None:
    """Remove the locks of builds that were killed: torch would wait for them without end."""
    for lock in _EXTENSIONS.glob("*/lock"):
        lock.unlink(missing_ok=True)


def facts() -> dict[str, str]:
    """Return processor, cores, memory, system, load, versions, commit and date, ready for JSON."""
    return {"date": date.today().isoformat(), "processor": _processor(), "cores": str(len(os.sched_getaffinity(0))),
            "memory": f"{memory() / 2**30:.0f} GiB",
            "system": f"{platform.system()} {platform.release().partition('-')[0]}", "python": platform.python_version(),
            "load": f"{BEFORE:.1f} before the run, {os.getloadavg()[0]:.1f} at its end",
            "torch": _version("torch"), "shoal": _version("shoal"), "deepspeed": _deepspeed(),
            "commit": _commit()}


def memory(groups: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the bytes of memory of the machine, or of the container in which this runs where that may use fewer."""
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for file in ("memory.max", "memory/memory.limit_in_bytes"):  # of cgroups v2 and v1
        with suppress(OSError, ValueError):  # there is no such file, or it says "max"
            limits.append(int((groups / file).read_text()))
    return min(limits)


def available() -> int:
    """Return the bytes of memory that this process can still allocate; its container would kill it for more."""
    from shoal.tier.memory_left import memory_left  # the peers' environment has no Shoal

    return memory() if (left := memory_left()) is None else left


def _version(package: str) -> str:
    """Return the version of a package; one that is only on PYTHONPATH has no metadata."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def _processor() -> str:
    """Return name, family and model: processors of one name may differ in the width of their vectors."""
    found: dict[str, str] = {}
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        key, _, value = line.partition(":")
        found.setdefault(key.strip(), value.strip())
    if "model name" not in found:
        return platform.processor() or platform.machine()
    generation = f" (family {found['cpu family']}, model {found['model']})" if {"cpu family", "model"} <= {*found} else ""
    return found["model name"] + generation


def _deepspeed() -> str:
    if not PEERS.exists():
        return "not installed"
    ask = "from importlib.metadata import version; print(version('deepspeed'))"
    answer = subprocess.run([PEERS, "-c", ask], capture_output=True, text=True, check=False)
    return answer.stdout.strip() or "not installed"


def _commit() -> str:
    try:
        answer = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True,
                                check=False)
    except OSError:  # no git
        return "unknown"
    if not (commit := answer.stdout.strip()):
        return "unknown"
    edited = subprocess.run(["git", "diff", "--quiet", "HEAD", "--", "src", "benchmarks"], cwd=ROOT, check=False).returncode
    return f"{commit} with uncommitted changes" if edited else commit


def changes_since(commit: str, paths: Sequence[str]) -> int | None:
    """Return the number of commits after `commit` that changed `paths`; None where that cannot be told."""
    answer = subprocess.run(["git", "rev-list", "--count", f"{commit}..HEAD", "--", *paths], cwd=ROOT, capture_output=True,
                            text=True, check=False)
    return int(answer.stdout) if answer.returncode == 0 else None


if __name__ == "__main__":
    for name, fact in facts().items():
        sys.stdout.write(f"{name}: {fact}\n")
