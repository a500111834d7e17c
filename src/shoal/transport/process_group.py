"""One call joins this process to the process group of its job, under any launcher; without one the job is this process.

A process group that is initialised already is used as it is. Otherwise the launcher's environment variables give the rank
(`shoal.transport.launcher_env`), and the device gives the backend. The ranks rendezvous at the launcher's address, or, on
one host, at a port that rank 0 gets from the system and announces in a file. No port is fixed unless it has to be known in
advance.
"""

from __future__ import annotations

import atexit
import json
import multiprocessing
import os
import socket
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from functools import cache, partial
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import HashStore, Store, TCPStore  # pyright: ignore[reportPrivateImportUsage]  documented as public

from shoal.device import HOST, accelerator, default_backend, device_count, group_backends, set_current
from shoal.device import current_device as current_accelerator
from shoal.errors import LaunchError, RanksDisagree, UsageError
from shoal.log import logger, set_rank, warn_once
from shoal.recording.page import PAGES, THREADS, page
from shoal.transport.gloo_threads import let_ranks_go_first
from shoal.transport.launcher_env import RankInfo, discover

__all__ = ["agent_memory", "device", "init_distributed"]

T = TypeVar("T")

LOOPBACK = "127.0.0.1"
_FAILED = "a failure"
_world_size_origin = "the process group that was there already"
_made_here: list[bool] = []
"""Not empty once this file has made the world group."""
MINUTES = 10.0
"""The default timeout of collectives, in minutes."""

GRACE = 0.1
"""Seconds at exit for gloo's threads to release their tensors; they need microseconds once they run."""


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
    """Join the process group of this job; a call after the process group is initialised changes nothing.

    `dist_backend` is, unless given, what torch has for the accelerator beside gloo for the host (`cpu:gloo,cuda:nccl` on
    CUDA), and gloo where there is no accelerator; ranks joined by gloo alone train on the CPU. The rank comes from the
    variables of torchrun, Open MPI, PMI or Slurm (all but torchrun's only with `auto_mpi_discovery`), unless `init_method`
    is given with `rank` and `world_size`. `distributed_port` is the port of rank 0 where ranks on several hosts have no
    MASTER_PORT. `timeout` of collectives: 10 minutes, or DEEPSPEED_TIMEOUT (minutes). With `dist_init_required` false an
    initialised process group must exist already. Raises `LaunchError` naming the variable that is missing or wrong, and in
    a worker process of multiprocessing that imports the script to begin: it is no rank.
    """
    if config is not None:
        warn_once("init_distributed: config has no effect here; shoal.initialize reads it")
    _check_not_imported()  # first: its page would take the place of the rank's
    _attach_page()
    if not dist.is_initialized():
        if dist_init_required is False:
            raise UsageError("dist_init_required is False, but torch.distributed is not initialised; "
                             "call torch.distributed.init_process_group first, or leave dist_init_required out")
        backend = dist_backend or group_backends(accelerator())
        wait = timeout or timedelta(minutes=_minutes(os.environ))
        if init_method is not None or rank >= 0 or world_size >= 0:
            _join_at(init_method, rank, world_size, backend, wait)
            _set_world_size_origin("the arguments of init_distributed")
        else:
            info = discover(os.environ, port=distributed_port, mpi=auto_mpi_discovery)
            _join(info, backend, wait)
            _set_world_size_origin("no launcher: this process is alone" if info.source == "alone" else info.source)
            if verbose:
                logger.info("rank %d of %d on %s, found by %s, over %s", info.rank, info.ranks, socket.gethostname(),
                            info.source, backend)
    _leave_at_exit()
    set_rank(dist.get_rank())
    set_current(device())


def world_size_origin() -> str:
    """Return, for messages, where the world size comes from."""
    return _world_size_origin


def group_of(rank_lists: Sequence[tuple[int, ...]], *, backend: str | None = None) -> dist.ProcessGroup | None:
    """Create one process group for each of `rank_lists`; return the one that this rank is in. Collective over the job.

    A list of all ranks gives the world group, and every new group has the world's backends; with a `backend` the groups
    are new and not shared.

    Every rank takes part in the creation of every group. torch names a group that only its members create
    (`use_local_synchronization`) by the number of groups that a member has created before, and hangs where these differ.
    """
    own: dist.ProcessGroup | None = None
    for ranks in rank_lists:
        if len(ranks) == dist.get_world_size() and backend is None:
            return dist.group.WORLD
        group = dist.new_group(list(ranks), backend=backend)
        if isinstance(group, dist.ProcessGroup):
            own = group
    let_ranks_go_first()
    return own


