"""Hosts with all that a cluster's launcher expects of one: a name, processes, a /dev/shm and an ssh server of their own.

    with Machines(3) as machines:
        machines.execute(0, ["ssh", "node1", "hostname"])

A machine is a network namespace of `hosts.py` whose first process has namespaces of names, mounts, memory and processes
too: when it ends, the kernel ends every process of the machine. The machines share the file system, but for /run, /tmp/own,
/dev/shm, and the files of /etc that name hosts and configure ssh. Any of them logs in to any other with a key made for them.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from hosts import Hosts
from namespaces import PATH, HostsUnavailable

SECONDS = 20.0
"""Seconds that a machine may take until its ssh server listens."""
NAMESPACES = ("--uts", "--mount", "--ipc", "--pid")


class Machines:
    """`count` machines named node0, node1, ...; with `shm` bytes of /dev/shm each. Leaving it ends all that runs on them."""

    def __init__(self, count: int, *, rate: str = "unlimited", shm: str = "256m") -> None:
        self.hosts = Hosts(count, rate=rate)
        self.names = [f"node{number}" for number in range(count)]
        self.shm = shm
        self.folder = Path()
        self.processes: list[subprocess.Popen[bytes]] = []
        self._leave = ExitStack()

    def __enter__(self) -> Self:
        for program, package in (("sshd", "openssh-server"), ("ssh-keygen", "openssh-client"), ("nsenter", "util-linux")):
            if shutil.which(program, path=PATH) is None:
                raise HostsUnavailable(f"there is no `{program}` on this machine; apt-get install {package}")
        with ExitStack() as leave:
            self.folder = Path(leave.enter_context(tempfile.TemporaryDirectory(prefix="machines-")))
            leave.enter_context(self.hosts)
            leave.callback(self._end)
            self._write()
            self.processes = [self._boot(number) for number in range(len(self.names))]
            for number in range(len(self.names)):
                self._await(number)
            self._leave = leave.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._leave.close()

    def popen(self, number: int, command: Sequence[str | Path], *, env: Mapping[str, str] | None = None,
              **options: Any) -> subprocess.Popen[Any]:
        """Start a command on a machine, with `env` added to this process's variables; `options` are those of Popen."""
        return subprocess.Popen(self.entering(number, command), env={**os.environ, **(env or {})}, **options)

    def execute(self, number: int, command: Sequence[str | Path], *, env: Mapping[str, str] | None = None,
                seconds: float = 120.0, **options: Any) -> subprocess.CompletedProcess[str]:
        """Run a command on a machine to its end, and return its status and output."""
        return subprocess.run(self.entering(number, command), env={**os.environ, **(env or {})}, text=True,
                              capture_output=True, timeout=seconds, check=False, **options)

    def entering(self, number: int, command: Sequence[str | Path]) -> list[str]:
        """Return the command that becomes `command` on a machine."""
        first = self._first(number)
        return ["nsenter", f"--target={first}", "--net", *NAMESPACES, f"--wd={Path.cwd()}", "--", *map(str, command)]

    def end(self, number: int) -> None:
        """End every process of a machine at once, as where it loses power; its link stays."""
        self.processes[number].kill()
        self.processes[number].wait()

    def runs(self, number: int) -> bool:
        """Whether a machine has not ended."""
        return self.processes[number].poll() is None

    def processes_of(self, number: int, word: str) -> list[str]:
        """Return the command lines of a machine's processes that contain `word`."""
        listing = self.execute(number, ["ps", "-eo", "args="]).stdout.splitlines()
        return [line for line in listing if word in line and not line.startswith("ps ")]

    def _first(self, number: int) -> int:
        """Return the process id, on the whole, of the first process of a machine: the child that `unshare` forked."""
        pid = self.processes[number].pid
        return int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])

    def _write(self) -> None:
        names = "".join(f"{self.hosts.address(number)} {name}\n" for number, name in enumerate(self.names))
        (self.folder / "hosts").write_text(f"127.0.0.1 localhost\n{names}")
        for key in ("host", "user"):
            subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(self.folder / key)], check=True)
        (self.folder / "sshd_config").write_text(f"""
HostKey {self.folder}/host
AuthorizedKeysFile {self.folder}/user.pub
PidFile none
StrictModes no
UsePAM no
PermitRootLogin yes
MaxStartups 100
""")
        (self.folder / "ssh_config").write_text(f"""
Host *
    IdentityFile {self.folder}/user
    UserKnownHostsFile {self.folder}/known
    GlobalKnownHostsFile none
    StrictHostKeyChecking accept-new
    LogLevel ERROR
""")
        keys = (self.folder / "host.pub").read_text().split()[:2]
        (self.folder / "known").write_text("".join(
            f"{name},{self.hosts.address(number)} {' '.join(keys)}\n" for number, name in enumerate(self.names)))

    def _boot(self, number: int) -> subprocess.Popen[bytes]:
        folder = shlex.quote(str(self.folder))
        sshd = shutil.which("sshd", path=PATH)
        script = f"""
set -e
hostname {self.names[number]}
mount -t tmpfs -o size={self.shm} tmpfs /dev/shm
mount --bind {folder}/hosts /etc/hosts
mount --bind {folder}/ssh_config /etc/ssh/ssh_config
mount -t tmpfs tmpfs /run
mkdir -p /run/sshd
exec {sshd} -D -e -f {folder}/sshd_config
"""
        with (self.folder / f"{self.names[number]}.log").open("wb") as log:
            return subprocess.Popen(
                ["nsenter", f"--net=/var/run/netns/{self.hosts.names[number]}", "unshare", *NAMESPACES, "--fork",
                 "--mount-proc", "--kill-child", "sh", "-c", script], stdin=subprocess.DEVNULL, stdout=log,
                stderr=subprocess.STDOUT, start_new_session=True)

    def _await(self, number: int) -> None:
        """Wait until the machine's ssh server listens."""
        log, deadline = self.folder / f"{self.names[number]}.log", time.monotonic() + SECONDS
        while "listening on 0.0.0.0" not in (said := log.read_text()):
            if self.processes[number].poll() is not None or time.monotonic() > deadline:
                raise HostsUnavailable(f"{self.names[number]} does not start: {said.strip() or 'it says nothing'}")
            time.sleep(0.01)

    def _end(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()
