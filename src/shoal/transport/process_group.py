"""One call joins this process to its job's ranks, whoever started it; on a laptop the job is this process.

An initialised process group is adopted as it is. Otherwise the environment says which rank this is
(`shoal.transport.launcher_env`), the device says which backend carries tensors, and the ranks meet where the launcher says,
or on one host at a port that rank 0 gets from the system and announces. No port is fixed unless it has to be known in
advance.
"""

from __future__ import annotations

import atexit
import json
import os
import socket
import tempfile
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import HashStore, Store, TCPStore  # pyright: ignore[reportPrivateImportUsage]  documented as public

from shoal.errors import LaunchError, RanksDisagree, UsageError
from shoal.log import logger, set_rank, warn_once
from shoal.transport.launcher_env import Place, discover

__all__ = ["device", "init_distributed"]

T = TypeVar("T")

LOOPBACK = "127.0.0.1"
_FAILED = "a failure"
_origin = "the process group that was there already"
MINUTES = 10.0

GRACE = 0.1
"""Seconds at exit in which gloo's threads let go of tensors; it takes them microseconds once they run."""


def init_distributed(
    dist_backend: str | None = None,
    auto_mpi_discovery: bool = True,
    distributed_port: int = 29500,
    verbose: bool = True,
    timeout: timedelta | None = None,
    init_method: str | None = None,
    dist_init_required: bool | None = None,
    config: object = None,
    rank: int = -1,
    world_size: int = -1,
) -> None:
    """Join the process group of this job; calling it again, or after somebody else did, changes nothing.

    `dist_backend` is nccl on CUDA and gloo otherwise, unless given; ranks of gloo train on the CPU. Ranks are found from
    torchrun's, Open MPI's, PMI's or Slurm's variables (all but the first only with `auto_mpi_discovery`), unless
    `init_method` is given with `rank` and `world_size`. `distributed_port` is where rank 0 listens when ranks on several
    hosts have no MASTER_PORT. `timeout` of collectives: 10 minutes, or DEEPSPEED_TIMEOUT (minutes). With
    `dist_init_required` false an initialised process group must be there already. Raises `LaunchError` naming the variable
    that is missing or wrong.
    """
    if config is not None:
        warn_once("init_distributed: config has no effect here; shoal.initialize reads it")
    if not dist.is_initialized():
        if dist_init_required is False:
            raise UsageError("dist_init_required is False, but torch.distributed is not initialised; "
                             "call torch.distributed.init_process_group first, or leave dist_init_required out")
        backend = dist_backend or ("nccl" if torch.cuda.is_available() else "gloo")
        wait = timeout or timedelta(minutes=_minutes(os.environ))
        if init_method is not None or rank >= 0 or world_size >= 0:
            _join_at(init_method, rank, world_size, backend, wait)
            _remember("the arguments of init_distributed")
        else:
            place = discover(os.environ, port=distributed_port, mpi=auto_mpi_discovery)
            _join(place, backend, wait)
            _remember("no launcher: this process is alone" if place.source == "alone" else place.source)
            atexit.register(_leave)
            if verbose:
                logger.info("rank %d of %d on %s, found by %s, over %s", place.rank, place.ranks, socket.gethostname(),
                            place.source, backend)
    set_rank(dist.get_rank())
    if (place := device()).type == "cuda":
        torch.cuda.set_device(place)


def origin() -> str:
    """Return in words who said how many ranks there are."""
    return _origin


def group_of(lines: Sequence[tuple[int, ...]], *, apart: str | None = None) -> dist.ProcessGroup | None:
    """Return the process group of that one of `lines` that this rank is in; every rank of the job calls it with the same.

    The group of all ranks is the job's own, and the others have its backends; with backends `apart` it is a group that
    nobody else uses.

    Every rank takes part in making every group: torch's groups that only members make are named by how many groups a
    member has made before, and hang where that differs.
    """
    mine: dist.ProcessGroup | None = None
    for ranks in lines:
        if len(ranks) == dist.get_world_size() and apart is None:
            return dist.group.WORLD
        group = dist.new_group(list(ranks), backend=apart)
        if isinstance(group, dist.ProcessGroup):
            mine = group
    return mine


