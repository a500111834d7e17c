"""The options that say on which hosts a job runs and what starts it there, and what follows from them."""

from __future__ import annotations

import argparse
import fnmatch
import os
import secrets
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from shoal.cluster import hostfile, launchers
from shoal.cluster.hostfile import Host
from shoal.cluster.launchers import LAUNCHERS, Launcher, Start
from shoal.errors import HostsError, LaunchError, UsageError
from shoal.launch import bootstrap
from shoal.launch.cluster import Cluster
from shoal.launch.console import counted, numbered_ranks
from shoal.launch.job import ClusterJob
from shoal.launch.launch_plan import LaunchPlan, check_target
from shoal.launch.printing import print_status
from shoal.launch.start_errors import explain
from shoal.launch.starting import Starter

__all__ = ["MOST_SECONDS", "Selection", "add_arguments", "asks_for_hosts", "select", "split_words"]

EXPORTED = ("PYTHON*", "NCCL_*", "GLOO_*", "TORCH*", "OMP_*", "MKL_*", "UCX_*", "HF_*", "SHOAL_*", "WANDB_*", "MLFLOW_*",
            "TOKENIZERS_*")
"""Variables of this process that every host gets."""
LEAST_QUIET = 3.0
MOST_SECONDS = 1e9
"""Seconds that an option may name: the system takes no much longer wait."""
QUIET, QUIET_OF_RANGE = 20.0, 6.0
"""Seconds without a message after which a host is lost: where that ends the job, and where the others go on."""
KEPT = ("SHOAL_LAUNCH", "PYTHONHOME", "TORCHELASTIC_*")
"""Variables of this process that belong to it alone."""

@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """The hosts of a job, and what starts them."""

    hosts: tuple[Host, ...]
    launcher: Launcher
    args: tuple[str, ...]
    """The user's options for the launcher."""
    ssh_port: int | None
    setup: str | None
    environment: Mapping[str, str]
    """Variables that every host gets."""
    anywhere: bool
    """Whether the launcher chooses the hosts."""
    least: int
    """The fewest hosts with which the job goes on."""
    quiet: float
    """Seconds without a message after which a host is lost."""

    def commands(self, program: str, job_file: str | None) -> list[list[str]]:
        """Return the commands that start the hosts."""
        own = frozenset(("localhost", "127.0.0.1", socket.gethostname()))
        setup = None if self.setup is None else os.path.abspath(self.setup)  # hosts begin in another folder
        start = Start(hosts=tuple(host.name for host in self.hosts), args=self.args, ssh_port=self.ssh_port, setup=setup,
                      command=(sys.executable, bootstrap.__file__, job_file or "-"), local=own, root=os.geteuid() == 0,
                      anywhere=self.anywhere)
        return self.launcher.render(program, start)

    @contextmanager
    def cluster(self, plan: LaunchPlan | None, tell: Callable[[str], None] = print_status) -> Generator[Cluster]:
        """Give the job's cluster, not started yet; the file that hosts share is gone at the end at the latest.

        `tell` gets what the user must know meanwhile.
        """
        program = self._program()
        environment = dict(os.environ)
        if self.launcher.name == "pdsh":
            environment["PDSH_RCMD_TYPE"] = "ssh"
            if self.ssh_port is not None:
                given = environment.get("PDSH_SSH_ARGS_APPEND", "")
                environment["PDSH_SSH_ARGS_APPEND"] = f"{given} -p {self.ssh_port}".strip()
        job = ClusterJob(secret=secrets.token_hex(16), hosts=self.hosts, environment=dict(self.environment),
                         folder=os.getcwd(), plan=plan, least=self.least, quiet=self.quiet)
        if self.launcher.stdin:
            starter = Starter(self.launcher, self.commands(program, None), environment, None)
            yield Cluster(starter, job, self.launcher, tell)
            return
        try:
            made = tempfile.TemporaryDirectory(prefix=".shoal-job-", dir=os.getcwd())  # its mode is 0700
        except OSError as error:
            raise LaunchError(f"--launcher {self.launcher.name}: the file of the job cannot be made in {os.getcwd()}: "
                              f"{error.strerror}; start in a folder that is yours and that all hosts share, or use "
                              "--launcher ssh") from None
        with made as folder:
            file = Path(folder, "job.json")
            os.close(os.open(file, os.O_CREAT | os.O_WRONLY, 0o600))
            starter = Starter(self.launcher, self.commands(program, str(file)), environment, file)
            yield Cluster(starter, job, self.launcher, tell)

    def _program(self) -> str:
        """Return the path of the launcher. Raises `LaunchError` where there is none, or it cannot start the job here."""
        launchers.refuse_nested(self.launcher, os.environ, [host.name for host in self.hosts])
        return launchers.find(self.launcher, shutil.which, _version)

    def problems(self, plan: LaunchPlan) -> list[str]:
        """Return what a start would be refused for, as far as this machine shows it: hosts have the same paths."""
        found: list[str] = []
        for check in (self._program, partial(check_target, plan)):
            try:
                check()
            except LaunchError as error:
                found.append(str(error))
        if self.setup is not None and not os.access(self.setup, os.R_OK):
            found.append(f"--setup {self.setup}: it cannot be read here; give a script that every host has")
        return found

    def describe(self, what: str) -> str:
        """Return the plan: hosts, ranks, variables, and the commands that would run."""
        total = sum(len(host.slots) for host in self.hosts)
        lines, rank = [f"{counted(len(self.hosts), 'host')}, {counted(total, 'rank')}, started by {self.launcher.name}"], 0
        for host in self.hosts:
            ranks = range(rank, rank + len(host.slots))
            slots = ",".join(map(str, host.slots))
            lines.append(f"  {host.name or '(chosen by Slurm)':<20} slots {slots:<12} {numbered_ranks(ranks)}")
            rank = ranks.stop
        where = "on standard input" if self.launcher.stdin else "in a file of mode 0600 in this folder"
        lines.append(f"variables, whose values travel {where}: {', '.join(sorted(self.environment)) or 'none'}")
        lines.append(f"each rank runs: {what}")
        commands = self.commands(self.launcher.programs[0], None if self.launcher.stdin else "JOB")
        return "\n".join([*lines, *(f"$ {shlex.join(command)}" for command in commands)])


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    group = parser.add_argument_group("several hosts, started from here")
    group.add_argument("--hostfile", metavar="FILE", help="lines of `NAME slots=N`")
    group.add_argument("--hosts", metavar="LIST", help="hosts and slots without a file: NAME:SLOT[,SLOT...] joined by @")
    group.add_argument("--include", default="", metavar="FILTER", help="use these: NAME[:SLOT[,SLOT...]] joined by @")
    group.add_argument("--exclude", default="", metavar="FILTER", help="do not use these, in the same form")
    group.add_argument("--launcher", choices=list(LAUNCHERS), help="what starts the hosts (default ssh)")
    group.add_argument("--launcher-args", default="", metavar="WORDS", help="options for the launcher, as one word")
    group.add_argument("--ssh-port", type=int, metavar="PORT", help="the port of sshd on the hosts")
    group.add_argument("--setup", metavar="FILE", help="shell script that each host sources first: venv/bin/activate")
    group.add_argument("--lost-after", type=float, metavar="SECONDS",
                       help=f"a host is lost after so long without a message (default {QUIET:g}; with --nodes A:B, where "
                            f"the others go on, {QUIET_OF_RANGE:g})")
    group.add_argument("--export", action="append", default=[], metavar="PATTERN",
                       help="give the hosts the variables of this shell with such names (NAME or PREFIX*), beside "
                            + " ".join(EXPORTED))


