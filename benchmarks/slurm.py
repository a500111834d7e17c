"""Slurm on machines of one machine: munge, slurmctld on the first, slurmd on each; every state of it in a folder of its own.

    with Machines(3) as machines, Slurm(machines) as slurm:
        slurm.execute(["srun", "--nodes", "3", "hostname"])
"""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

from machines import Machines
from namespaces import PATH, HostsUnavailable

SECONDS = 40.0
"""Seconds that the controller may take until its nodes are idle."""
FIRST_PORT = 17001
PROGRAMS = (("slurmctld", "slurm-wlm"), ("slurmd", "slurm-wlm"), ("srun", "slurm-wlm"), ("munged", "munge"))


class Slurm:
    """A cluster of all machines. Enter it to start the daemons; leaving it ends them."""

    def __init__(self, machines: Machines) -> None:
        self.machines = machines
        self.folder = machines.folder / "slurm"
        self._daemons: list[subprocess.Popen[bytes]] = []
        self._leave = ExitStack()

    def __enter__(self) -> Self:
        for program, package in PROGRAMS:
            if shutil.which(program, path=PATH) is None:
                raise HostsUnavailable(f"there is no `{program}` on this machine; apt-get install {package}")
        with ExitStack() as leave:
            leave.callback(self._end)
            self._write()
            for number in range(len(self.machines.names)):
                self._munge(number)
            self._start(0, "slurmctld", "-D", "-i")
            for number, name in enumerate(self.machines.names):
                self._start(number, "slurmd", "-D", "-N", name)
            self._await()
            self._leave = leave.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._leave.close()

    def variables(self) -> dict[str, str]:
        """Return the variables with which Slurm's commands find this cluster."""
        return {"SLURM_CONF": str(self.folder / "slurm.conf")}

    def execute(self, command: Sequence[str | Path], *, env: Mapping[str, str] | None = None,
                **options: Any) -> subprocess.CompletedProcess[str]:
        """Run a command on the first machine."""
        return self.machines.execute(0, command, env={**self.variables(), **(env or {})}, **options)

    def said(self) -> str:
        """Return the ends of the daemons' logs."""
        return "\n".join(f"{path.name}: {path.read_text(errors='replace')[-1500:]}" for path in self.folder.glob("*.log"))

    def _write(self) -> None:
        for name in ("state", *(f"spool-{name}" for name in self.machines.names)):
            (self.folder / name).mkdir(parents=True)
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") >> 20
        nodes = "\n".join(
            f"NodeName={name} NodeAddr={self.machines.hosts.address(number)} Port={FIRST_PORT + number} "
            f"CPUs={os.cpu_count()} RealMemory={memory // 2}" for number, name in enumerate(self.machines.names))
        (self.folder / "slurm.conf").write_text(f"""
ClusterName=shoal
SlurmctldHost={self.machines.names[0]}({self.machines.hosts.address(0)})
SlurmUser=root
AuthType=auth/munge
AuthInfo=cred_expire=30
CryptoType=crypto/munge
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
ReturnToService=2
SchedulerType=sched/backfill
SelectType=select/cons_tres
StateSaveLocation={self.folder}/state
SlurmdSpoolDir={self.folder}/spool-%n
SlurmctldPidFile={self.folder}/slurmctld.pid
SlurmdPidFile={self.folder}/slurmd-%n.pid
SlurmctldLogFile={self.folder}/slurmctld.log
SlurmdLogFile={self.folder}/slurmd-%n.log
SlurmdTimeout=300
KillWait=5
{nodes}
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
""")
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(1024))
        user = pwd.getpwnam("munge")
        os.chown(key, user.pw_uid, user.pw_gid)
        key.chmod(0o400)
        for folder in (self.machines.folder, self.folder):
            folder.chmod(0o711)

    def _munge(self, number: int) -> None:
        """Start munge by its own user, with its socket where libmunge looks for it: under the machine's own /run."""
        script = f"""
set -e
mkdir -p /run/munge
mkdir -p {self.folder}/munge{number}
chown munge: /run/munge {self.folder}/munge{number}
exec setpriv --reuid munge --regid munge --clear-groups munged --foreground --key-file {self.folder}/munge.key \\
    --log-file {self.folder}/munge{number}/munged.log --pid-file {self.folder}/munge{number}/pid \\
    --seed-file {self.folder}/munge{number}/seed --num-threads 2
"""
        self._daemons.append(self.machines.popen(
            number, ["sh", "-c", script], env={"PATH": PATH}, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL, start_new_session=True))

    def _start(self, number: int, program: str, *words: str) -> None:
        with (self.folder / f"{program}-{number}.out.log").open("wb") as log:
            self._daemons.append(self.machines.popen(
                number, [program, *words], env={**self.variables(), "PATH": PATH}, stdin=subprocess.DEVNULL, stdout=log,
                stderr=subprocess.STDOUT, start_new_session=True))

    def _await(self) -> None:
        deadline, want = time.monotonic() + SECONDS, len(self.machines.names)
        while True:
            done = self.execute(["sinfo", "--noheader", "--Node", "--format", "%t"])
            if done.stdout.split().count("idle") == want:
                return
            if time.monotonic() > deadline:
                raise HostsUnavailable(f"Slurm's nodes do not become idle: {done.stdout} {done.stderr}\n{self.said()}")
            time.sleep(0.1)

    def _end(self) -> None:
        for daemon in self._daemons:
            daemon.kill()
            daemon.wait()