def exchange(value: T, what: str) -> list[T]:
    """Return the picklable `value` of every rank of the job, by rank.

    Raises `RanksDisagree` where a rank is at another exchange than this of `what`, or has failed before it.
    """
    said: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(said, (what, value))
    for rank, (place, said_there) in enumerate(said):
        if place == _FAILED:
            raise RanksDisagree(f"{what}: rank {rank} failed, and the others wait for it: {said_there}")
    if len({place for place, _ in said}) > 1:
        raise RanksDisagree("ranks do different things: " + ", ".join(f"rank {rank} is at {place}"
                                                                       for rank, (place, _) in enumerate(said)))
    return [theirs for _, theirs in said]


def tell(error: Exception) -> None:
    """Let ranks that come to an exchange know why this one does not; those that failed likewise meet here."""
    dist.all_gather_object([None] * dist.get_world_size(), (_FAILED, str(error)))


def _remember(origin: str) -> None:
    global _origin
    _origin = origin


def device() -> torch.device:
    """Return the device of this rank: its GPU, or the CPU where there is none, and in a job whose GPUs only gloo could join.

    Its GPU is that of its local rank; where nothing says which that is, the one that the process has chosen for itself
    (`torch.cuda.set_device`). Ranks that each see one GPU use that one. Ranks beyond the GPUs share them in turn, which
    NCCL refuses at `init_distributed`.
    """
    if not torch.cuda.is_available() or not _joins_gpus():
        return torch.device("cpu")
    told = discover_local_rank(os.environ)
    return torch.device("cuda", torch.cuda.current_device() if told is None else told % torch.cuda.device_count())


def _joins_gpus() -> bool:
    """Whether tensors of GPUs travel between ranks. Gloo takes their addresses for those of the host in most of its calls.

    Before the ranks have met: yes, for NCCL would be chosen.
    """
    return not dist.is_initialized() or backends().get("cuda", "gloo") != "gloo"


def backends(group: dist.ProcessGroup | None = None) -> dict[str, str]:
    """Return which backend carries the tensors of each type of device in `group` (None: all ranks of the job)."""
    return dict(item.split(":") for item in dist.get_backend_config(group).split(","))


def local_rank() -> int:
    """Return which of its host's ranks this process is, 0 where nothing says."""
    return discover_local_rank(os.environ) or 0


def discover_local_rank(variables: Mapping[str, str]) -> int | None:
    """Return which of its host's ranks this process is, None where nothing says."""
    for name in ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "SLURM_LOCALID"):
        if variables.get(name, "").isdecimal():
            return int(variables[name])
    return None


def _join_at(init_method: str | None, rank: int, ranks: int, backend: str, wait: timedelta) -> None:
    """Join where the caller says; what the caller leaves out comes from the environment."""
    if rank < 0 or ranks < 0:
        place = discover(os.environ)
        rank, ranks = (place.rank if rank < 0 else rank), (place.ranks if ranks < 0 else ranks)
    if init_method is None and not (os.environ.get("MASTER_ADDR") and os.environ.get("MASTER_PORT")):
        raise UsageError(f"init_distributed: got rank={rank} and world_size={ranks} but nowhere to meet; "
                         "pass init_method='tcp://HOST:PORT', or set MASTER_ADDR and MASTER_PORT")
    dist.init_process_group(backend, init_method=init_method or "env://", rank=rank, world_size=ranks, timeout=wait)


def _join(place: Place, backend: str, wait: timedelta) -> None:
    _check_devices(place, backend)
    _keep_on_loopback(place)
    if place.source.startswith("torchrun") and place.address is not None:
        os.environ.setdefault("MASTER_PORT", str(place.port))
        dist.init_process_group(backend, init_method="env://", timeout=wait)
        return
    store = _store(place, wait)
    dist.init_process_group(backend, store=store, rank=place.rank, world_size=place.ranks, timeout=wait)
    if place.source != "alone":
        os.environ.update(RANK=str(place.rank), WORLD_SIZE=str(place.ranks), LOCAL_RANK=str(place.local_rank))
        if place.local_ranks is not None:
            os.environ["LOCAL_WORLD_SIZE"] = str(place.local_ranks)