def gather_objects(value: T, what: str) -> list[T]:
    """Return the picklable `value` of every rank of the job, by rank. Collective over the job.

    `what` names the call site. Raises `RanksDisagree` where a rank is at another call site, or has announced a failure.
    """
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, (what, value))
    for rank, (site, cause) in enumerate(gathered):
        if site == _FAILED:
            raise RanksDisagree(f"{what}: rank {rank} failed, and the others wait for it: {cause}")
    if len({site for site, _ in gathered}) > 1:
        raise RanksDisagree("ranks do different things: " + ", ".join(f"rank {rank} is at {site}"
                                                                      for rank, (site, _) in enumerate(gathered)))
    return [theirs for _, theirs in gathered]


def announce_failure(error: Exception) -> None:
    """Take part in the `gather_objects` that other ranks wait in, and give them this rank's error instead of a value."""
    dist.all_gather_object([None] * dist.get_world_size(), (_FAILED, str(error)))


def _set_world_size_origin(origin: str) -> None:
    global _world_size_origin
    _world_size_origin = origin


def device() -> torch.device:
    """Return the device of this rank: its accelerator; the CPU where there is none or where only gloo connects the ranks.

    A rank's accelerator is the one of its local rank. If no variable gives the local rank it is the process's current one
    (`torch.accelerator.set_device_index`). Ranks that each see one use that one. With more ranks than accelerators the
    ranks share them in turn, which `init_distributed` refuses for backends other than gloo.
    """
    kind = accelerator()
    if kind is None:
        return HOST
    if not _reaches(kind):
        warn_once(f"ranks train on the CPU, although there are devices of kind {kind.type}: the process group "
                  f"({dist.get_backend_config()}) does not send their tensors. Leave the backend to shoal.init_distributed, "
                  f"or pass '{group_backends(kind)}'")
        return HOST
    return _accelerator_of(kind, discover_local_rank(os.environ))


def _accelerator_of(kind: torch.device, local: int | None) -> torch.device:
    """Return the accelerator of local rank `local`; the current one where it is not known."""
    return current_accelerator() if local is None else torch.device(kind.type, local % device_count())


def _reaches(kind: torch.device) -> bool:
    """Return whether tensors of the accelerator travel: gloo treats their addresses as host memory in most calls.

    True before the process group is initialised, because the default is the device's own backend; true of a rank that is
    alone on a device for which torch has no backend.
    """
    if not dist.is_initialized() or backends().get(kind.type, "gloo") != "gloo":
        return True
    return default_backend(kind) == "gloo" and dist.get_world_size() == 1


def backends(group: dist.ProcessGroup | None = None) -> dict[str, str]:
    """Return the backend for tensors of each device type in `group` (None: the world group)."""
    return dict(item.split(":") for item in dist.get_backend_config(group).split(","))


def local_rank() -> int:
    """Return the rank of this process among those of its host, 0 where no variable gives it."""
    return discover_local_rank(os.environ) or 0


def discover_local_rank(variables: Mapping[str, str]) -> int | None:
    """Return the rank of this process among those of its host, None where no variable gives it."""
    for name in ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "SLURM_LOCALID"):
        if variables.get(name, "").isdecimal():
            return int(variables[name])
    return None


def agent_memory() -> str | None:
    """Return the folder in memory that the agent of this node owns, and that outlives its ranks; None without an agent."""
    folder = os.environ.get(PAGES, "")
    return folder if os.path.isdir(folder) else None


def _attach_page() -> None:
    """Let the agent that watches this process read what it does."""
    memory, local_rank = agent_memory(), os.environ.get("LOCAL_RANK", "")
    if memory is not None and local_rank.isdecimal() and not page.attached:
        try:
            page.attach(memory, int(local_rank))
        except OSError as error:
            logger.warning("the agent cannot see what this rank does, and notices no hang of it: %s has no room for its "
                           "page (%s); free memory there", memory, error)


