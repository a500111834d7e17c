"""A launcher starts one command on every host of a job; each is a row of `LAUNCHERS`.

The command has no value of the user's environment and no argument of the user's program: it names this Python, Shoal's
`bootstrap.py`, where the job is read from, and the number of the host. With ssh each host reads the job from its standard
input. With the others, which do not bring standard input to every host, it reads a file of mode 0600 in a shared folder.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from shoal.errors import LaunchError

__all__ = ["LAUNCHERS", "SSH_OPTIONS", "Launcher", "Start", "find", "refuse_nested"]

SSH_OPTIONS = ("-T", "-o", "BatchMode=yes", "-o", "ConnectTimeout=15", "-o", "ServerAliveInterval=5", "-o",
               "ServerAliveCountMax=4")
"""No terminal, no questions, and an end to waiting for a host that is down."""
FAN_OUT = 1024
SOURCED = ('[ -r "$0" ] && . "$0" && exec "$@"; echo "shoal: setup: --setup $0: it cannot be read there, or ends with an '
           'error; give a script that every host has" >&2; exit 3')
"""The script of `sh` that sources a file before the command."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """The start of a job: a command on each of its hosts."""

    hosts: tuple[str, ...]
    command: tuple[str, ...]
    """The words of the command; the number of the host, or the variable that has it, follows."""
    args: tuple[str, ...] = ()
    """The user's options for the launcher."""
    local: frozenset[str] = frozenset()
    """Names of hosts that are this machine."""
    ssh_port: int | None = None
    setup: str | None = None
    """A shell script that each host sources first."""
    root: bool = False
    """Whether the launcher runs as root."""
    anywhere: bool = False
    """Whether the launcher chooses the hosts: `hosts` then only counts them."""

    def words(self, number: str) -> list[str]:
        """Return the command of a host."""
        command = [*self.command, number]
        return command if self.setup is None else ["sh", "-c", SOURCED, self.setup, *command]


@dataclass(frozen=True, slots=True, kw_only=True)
class Launcher:
    """A way to start a command on every host."""

    name: str
    programs: tuple[str, ...]
    """Names of its program, the most specific first."""
    product: str
    """A word that the output of `PROGRAM --version` contains; empty: any program of the name will do."""
    package: str
    """How to install it."""
    render: Callable[[str, Start], list[list[str]]]
    """Returns the commands that start the job: one for each host, or one for all."""
    stdin: bool = False
    """Whether each host reads the job from standard input; otherwise from a file in a shared folder."""
    variables: Mapping[str, str]
    """Variables that must be set for the program."""
    nested: tuple[str, ...] = ()
    """Variables that only a process of such a job has, in which the program cannot start another."""
    unequal: bool = True
    """Whether hosts may have different numbers of slots."""
    survives: bool = False
    """Whether the other hosts go on where one is lost."""
    banners: bool = False
    """Whether its messages have several lines, between two lines of dashes."""


def _ssh(program: str, start: Start) -> list[list[str]]:
    port = [] if start.ssh_port is None else ["-p", str(start.ssh_port)]
    commands: list[list[str]] = []
    for number, host in enumerate(start.hosts):
        words = start.words(str(number))
        remote = [program, *SSH_OPTIONS, *port, *start.args, host, f"exec {shlex.join(words)}"]
        commands.append(words if host in start.local else remote)
    return commands


def _pdsh(program: str, start: Start) -> list[list[str]]:
    number = "%n"  # pdsh puts the number of the host there, and other values for %h and %u
    words = [number if word == number else shlex.quote(word.replace("%", "%%")) for word in start.words(number)]
    return [[program, "-S", "-f", str(FAN_OUT), "-R", "ssh", "-w", ",".join(start.hosts), *start.args,
             f"exec {' '.join(words)}"]]


def _open_mpi(program: str, start: Start) -> list[list[str]]:
    root = ["--allow-run-as-root"] if start.root else []
    hosts = ",".join(f"{host}:1" for host in start.hosts)
    return [[program, *root, "-n", str(len(start.hosts)), "--host", hosts, "--map-by", "ppr:1:node", "--bind-to", "none",
             *start.args, *start.words("OMPI_COMM_WORLD_RANK")]]