def _leave() -> None:
    """Leave gloo's process groups at exit: without that their threads now and then abort the process instead.

    Groups that the script still holds keep their threads, which need the interpreter to let go of the last tensor that
    travelled, and abort when it is gone: they get time for that.
    """
    if dist.is_initialized() and dist.get_backend() == "gloo":
        dist.destroy_process_group()
        time.sleep(GRACE)


def _check_devices(place: Place, backend: str) -> None:
    """Refuse ranks that would share a GPU under NCCL, which would hang or fail later without saying so."""
    gpus = torch.cuda.device_count() if backend == "nccl" else 0
    if gpus > 1 and place.local_rank >= gpus:
        raise LaunchError(f"rank {place.rank} has no GPU of its own: it is local rank {place.local_rank}, and this host has "
                          f"{gpus} GPUs; start at most {gpus} ranks here, or pass dist_backend='gloo' to train on the CPU")


def _keep_on_loopback(place: Place) -> None:
    """Let gloo use the loopback interface where no other host takes part: a host need not know its own name.

    Beside NCCL too: there gloo carries the words of a pipeline.
    """
    if place.one_host and "GLOO_SOCKET_IFNAME" not in os.environ:
        names = {name for _, name in socket.if_nameindex()}
        for name in ("lo", "lo0"):
            if name in names:
                os.environ["GLOO_SOCKET_IFNAME"] = name


def _store(place: Place, wait: timedelta) -> Store:
    if place.ranks == 1:
        return HashStore()
    if place.address is not None and place.port is not None:
        return TCPStore(place.address, place.port, place.ranks, is_master=place.rank == 0, timeout=wait)
    return _announced_store(place, wait)


def _announced_store(place: Place, wait: timedelta) -> Store:
    """Meet on one host: rank 0 serves a store at a free port and announces it in a file, until all have joined."""
    path = _announcement(place)
    if place.rank != 0:
        store = TCPStore(LOOPBACK, _announced_port(path, wait), place.ranks, is_master=False, timeout=wait)
        store.set(f"joined/{place.rank}", "")
        return store
    store = TCPStore(LOOPBACK, 0, place.ranks, is_master=True, wait_for_workers=False, timeout=wait)
    part = path.with_suffix(f".{os.getpid()}")
    part.write_text(json.dumps({"port": store.port, "pid": os.getpid(), "born": _born(os.getpid())}))
    part.replace(path)
    try:
        store.wait([f"joined/{rank}" for rank in range(1, place.ranks)], wait)
    finally:
        path.unlink()
    return store


def _announcement(place: Place) -> Path:
    folder = Path(tempfile.gettempdir(), f"shoal-{os.getuid()}")
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.stat().st_uid != os.getuid():
        raise LaunchError(f"{folder} belongs to another user; set MASTER_ADDR and MASTER_PORT, or another TMPDIR")
    name = place.job if place.job not in ("hydra", "pmi") else f"{place.job}-{os.getppid()}"
    return folder / f"{name}.json".replace("/", "-")


def _announced_port(path: Path, wait: timedelta) -> int:
    """Wait for the port. A file is believed only while the process that wrote it lives: a dead job's is never read."""
    deadline = time.monotonic() + wait.total_seconds()
    while time.monotonic() < deadline:
        try:
            fact = json.loads(path.read_text())
        except FileNotFoundError:
            fact = {}
        if fact and fact["born"] == _born(fact["pid"]):
            return int(fact["port"])
        time.sleep(0.01)
    raise LaunchError(f"rank 0 announced no port in {path} within {wait.total_seconds():g} s; did it start? "
                      "MASTER_ADDR and MASTER_PORT, set for every rank, make the announcement needless")


def _born(pid: int) -> str:
    """Return when process `pid` started, which tells it from a later one of the same number; empty if there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except FileNotFoundError:
        return "" if Path("/proc").exists() else "unknown"


def _minutes(variables: Mapping[str, str]) -> float:
    text = variables.get("DEEPSPEED_TIMEOUT", "")
    try:
        return float(text or MINUTES)
    except ValueError:
        raise LaunchError(f"DEEPSPEED_TIMEOUT: got {text!r}; a number of minutes is expected") from None