def keep_threads() -> None:
    """Compute with as many threads as in the last attempt, where torch was imported before the script ran; tell the agent.

    A script may have set OMP_NUM_THREADS before its `import torch`. With another number sums have other bits.
    """
    before, now = os.environ.pop(THREADS, ""), torch.get_num_threads()
    if before.isdecimal() and int(before) != now:
        logger.info("this rank computes with %s threads, as in the last attempt, and not with %d: it was forked from an "
                    "interpreter that had imported torch, so what the script set before its import had no effect",
                    before, now)
        torch.set_num_threads(int(before))
    page.note_threads(torch.get_num_threads())


def _join_at(init_method: str | None, rank: int, ranks: int, backend: str, wait: timedelta) -> None:
    """Join at the caller's rendezvous; missing arguments come from the environment."""
    if rank < 0 or ranks < 0:
        info = discover(os.environ)
        rank, ranks = (info.rank if rank < 0 else rank), (info.ranks if ranks < 0 else ranks)
    if init_method is None and not (os.environ.get("MASTER_ADDR") and os.environ.get("MASTER_PORT")):
        raise UsageError(f"init_distributed: got rank={rank} and world_size={ranks} but no rendezvous address; "
                         "pass init_method='tcp://HOST:PORT', or set MASTER_ADDR and MASTER_PORT")
    _init_group(backend, discover_local_rank(os.environ), init_method=init_method or "env://", rank=rank, world_size=ranks,
                timeout=wait)


def _init_group(backend: str, local: int | None, **rendezvous: Any) -> None:
    """Make the world group, bound to this rank's accelerator where `backend` sends its tensors.

    The device is made current before: a backend that has no device at its start takes the current one, on every rank of a
    host the same.
    """
    _check_interfaces()
    bound = _bound_kind(backend)
    if bound is None:
        dist.init_process_group(backend, **rendezvous)
    else:
        own = _accelerator_of(bound, local)
        set_current(own)
        dist.init_process_group(backend, device_id=own, **rendezvous)
    _made_here.append(True)


def _bound_kind(backend: str) -> torch.device | None:
    """Return the kind of accelerator whose tensors `backend` sends, None where it sends those of the host alone."""
    kind = accelerator()
    if kind is None:
        return None
    of_kind = dict(item.split(":", 1) for item in backend.split(",") if ":" in item).get(kind.type)
    carrier = of_kind or (backend if ":" not in backend else "gloo")
    return None if carrier == "gloo" or carrier != default_backend(kind) else kind


def _join(info: RankInfo, backend: str, wait: timedelta) -> None:
    _check_devices(info, backend)
    local = None if info.source == "alone" else info.local_rank
    _keep_on_loopback(info)
    if info.source.startswith("torchrun") and info.address is not None:
        os.environ.setdefault("MASTER_PORT", str(info.port))
        _init_group(backend, local, init_method="env://", timeout=wait)
        return
    store = _store(info, wait)
    _init_group(backend, local, store=store, rank=info.rank, world_size=info.ranks, timeout=wait)
    if info.source != "alone":
        os.environ.update(RANK=str(info.rank), WORLD_SIZE=str(info.ranks), LOCAL_RANK=str(info.local_rank))
        if info.local_ranks is not None:
            os.environ["LOCAL_WORLD_SIZE"] = str(info.local_ranks)


@cache
def _leave_at_exit() -> None:
    """Have this process leave its process groups at exit: those that this file has made, and all of gloo's."""
    atexit.register(_leave)
    os.register_at_fork(after_in_child=partial(atexit.unregister, _leave))  # the connections are this process's


def _leave() -> None:
    """Destroy the process groups that were made here, and gloo's, whose threads otherwise sometimes abort the process.

    After an error that ends this process the groups of an accelerator are aborted: to destroy them waits for the
    collectives that the other ranks no longer take part in.

    A group that something still references keeps its threads, even if the script has destroyed the groups itself: that of a
    save which has just ended, also beside NCCL. They need the interpreter to release the last tensor they sent, and abort if
    the interpreter is gone, so they get `GRACE` seconds.
    """
    if dist.is_initialized() and (_made_here or dist.get_backend() == "gloo"):
        if dist.get_backend() != "gloo" and "last_value" in vars(sys):
            dist.distributed_c10d._abort_process_group()  # pyright: ignore[reportPrivateUsage]  no public name
        else:
            dist.destroy_process_group()
    time.sleep(GRACE)


