"""The rank of this process, read from the environment variables of its launcher; pure functions over a mapping.

The first launcher whose variables are complete wins: torchrun (also `shoal run`, and variables set by hand), Open MPI, Hydra
(MPICH, Intel MPI), Slurm's srun, PMI. A process without any of these is a job of one rank.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from shoal.errors import LaunchError

__all__ = ["RankInfo", "discover", "first_host"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankInfo:
    """The rank of a process in its job and on its host, and the rendezvous address."""

    rank: int
    ranks: int
    local_rank: int
    local_ranks: int | None
    """Ranks on this host; None where the launcher does not give them."""
    source: str
    """The launcher: `torchrun`, `Open MPI`, `Hydra`, `Slurm`, `PMI`, or `alone`."""
    address: str | None = None
    """Host of rank 0."""
    port: int | None = None
    job: str | None = None
    """A name that no other job has on this host at the same time."""

    @property
    def one_host(self) -> bool:
        """Whether all ranks of the job are known to be on this host."""
        return self.ranks == 1 or self.local_ranks == self.ranks


ALONE = RankInfo(rank=0, ranks=1, local_rank=0, local_ranks=1, source="alone")


def discover(variables: Mapping[str, str], *, port: int = 29500, mpi: bool = True) -> RankInfo:
    """Return the rank that `variables` describe; `port` is rank 0's port where no variable gives one.

    With `mpi` false only torchrun's variables count. Raises `LaunchError` naming the variable that is missing or wrong.
    """
    if "RANK" in variables or "WORLD_SIZE" in variables:
        return _torchrun(variables, port)
    for source, present, read in LAUNCHERS:
        if all(name in variables for name in present):
            if not mpi:
                raise LaunchError(f"{source} started this process ({present[0]}={variables[present[0]]}), but "
                                  "auto_mpi_discovery is off and RANK and WORLD_SIZE are not set; set them, or leave it on")
            return read(_EnvironmentReader(variables, source), port)
    return ALONE


@dataclass(frozen=True, slots=True)
class _EnvironmentReader:
    variables: Mapping[str, str]
    source: str

    def text(self, name: str) -> str:
        value = self.variables.get(name, "")
        if not value:
            raise LaunchError(f"{name} is not set, though {self.source} started this process; set it for every rank")
        return value

    def number(self, name: str) -> int:
        text = self.text(name)
        if not text.isdecimal():
            raise LaunchError(f"{name}: got {text!r}; it must be a whole number, 0 or more")
        return int(text)

    def optional(self, name: str) -> int | None:
        return self.number(name) if self.variables.get(name) else None

    def info(self, rank: str, ranks: str, local_rank: str, local_ranks: int | None, **where: str | int | None) -> RankInfo:
        info = RankInfo(rank=self.number(rank), ranks=self.number(ranks), local_rank=self.number(local_rank),
                        local_ranks=local_ranks, source=self.source, **where)  # pyright: ignore[reportArgumentType]  fields
        if info.rank >= info.ranks:
            raise LaunchError(f"{rank}: got {info.rank}; with {ranks}={info.ranks} it must be below {info.ranks}")
        return info


def _torchrun(variables: Mapping[str, str], port: int) -> RankInfo:
    read = _EnvironmentReader(variables, "torchrun (or RANK and WORLD_SIZE set by hand)")
    alone = variables.get("WORLD_SIZE") == "1"
    local = {"LOCAL_RANK": variables.get("LOCAL_RANK") or "0"} if alone else {}
    read = _EnvironmentReader({**variables, **local}, read.source)
    info = read.info("RANK", "WORLD_SIZE", "LOCAL_RANK", read.optional("LOCAL_WORLD_SIZE"))
    if info.ranks == 1 and "MASTER_ADDR" not in variables:
        return info
    return _with_address(info, read.text("MASTER_ADDR"), read.optional("MASTER_PORT") or port)


def _open_mpi(read: _EnvironmentReader, port: int) -> RankInfo:
    job = read.variables.get("PMIX_NAMESPACE") or read.variables.get("OMPI_MCA_ess_base_jobid") or "open-mpi"
    info = read.info("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
                     read.optional("OMPI_COMM_WORLD_LOCAL_SIZE"), job=f"ompi-{job}")
    return _rendezvous(info, read, port, "mpirun -x MASTER_ADDR=HOST")


def _hydra(read: _EnvironmentReader, port: int) -> RankInfo:
    info = read.info("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", read.optional("MPI_LOCALNRANKS"), job="hydra")
    return _rendezvous(info, read, port, "mpirun -genv MASTER_ADDR HOST")


def _pmi(read: _EnvironmentReader, port: int) -> RankInfo:
    local = "PMI_LOCAL_RANK" if "PMI_LOCAL_RANK" in read.variables else "LOCAL_RANK"
    info = read.info("PMI_RANK", "PMI_SIZE", local, read.optional("PMI_LOCAL_SIZE"), job="pmi")
    return _rendezvous(info, read, port, "export MASTER_ADDR=HOST")


def _slurm(read: _EnvironmentReader, port: int) -> RankInfo:
    ranks = read.number("SLURM_STEP_NUM_TASKS")
    local_ranks = ranks if read.optional("SLURM_STEP_NUM_NODES") == 1 else None
    job = f"slurm-{read.variables.get('SLURM_JOB_ID', '0')}.{read.variables.get('SLURM_STEP_ID', '0')}"
    info = read.info("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", local_ranks, job=job)
    hosts = read.variables.get("SLURM_STEP_NODELIST")
    if not info.one_host and hosts and "MASTER_ADDR" not in read.variables:
        return _with_address(info, first_host(hosts), read.optional("MASTER_PORT") or port)
    return _rendezvous(info, read, port, "export MASTER_ADDR=HOST before srun")


LAUNCHERS: tuple[tuple[str, tuple[str, ...], Callable[[_EnvironmentReader, int], RankInfo]], ...] = (
    ("Open MPI", ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"), _open_mpi),
    ("Hydra", ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"), _hydra),
    ("Slurm", ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"), _slurm),
    ("PMI", ("PMI_RANK", "PMI_SIZE"), _pmi),
)
"""Launchers, the variables that identify them, and their readers. Slurm's batch shell has no step: a job of one rank."""


def _with_address(info: RankInfo, address: str, port: int) -> RankInfo:
    return RankInfo(rank=info.rank, ranks=info.ranks, local_rank=info.local_rank, local_ranks=info.local_ranks,
                    source=info.source, job=info.job, address=address, port=port)


def _rendezvous(info: RankInfo, read: _EnvironmentReader, port: int, remedy: str) -> RankInfo:
    if read.variables.get("MASTER_ADDR"):
        return _with_address(info, read.text("MASTER_ADDR"), read.optional("MASTER_PORT") or port)
    if info.one_host:
        return info
    raise LaunchError(f"MASTER_ADDR is not set, and {read.source} started ranks on several hosts; name the host of rank 0: "
                      f"{remedy}")


def first_host(listing: str) -> str:
    """Return the first host of a Slurm node list: `gpu[03-07,9],login` gives `gpu03`."""
    match = re.match(r"([^\[,]+)(?:\[(\w+)[^\]]*\])?([^,\[]*)", listing)
    if match is None:
        raise LaunchError(f"SLURM_STEP_NODELIST: got {listing!r}; expected hosts such as node[01-04]")
    return "".join(part or "" for part in match.groups())