def asks_for_hosts(args: argparse.Namespace) -> bool:
    """Whether the options name hosts or a launcher."""
    return args.hostfile is not None or args.hosts is not None or args.launcher is not None


def refuse_without_hosts(args: argparse.Namespace) -> None:
    """Raise `UsageError` for an option of hosts where the ranks start on this machine alone, which would ignore it."""
    given = {"--include": args.include, "--exclude": args.exclude, "--launcher-args": args.launcher_args,
             "--ssh-port": args.ssh_port, "--setup": args.setup, "--lost-after": args.lost_after, "--export": args.export}
    for option, value in given.items():
        if value not in (None, "", []):
            raise UsageError(f"{option}: it is for hosts that are started from here; give --hostfile FILE, --hosts LIST or "
                             f"--launcher NAME, or drop it")


def select(args: argparse.Namespace, *, nodes: tuple[int, int] | None, ranks: int | None,
           variables: Mapping[str, str]) -> Selection:
    """Return the hosts and the launcher that the options name.

    `nodes` is the least and the greatest number of hosts, `ranks` that of slots on each; `variables` are those of the
    command line.
    Raises `UsageError` and `HostsError` naming the option.
    """
    if args.include and args.exclude:
        raise UsageError("--include and --exclude are mutually exclusive; drop one")
    if (args.include or args.exclude) and (nodes is not None or ranks is not None):
        raise UsageError("--include or --exclude with --nodes or --ranks: both select slots; drop one")
    shrinks = nodes is not None and nodes[0] < nodes[1]
    quiet = args.lost_after if args.lost_after is not None else QUIET_OF_RANGE if shrinks else QUIET
    if not LEAST_QUIET <= quiet <= MOST_SECONDS:
        raise UsageError(f"--lost-after: got {quiet:g}; choose {LEAST_QUIET:g} seconds or more, up to {MOST_SECONDS:g}")
    if args.ssh_port is not None and not 1 <= args.ssh_port <= 65535:
        raise UsageError(f"--ssh-port: got {args.ssh_port}; choose 1 to 65535")
    launcher = LAUNCHERS[args.launcher or "ssh"]
    if shrinks and not launcher.survives:
        raise UsageError(f"--nodes {args.nodes} --launcher {launcher.name}: it ends all hosts where one is lost; use ssh or "
                         "pdsh, or give one number of nodes")
    if launcher.stdin is False and args.ssh_port is not None and launcher.name != "pdsh":
        raise UsageError(f"--ssh-port: --launcher {launcher.name} does not take it; set the port in ~/.ssh/config")
    hosts, anywhere = _hosts(args, launcher, None if nodes is None else nodes[1], ranks)
    if args.include:
        hosts = hostfile.included(hosts, args.include)
    elif args.exclude:
        hosts = hostfile.excluded(hosts, args.exclude)
    if nodes is not None:
        hosts = hostfile.first(hosts, *nodes)
    if ranks is not None:
        hosts = hostfile.limited(hosts, ranks)
    if not hosts:
        raise HostsError("--exclude: no slot is left to run on; exclude fewer" if args.exclude else
                         f"--include: got {args.include!r}, which names no host; {hostfile.FILTER}")
    if not launcher.unequal and len({len(host.slots) for host in hosts}) > 1:
        counts = ", ".join(f"{host.name} {len(host.slots)}" for host in hosts)
        raise HostsError(f"--launcher {launcher.name} needs equally many slots on every host, got {counts}; give --ranks N, "
                         "or use --launcher ssh")
    return Selection(hosts=tuple(hosts), launcher=launcher, args=split_words("--launcher-args", args.launcher_args),
                     setup=args.setup, ssh_port=args.ssh_port, environment={**_exported(args.export), **variables},
                     anywhere=anywhere, least=len(hosts) if nodes is None or not shrinks else nodes[0], quiet=quiet)


