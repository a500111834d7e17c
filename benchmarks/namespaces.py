"""Network namespaces under names that say whose they are, so that whatever a killed run left is found and removed.

A name is `shoal-PID-BORN-NUMBER-PLACE`: the process that made it, when that process started, which of its networks, and
the place in it. A namespace whose process has ended is an orphan: the next run kills what still runs inside and
removes it, and with it every interface, address and queue in it.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

MOUNTS = Path("/var/run/netns")
NAME = re.compile(r"shoal-(?P<pid>\d+)-(?P<born>\d+)-\d+-\w+")
CAPABILITIES = {"CAP_NET_ADMIN": 12, "CAP_SYS_ADMIN": 21}
"""For interfaces and queues, and to make and enter namespaces: names and bits of capabilities(7)."""
PATH = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])  # a user's path often lacks the last two
PATIENCE = 10.0  # seconds for a killed process to be gone


class HostsUnavailable(RuntimeError):
    """This machine, or this user on it, cannot have hosts of its own; the message says what is missing."""


def why_not() -> str:
    """Say why no namespaces can be made here, as far as that is known without trying; empty if nothing stands against it."""
    if sys.platform != "linux":
        return f"network namespaces are a thing of Linux, and this is {sys.platform}"
    for program, package in (("ip", "iproute2"), ("tc", "iproute2"), ("setpriv", "util-linux")):
        if shutil.which(program, path=PATH) is None:
            return f"there is no `{program}` on this machine; install {package} (apt-get install {package})"
    effective = int(re.findall(r"^CapEff:\s*(\w+)", Path("/proc/self/status").read_text(), re.MULTILINE)[0], 16)
    lacking = [name for name, bit in CAPABILITIES.items() if not effective >> bit & 1]
    if lacking:
        return (f"not permitted: {' and '.join(lacking)} {'are' if len(lacking) > 1 else 'is'} needed; run as root, in a "
                "container with --privileged")
    return ""


def tool(*command: str | Path) -> str:
    """Run `ip`, `tc` or `bridge` and return what it printed. Raises `HostsUnavailable` with its complaint."""
    program = shutil.which(str(command[0]), path=PATH) or str(command[0])
    done = subprocess.run([program, *map(str, command[1:])], capture_output=True, text=True, check=False,
                          start_new_session=True)  # a Ctrl-C at the terminal must not end a teardown half-way
    if done.returncode:
        raise HostsUnavailable(f"`{' '.join(map(str, command))}` failed: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout


def name(number: int, place: str) -> str:
    """Return what this process calls the namespace `place` of its network `number`."""
    return f"shoal-{os.getpid()}-{born(os.getpid())}-{number}-{place}"


def born(pid: int) -> str:
    """Return when process `pid` started, which tells it from a later one of its number; empty if it is no more."""
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return ""
    return "" if state in "ZX" else fields[18]


def make(namespace: str) -> None:
    """Make a namespace with its loopback up."""
    tool("ip", "netns", "add", namespace)
    tool("ip", "-n", namespace, "link", "set", "lo", "up")


def entering(namespace: str, *command: str | Path) -> list[str]:
    """Return the command that becomes `command` in the namespace, which the kernel kills when its parent thread ends."""
    ip, setpriv = (shutil.which(program, path=PATH) or program for program in ("ip", "setpriv"))
    return [ip, "netns", "exec", namespace, setpriv, "--pdeathsig", "KILL", *map(str, command)]


def remove(namespace: str) -> None:
    """Kill what runs in the namespace, then remove it; removing one that is gone changes nothing."""
    deadline = time.monotonic() + PATIENCE
    while (MOUNTS / namespace).exists() and (inside := _inside(namespace)):
        if time.monotonic() > deadline:
            raise HostsUnavailable(f"{namespace}: processes {inside} do not end, though killed")
        for pid in inside:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)
    try:
        tool("ip", "netns", "delete", namespace)
    except HostsUnavailable:
        if (MOUNTS / namespace).exists():  # else another run's sweep was faster
            raise


def sweep() -> list[str]:
    """Remove the namespaces of processes that are no more, with what runs in them, and return their names."""
    left = [path.name for path in MOUNTS.glob("shoal-*") if _ownerless(path.name)]
    for namespace in left:
        remove(namespace)
    return left


def _ownerless(namespace: str) -> bool:
    found = NAME.fullmatch(namespace)
    return found is not None and born(int(found["pid"])) != found["born"]


def _inside(namespace: str) -> list[int]:
    try:
        pids = map(int, tool("ip", "netns", "pids", namespace).split())
    except HostsUnavailable:  # removed in between
        return []
    return [pid for pid in pids if pid != os.getpid()]
