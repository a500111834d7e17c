"""Which rank this process is, read from the variables that launchers set; pure functions over a mapping.

The first launcher that explains the process wins: torchrun's variables (also `shoal run`'s, and any by hand), Open MPI,
Hydra (MPICH, Intel MPI), Slurm's srun, PMI. A process that none of them explains is alone.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from shoal.errors import LaunchError

__all__ = ["Place", "discover", "first_host"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a process stands among the ranks of its job, and where they meet."""

    rank: int
    ranks: int
    local_rank: int
    local_ranks: int | None
    """Ranks on this host; None where the launcher does not tell."""
    source: str
    """Who told: `torchrun`, `Open MPI`, `Hydra`, `Slurm`, `PMI`, or `alone`."""
    address: str | None = None
    """Host of rank 0."""
    port: int | None = None
    job: str | None = None
    """Tells jobs apart that run on one host at one time."""

    @property
    def one_host(self) -> bool:
        """Whether all ranks are known to be on this host."""
        return self.ranks == 1 or self.local_ranks == self.ranks


ALONE = Place(rank=0, ranks=1, local_rank=0, local_ranks=1, source="alone")


def discover(variables: Mapping[str, str], *, port: int = 29500, mpi: bool = True) -> Place:
    """Return the place that `variables` describe; `port` is where rank 0 listens if nothing else says so.

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

    def place(self, rank: str, ranks: str, local_rank: str, local_ranks: int | None, **where: str | int | None) -> Place:
        place = Place(rank=self.number(rank), ranks=self.number(ranks), local_rank=self.number(local_rank),
                      local_ranks=local_ranks, source=self.source, **where)  # pyright: ignore[reportArgumentType]  fields
        if place.rank >= place.ranks:
            raise LaunchError(f"{rank}: got {place.rank}; with {ranks}={place.ranks} it must be below {place.ranks}")
        return place


def _torchrun(variables: Mapping[str, str], port: int) -> Place:
    read = _EnvironmentReader(variables, "torchrun (or a hand that set RANK or WORLD_SIZE)")
    alone = variables.get("WORLD_SIZE") == "1"
    local = {"LOCAL_RANK": variables.get("LOCAL_RANK") or "0"} if alone else {}
    read = _EnvironmentReader({**variables, **local}, read.source)
    place = read.place("RANK", "WORLD_SIZE", "LOCAL_RANK", read.optional("LOCAL_WORLD_SIZE"))
    if place.ranks == 1 and "MASTER_ADDR" not in variables:
        return place
    return _at(place, read.text("MASTER_ADDR"), read.optional("MASTER_PORT") or port)


def _open_mpi(read: _EnvironmentReader, port: int) -> Place:
    job = read.variables.get("PMIX_NAMESPACE") or read.variables.get("OMPI_MCA_ess_base_jobid") or "open-mpi"
    place = read.place("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
                       read.optional("OMPI_COMM_WORLD_LOCAL_SIZE"), job=f"ompi-{job}")
    return _meet(place, read, port, "mpirun -x MASTER_ADDR=HOST")


def _hydra(read: _EnvironmentReader, port: int) -> Place:
    place = read.place("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", read.optional("MPI_LOCALNRANKS"), job="hydra")
    return _meet(place, read, port, "mpirun -genv MASTER_ADDR HOST")


def _pmi(read: _EnvironmentReader, port: int) -> Place:
    local = "PMI_LOCAL_RANK" if "PMI_LOCAL_RANK" in read.variables else "LOCAL_RANK"
    place = read.place("PMI_RANK", "PMI_SIZE", local, read.optional("PMI_LOCAL_SIZE"), job="pmi")
    return _meet(place, read, port, "export MASTER_ADDR=HOST")


def _slurm(read: _EnvironmentReader, port: int) -> Place:
    ranks = read.number("SLURM_STEP_NUM_TASKS")
    local_ranks = ranks if read.optional("SLURM_STEP_NUM_NODES") == 1 else None
    job = f"slurm-{read.variables.get('SLURM_JOB_ID', '0')}.{read.variables.get('SLURM_STEP_ID', '0')}"
    place = read.place("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", local_ranks, job=job)
    hosts = read.variables.get("SLURM_STEP_NODELIST")
    if not place.one_host and hosts and "MASTER_ADDR" not in read.variables:
        return _at(place, first_host(hosts), read.optional("MASTER_PORT") or port)
    return _meet(place, read, port, "export MASTER_ADDR=HOST before srun")


LAUNCHERS: tuple[tuple[str, tuple[str, ...], Callable[[_EnvironmentReader, int], Place]], ...] = (
    ("Open MPI", ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"), _open_mpi),
    ("Hydra", ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"), _hydra),
    ("Slurm", ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"), _slurm),
    ("PMI", ("PMI_RANK", "PMI_SIZE"), _pmi),
)
"""Launcher, the variables by which it is known, and how to read it. Slurm's batch shell has no step, so it is alone."""


def _at(place: Place, address: str, port: int) -> Place:
    return Place(rank=place.rank, ranks=place.ranks, local_rank=place.local_rank, local_ranks=place.local_ranks,
                 source=place.source, job=place.job, address=address, port=port)


def _meet(place: Place, read: _EnvironmentReader, port: int, remedy: str) -> Place:
    if read.variables.get("MASTER_ADDR"):
        return _at(place, read.text("MASTER_ADDR"), read.optional("MASTER_PORT") or port)
    if place.one_host:
        return place
    raise LaunchError(f"MASTER_ADDR is not set, and {read.source} started ranks on several hosts; name the host of rank 0: "
                      f"{remedy}")


def first_host(listing: str) -> str:
    """Return the first host of Slurm's notation: `gpu[03-07,9],login` gives `gpu03`."""
    found = re.match(r"([^\[,]+)(?:\[(\w+)[^\]]*\])?([^,\[]*)", listing)
    if found is None:
        raise LaunchError(f"SLURM_STEP_NODELIST: got {listing!r}; expected hosts such as node[01-04]")
    return "".join(part or "" for part in found.groups())
