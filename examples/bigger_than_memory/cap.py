"""A cap on memory: a process is started under it, and another one keeps it, says when it was exceeded, and cleans up.

    cgroup v2, v1   the kernel ends what exceeds the limit of a control group
    systemd         the same, asked of systemd-run where this user may not make a group
    watch           the keeper looks at the process's own memory every few milliseconds and ends what exceeds the cap

All of a process counts from its first byte, torch included. A limit of address space (RLIMIT_AS, RLIMIT_DATA) would not do:
memory whose pages come and go stays mapped.
"""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from group import Group, make

UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}
WATCH, SYSTEMD = "watch", "systemd"
EVERY = 0.005
"""Seconds between two looks of the watch."""

JOIN = 'echo $$ > "$0" && exec "$@"'
"""Move into a group, then become the command."""

ENVIRONMENT = {"MALLOC_MMAP_THRESHOLD_": str(1 << 17)}
"""glibc: tensors from 128 KiB on leave the process as soon as they are freed, instead of waiting in its heap."""


def parse(text: str) -> int:
    """Return the bytes that `text` says: 512M, 1.5G, 800MB (decimal), 512MiB (binary). Raises `ValueError`."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?I?)B?", text.strip().upper())
    if found is None or found[2] not in UNITS or (size := int(float(found[1]) * UNITS[found[2]])) == 0:
        raise ValueError(f"got {text!r}; give a size above 0, such as 512M, 1.5G or 512MiB")
    return size


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """A way to put a command under a cap: how it is called, what stands before the command, the group that it is in then."""

    name: str
    prefix: tuple[str, ...] = ()
    group: Group | None = None

    def start(self, command: Sequence[str]) -> subprocess.Popen[bytes]:
        """Start `command` under the cap."""
        return subprocess.Popen([*self.prefix, *command], env=os.environ | ENVIRONMENT)

    def works(self) -> bool:
        """Try it on a command that does nothing."""
        with suppress(OSError, subprocess.SubprocessError):
            return subprocess.run([*self.prefix, "true"], timeout=10, check=False, capture_output=True).returncode == 0
        return False

    def exceeded(self, code: int) -> bool:
        """Whether the kernel ended a process, which left the exit code `code`, because of the cap."""
        return self.group.killed > 0 if self.group is not None else self.name == SYSTEMD and code == -signal.SIGKILL

    def close(self) -> None:
        if self.group is not None:
            self.group.remove()


def best_way(limit: int) -> Way:
    """Return the first way in the order above that works here."""
    for group in make(f"shoal-cap-{os.getpid()}"):
        way = Way(name=group.names.version, group=group, prefix=("sh", "-c", JOIN, str(group.processes)))
        with suppress(OSError):
            group.limit(limit)
            if way.works():
                return way
        way.close()
    if shutil.which("systemd-run"):
        scope = ("systemd-run", "--user", "--scope", "--quiet", "-p", f"MemoryMax={limit}", "-p", "MemorySwapMax=0")
        if (way := Way(name=SYSTEMD, prefix=scope)).works():
            return way
    return Way(name=WATCH)


def keep(limit: int, command: Sequence[str], way: Way | None = None) -> int:
    """Run `command`, with the name of the way appended, under a cap of `limit` bytes, and return its exit code.

    Returns 1, and says so, when it was ended because it exceeded the cap.
    """
    way = best_way(limit) if way is None else way
    try:
        process = way.start([*command, way.name])
        handlers = {number: signal.signal(number, _passed_on(process)) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            watched = way.name == WATCH and _watch(process, limit)
            code = process.wait()
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)
        if watched or way.exceeded(code):
            print(f"the cap of {limit / 1e6:,.0f} MB was exceeded, and the {'watch' if watched else 'kernel'} ended the "
                  f"training; give a larger --cap, or a smaller --block", file=sys.stderr)
            return 1
        return code if code >= 0 else 128 - code
    finally:
        way.close()


def end_with_keeper() -> None:
    """Have this process ended when the one that started it is."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG of linux/prctl.h


def _watch(process: subprocess.Popen[bytes], limit: int) -> bool:
    """Look at the process until it ends; end it when its own memory exceeds the limit, and say whether it did."""
    while process.poll() is None:
        if _own(process.pid) > limit:
            process.kill()
            return True
        time.sleep(EVERY)
    return False


def _own(process: int) -> int:
    """Return the bytes of a process that are in memory, without the files that it maps: the system can drop those."""
    with suppress(OSError, ValueError):  # it has ended
        resident, shared = map(int, Path(f"/proc/{process}/statm").read_text().split()[1:3])
        return (resident - shared) * os.sysconf("SC_PAGESIZE")
    return 0


def _passed_on(process: subprocess.Popen[bytes]) -> Callable[[int, object], None]:
    """Return a handler that passes a signal on; Ctrl-C in a terminal has reached the process already."""
    def handler(number: int, frame: object) -> None:
        if number != signal.SIGINT:
            process.send_signal(number)
    return handler