def _check_devices(info: RankInfo, backend: str) -> None:
    """Raise `LaunchError` for ranks that would share an accelerator, with which NCCL hangs or fails later otherwise."""
    count = device_count() if _bound_kind(backend) is not None else 0
    if count > 1 and info.local_rank >= count:
        raise LaunchError(f"rank {info.rank} has no device of its own: it is local rank {info.local_rank}, and this host "
                          f"has {count}; start at most {count} ranks here, or pass dist_backend='gloo' to train on the CPU")


def _check_not_imported() -> None:
    """Raise `LaunchError` while a new worker process imports the script: it would wait for ranks in the place of its own.

    multiprocessing marks such a process by the attribute that it reads before it starts one.
    """
    process = multiprocessing.current_process()
    if getattr(process, "_inheriting", False):
        raise LaunchError(f"the worker {process.name} imports the script to begin, and is no rank; put what the script does "
                          "under if __name__ == '__main__':, which workers that are spawned need")


def _check_interfaces() -> None:
    """Raise `LaunchError` for interfaces in GLOO_SOCKET_IFNAME that this host does not have."""
    named = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
    here = sorted(name for _, name in socket.if_nameindex()) if named else []
    missing = [name for name in named if name.split(":")[0] not in here]  # eth0:1 is a second address of eth0
    if missing:
        raise LaunchError(f"GLOO_SOCKET_IFNAME: {socket.gethostname()} has no interface {', '.join(missing)}; it has "
                          f"{', '.join(here)}. Name one of these, or unset the variable")


def _keep_on_loopback(info: RankInfo) -> None:
    """Make gloo use the loopback interface if all ranks are on this host, whose name need not resolve then.

    With NCCL too, where gloo carries the headers of pipeline messages.
    """
    if info.one_host and "GLOO_SOCKET_IFNAME" not in os.environ:
        names = {name for _, name in socket.if_nameindex()}
        for name in ("lo", "lo0"):
            if name in names:
                os.environ["GLOO_SOCKET_IFNAME"] = name


def _store(info: RankInfo, wait: timedelta) -> Store:
    if info.ranks == 1:
        return HashStore()
    if info.address is not None and info.port is not None:
        return TCPStore(info.address, info.port, info.ranks, is_master=info.rank == 0, timeout=wait)
    return _announced_store(info, wait)


def _announced_store(info: RankInfo, wait: timedelta) -> Store:
    """Rendezvous on one host: rank 0 serves a store at a free port and announces it in a file until all have joined."""
    path = _announcement(info)
    if info.rank != 0:
        store = TCPStore(LOOPBACK, _announced_port(path, wait), info.ranks, is_master=False, timeout=wait)
        store.set(f"joined/{info.rank}", "")
        return store
    store = TCPStore(LOOPBACK, 0, info.ranks, is_master=True, wait_for_workers=False, timeout=wait)
    unfinished = path.with_suffix(f".{os.getpid()}")
    unfinished.write_text(json.dumps({"port": store.port, "pid": os.getpid(), "born": _start_time(os.getpid())}))
    unfinished.replace(path)
    try:
        store.wait([f"joined/{rank}" for rank in range(1, info.ranks)], wait)
    finally:
        path.unlink()
    return store


def _announcement(info: RankInfo) -> Path:
    folder = Path(tempfile.gettempdir(), f"shoal-{os.getuid()}")
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.stat().st_uid != os.getuid():
        raise LaunchError(f"{folder} belongs to another user; set MASTER_ADDR and MASTER_PORT, or another TMPDIR")
    name = info.job if info.job not in ("hydra", "pmi") else f"{info.job}-{os.getppid()}"
    return folder / f"{name}.json".replace("/", "-")


def _announced_port(path: Path, wait: timedelta) -> int:
    """Wait for the port. A file counts only while the process that wrote it runs, so that a dead job's is never read."""
    deadline = time.monotonic() + wait.total_seconds()
    while time.monotonic() < deadline:
        try:
            announced = json.loads(path.read_text())
        except FileNotFoundError:
            announced = {}
        if announced and announced["born"] == _start_time(announced["pid"]):
            return int(announced["port"])
        time.sleep(0.01)
    raise LaunchError(f"rank 0 announced no port in {path} within {wait.total_seconds():g} s; did it start? "
                      "Set MASTER_ADDR and MASTER_PORT for every rank to do without the announcement")


def _start_time(pid: int) -> str:
    """Return the start time of process `pid`, which tells it from a later one of the same id; empty if there is none."""
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
