"""A cap on memory: a parent process starts the training under it, reports when it was exceeded, and cleans up.

    cgroup v2, v1   the kernel kills a process that exceeds the limit of its control group
    systemd         the same through systemd-run, where this user may not create a control group
    watch           the parent polls the process's private memory every few milliseconds, and kills it above the cap

All memory of the process counts, torch included. A limit of address space (RLIMIT_AS, RLIMIT_DATA) does not work: a span's
memory stays mapped while its pages are released.
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

from cgroup import ControlGroup, create_groups

UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}
WATCH, SYSTEMD = "watch", "systemd"
POLL_SECONDS = 0.005
"""Seconds between two polls of the watch."""

JOIN = 'echo $$ > "$0" && exec "$@"'
"""Join a control group, then exec the command."""

ENVIRONMENT = {"MALLOC_MMAP_THRESHOLD_": str(1 << 17)}
"""glibc: return freed tensors of 128 KiB and more to the system at once, instead of keeping them in the heap."""


def parse(text: str) -> int:
    """Return the bytes of a size such as 512M, 1.5G, 800MB (decimal) or 512MiB (binary). Raises `ValueError`."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?I?)B?", text.strip().upper())
    if match is None or match[2] not in UNITS or (size := int(float(match[1]) * UNITS[match[2]])) == 0:
        raise ValueError(f"got {text!r}; give a size above 0, such as 512M, 1.5G or 512MiB")
    return size


@dataclass(frozen=True, slots=True, kw_only=True)
class CapMethod:
    """A method to run a command under a cap: its name, a prefix of the command, and the control group, if any."""

    name: str
    prefix: tuple[str, ...] = ()
    group: ControlGroup | None = None

    def start(self, command: Sequence[str]) -> subprocess.Popen[bytes]:
        """Start `command` under the cap."""
        return subprocess.Popen([*self.prefix, *command], env=os.environ | ENVIRONMENT)

    def works(self) -> bool:
        """Whether the method works for a command that does nothing."""
        with suppress(OSError, subprocess.SubprocessError):
            return subprocess.run([*self.prefix, "true"], timeout=10, check=False, capture_output=True).returncode == 0
        return False

    def exceeded(self, code: int) -> bool:
        """Whether the kernel killed a process, which has the exit code `code`, because of the cap."""
        return self.group.killed > 0 if self.group is not None else self.name == SYSTEMD and code == -signal.SIGKILL

    def close(self) -> None:
        if self.group is not None:
            self.group.remove()


def best_method(limit: int) -> CapMethod:
    """Return the first method, in the order above, that works here."""
    for group in create_groups(f"shoal-cap-{os.getpid()}"):
        method = CapMethod(name=group.names.version, group=group, prefix=("sh", "-c", JOIN, str(group.processes)))
        with suppress(OSError):
            group.limit(limit)
            if method.works():
                return method
        method.close()
    if shutil.which("systemd-run"):
        scope = ("systemd-run", "--user", "--scope", "--quiet", "-p", f"MemoryMax={limit}", "-p", "MemorySwapMax=0")
        if (method := CapMethod(name=SYSTEMD, prefix=scope)).works():
            return method
    return CapMethod(name=WATCH)


def run_capped(limit: int, command: Sequence[str], method: CapMethod | None = None) -> int:
    """Run `command`, with the name of the method appended, under a cap of `limit` bytes; return its exit code.

    If the command was killed because it exceeded the cap, prints that and returns 1.
    """
    method = best_method(limit) if method is None else method
    try:
        process = method.start([*command, method.name])
        handlers = {number: signal.signal(number, _forward_to(process)) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            watched = method.name == WATCH and _watch(process, limit)
            code = process.wait()
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)
        if watched or method.exceeded(code):
            print(f"the cap of {limit / 1e6:,.0f} MB was exceeded, and the {'watch' if watched else 'kernel'} killed the "
                  f"training; give a larger --cap, or a smaller --block", file=sys.stderr)
            return 1
        return code if code >= 0 else 128 - code
    finally:
        method.close()


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent exits."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG of linux/prctl.h


def _watch(process: subprocess.Popen[bytes], limit: int) -> bool:
    """Poll the process until it ends; kill it if its private memory exceeds the limit. Returns whether it was killed."""
    while process.poll() is None:
        if _private_bytes(process.pid) > limit:
            process.kill()
            return True
        time.sleep(POLL_SECONDS)
    return False


def _private_bytes(process: int) -> int:
    """Return the resident bytes of a process, without mapped files, whose pages the kernel can drop."""
    with suppress(OSError, ValueError):  # the process has ended
        resident, shared = map(int, Path(f"/proc/{process}/statm").read_text().split()[1:3])
        return (resident - shared) * os.sysconf("SC_PAGESIZE")
    return 0


def _forward_to(process: subprocess.Popen[bytes]) -> Callable[[int, object], None]:
    """Return a handler that forwards a signal; Ctrl-C in a terminal reaches the process by itself."""
    def handler(number: int, frame: object) -> None:
        if number != signal.SIGINT:
            process.send_signal(number)
    return handler