def split_words(option: str, text: str) -> tuple[str, ...]:
    """Return the words of an option that are quoted as in a shell. Raises `UsageError` where a quote is not closed."""
    try:
        return tuple(shlex.split(text))
    except ValueError as error:
        raise UsageError(f"{option}: got {text!r}: {error}; quote its words as in a shell") from None


def _hosts(args: argparse.Namespace, launcher: Launcher, nodes: int | None, ranks: int | None) -> tuple[list[Host], bool]:
    """Return all hosts that there are, and whether the launcher chooses which they are."""
    if args.hostfile is not None and args.hosts is not None:
        raise UsageError("--hostfile and --hosts: both name the hosts; drop one")
    if args.hosts is not None:
        return hostfile.parse_hosts(args.hosts), False
    if args.hostfile is not None:
        path = Path(args.hostfile)
        hosts = hostfile.read(path)
        if b"\r" in path.read_bytes():
            print_status(f"shoal: {path}: its lines end in CR LF; read as LF. Convert it with sed -i 's/\\r$//' {path}")
        return hosts, False
    if launcher.name != "slurm":
        raise UsageError(f"--launcher {launcher.name}: give --hostfile FILE or --hosts LIST")
    if ranks is None:
        raise UsageError("--launcher slurm without a hostfile: give --ranks N, the ranks on each node")
    slots = tuple(range(ranks))
    if (listing := os.environ.get("SLURM_JOB_NODELIST")) is not None:
        done = subprocess.run(["scontrol", "show", "hostnames", listing], capture_output=True, text=True, check=False)
        if done.returncode or not done.stdout.split():
            raise LaunchError(f"scontrol show hostnames {listing} failed: {explain(done.stderr.splitlines())}; or give "
                              "--hostfile FILE")
        return [Host(name=name, slots=slots) for name in done.stdout.split()], False
    return [Host(name="", slots=slots) for _ in range(nodes or 1)], True


def _exported(patterns: list[str]) -> dict[str, str]:
    """Return the variables of this process that every host gets. Raises `UsageError` for a name that is not set."""
    names = [name for pattern in (*EXPORTED, *patterns) for name in fnmatch.filter(os.environ, pattern)]
    for pattern in patterns:
        if not set(pattern) & set("*?[") and pattern not in os.environ:
            raise UsageError(f"--export {pattern}: it is not set here; set it, or give --env {pattern}=VALUE")
    return {name: os.environ[name] for name in names if name in patterns or not any(
        fnmatch.fnmatch(name, kept) for kept in KEPT)}


def _version(program: str) -> str:
    done = subprocess.run([program, "--version"], capture_output=True, text=True, check=False, timeout=60)
    return done.stdout + done.stderr