def _hydra(program: str, start: Start) -> list[list[str]]:
    return [[program, "-n", str(len(start.hosts)), "-ppn", "1", "-hosts", ",".join(start.hosts), "-launcher", "ssh",
             "-bind-to", "none", *start.args, *start.words("PMI_RANK")]]


def _slurm(program: str, start: Start) -> list[list[str]]:
    count = str(len(start.hosts))
    names = [] if start.anywhere else ["--nodelist", ",".join(start.hosts)]
    return [[program, "--nodes", count, "--ntasks", count, "--ntasks-per-node", "1", *names, "--input", "none",
             "--unbuffered", "--cpu-bind", "none", "--mpi", "none", *start.args, *start.words("SLURM_PROCID")]]


_MPI = ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "PMI_FD")

LAUNCHERS: dict[str, Launcher] = {row.name: row for row in (
    Launcher(name="ssh", programs=("ssh",), product="", package="apt-get install openssh-client", render=_ssh, stdin=True,
             variables={}, survives=True),
    Launcher(name="pdsh", programs=("pdsh",), product="", package="apt-get install pdsh", render=_pdsh, variables={},
             survives=True),
    Launcher(name="openmpi", programs=("mpirun.openmpi", "orterun", "mpirun"), product="Open MPI",
             package="apt-get install openmpi-bin", render=_open_mpi, nested=_MPI, unequal=False,
             variables={"PMIX_MCA_gds": "hash"}, banners=True),
    Launcher(name="mpich", programs=("mpiexec.hydra", "mpirun.mpich", "mpirun"), product="HYDRA",
             package="apt-get install mpich", render=_hydra, nested=_MPI, unequal=False, variables={}),
    Launcher(name="impi", programs=("mpiexec.hydra", "mpirun"), product="Intel", package="install Intel MPI",
             render=_hydra, nested=_MPI, unequal=False, variables={"I_MPI_PIN": "0"}),
    Launcher(name="mvapich", programs=("mpiexec.hydra", "mpirun"), product="HYDRA", package="install MVAPICH2",
             render=_hydra, nested=_MPI, unequal=False, variables={"MV2_ENABLE_AFFINITY": "0"}),
    Launcher(name="slurm", programs=("srun",), product="", package="apt-get install slurm-client", render=_slurm,
             unequal=False, nested=("SLURM_STEP_NUM_TASKS",), variables={}),
)}
"""The launchers by the names that `--launcher` takes."""


def find(launcher: Launcher, locate: Callable[[str], str | None], version: Callable[[str], str]) -> str:
    """Return the path of the launcher's program. Raises `LaunchError` where there is none."""
    found = [path for name in launcher.programs if (path := locate(name)) is not None]
    for path in found:
        if not launcher.product or launcher.product.lower() in version(path).lower():
            return path
    other = f"; {found[0]} is another product's" if found else ""
    raise LaunchError(f"--launcher {launcher.name}: there is no `{launcher.programs[-1]}` of it on this machine{other}; "
                      f"{launcher.package}, or use --launcher ssh")


def refuse_nested(launcher: Launcher, variables: Mapping[str, str], hosts: Sequence[str]) -> None:
    """Raise `LaunchError` for variables with which the launcher would not start the job."""
    if set_already := [name for name in launcher.nested if name in variables]:
        name = set_already[0]
        raise LaunchError(f"--launcher {launcher.name}, first host {hosts[0]}: {name}={variables[name]} is set, so this "
                          f"process is itself a rank of such a job; start `shoal run` outside of it, or unset {name}")
    kind = variables.get("PDSH_RCMD_TYPE", "ssh")
    if launcher.name == "pdsh" and kind != "ssh":
        raise LaunchError(f"--launcher pdsh, first host {hosts[0]}: PDSH_RCMD_TYPE={kind} is set, and Shoal starts hosts by "
                          "ssh; unset PDSH_RCMD_TYPE")
