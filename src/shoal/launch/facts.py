"""Facts of a host, and what is wrong with them: versions that differ, a clock that is off, too little memory or disk."""

from __future__ import annotations

import os
import platform
import shutil
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata

from shoal.config.sizes import format_bytes
from shoal.version import __version__

__all__ = ["Facts", "disagreements", "faults", "gather"]

CLOCK = 1.0
"""Seconds that a clock may differ from the launcher's."""
SHARED_MEMORY = 64 << 20
"""Bytes of /dev/shm that a host must have free: loaders of data and peer memory use it."""
DISK = 1 << 30
"""Bytes that the disk of the working folder must have free."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """Versions on a host, and what it has."""

    python: str
    torch: str
    shoal: str
    cores: int
    memory: int
    shared_memory: int
    """Free bytes of /dev/shm."""
    disk: int
    """Free bytes of the working folder's disk."""
    clock: float
    """Seconds since the epoch."""


def gather(folder: str) -> Facts:
    """Return the facts of this host, without importing torch."""
    try:
        torch = metadata.version("torch").partition("+")[0]
    except metadata.PackageNotFoundError:
        torch = "none"
    shared = shutil.disk_usage("/dev/shm").free if os.path.isdir("/dev/shm") else 0
    return Facts(python=platform.python_version(), torch=torch, shoal=__version__, cores=len(os.sched_getaffinity(0)),
                 memory=os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), shared_memory=shared,
                 disk=shutil.disk_usage(folder).free, clock=time.time())


def disagreements(host: str, facts: Facts, here: Facts) -> Iterator[str]:
    """Yield the versions in which a host differs from the launcher's, each with its remedy."""
    for name, found, wanted in (("Python", _minor(facts.python), _minor(here.python)), ("torch", facts.torch, here.torch),
                                ("shoal", facts.shoal, here.shoal)):
        if found != wanted:
            yield f"{host}: {name} is {found}, and {wanted} here; install {name} {wanted} there, in {sys.executable}"


def faults(host: str, facts: Facts, *, offset: float) -> Iterator[str]:
    """Yield what a host lacks, each with its remedy; `offset` is its clock minus the launcher's."""
    if abs(offset) > CLOCK:
        yield f"{host}: the clock is {offset:+.1f} s off; set it by NTP (chronyc makestep), or logs and files will mislead"
    if facts.shared_memory < SHARED_MEMORY:
        yield (f"{host}: /dev/shm has {format_bytes(facts.shared_memory)} free, and needs {format_bytes(SHARED_MEMORY)}; "
               "free it, or mount it larger (mount -o remount,size=2G /dev/shm; docker run --shm-size 2g)")
    if facts.disk < DISK:
        yield f"{host}: the disk of the working folder has {format_bytes(facts.disk)} free; make room for checkpoints"


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])
