"""Plan where a model's state rests, as the configuration says. Ranks check folders and disk space before anything is moved.

All ranks check, and all raise if one of them finds a problem.
"""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from shoal.engine.schema import Config
from shoal.errors import TierError
from shoal.mesh.parameter_groups import ParameterGroups
from shoal.precision.policy import Policy
from shoal.tier import Disk, StoragePlan, Store
from shoal.tier.folder_check import free_bytes
from shoal.tier.store import open_store
from shoal.transport.collectives import Communicator
from shoal.zero.placement import state_bytes

__all__ = ["plan_storage"]


@dataclass(frozen=True, slots=True, kw_only=True)
class _DiskDemand:
    """The bytes that one rank will put into a folder, the disk that holds the folder, and the free bytes of that disk."""

    host: str
    disk: int
    folder: str
    bytes: int
    free: int


def plan_storage(settings: Config, model: nn.Module, trained: Iterable[nn.Parameter], moments: int, policy: Policy,
                 parameter_groups: ParameterGroups, device: torch.device) -> StoragePlan:
    """Return the stores for `model`'s weights and optimizer state; `trained` parameters are stepped with `moments` tensors.

    Raises `TierError` on every rank, naming the ranks and folders, for a folder that is missing, not writable or has too
    little space for the state that is to rest in it.
    """
    zero = settings.zero_optimization
    plan: StoragePlan | None = None
    problem: str | None = None
    demand: Mapping[Path, int] = {}
    try:
        weight = open_store(zero.offload_param, settings.aio, device, rank=parameter_groups.world.rank)
        state = open_store(zero.offload_optimizer, settings.aio, device, rank=parameter_groups.world.rank,
                           at_once=zero.sub_group_size)
        plan = StoragePlan(device=device, weight=weight, state=state, ratio=zero.offload_optimizer.ratio,
                           host_elements=zero.offload_param.max_in_cpu)
        demand = _demand(settings, model, set(trained), moments, policy, parameter_groups.state_shards, weight, state)
    except TierError as error:
        problem = str(error).removeprefix(f"rank {parameter_groups.world.rank}: ")
    _check_disks(problem, demand, parameter_groups.world)
    assert plan is not None
    return plan


def _demand(settings: Config, model: nn.Module, trained: set[nn.Parameter], moments: int, policy: Policy, shards: int,
            weight: Store, state: Store) -> Mapping[Path, int]:
    """Return the bytes that this rank will put into each folder, beyond those that its stores have allocated already."""
    zero = settings.zero_optimization
    stepped = sum(p.numel() for p in model.parameters() if p in trained and p.requires_grad)
    total = sum(p.numel() for p in model.parameters())
    step = state_bytes(zero.stage, int(stepped * zero.offload_optimizer.ratio), shards, compute=policy.compute,
                       accumulate=policy.accumulate, moments=moments)
    rest = state_bytes(zero.stage, max(0, total - zero.offload_param.max_in_cpu), shards, compute=policy.compute)
    demand = Counter[Path]()
    for store, size in ((weight, rest.weight), (state, step.gradient + step.master + step.moments)):
        if isinstance(store, Disk):
            demand[store.swap.path.parent.parent] += size
    for swap in {store.swap for store in (weight, state) if isinstance(store, Disk)}:
        demand[swap.path.parent.parent] -= swap.disk_bytes  # of a model that was built there: its weights move over
    return demand


def _check_disks(problem: str | None, demand: Mapping[Path, int], communicator: Communicator) -> None:
    """Raise on every rank the `problem` of any of them, or if the ranks of a machine need more than its disk has free."""
    host = socket.gethostname()
    own = [_DiskDemand(host=host, disk=folder.stat().st_dev, folder=str(folder), bytes=size, free=free_bytes(folder))
           for folder, size in demand.items()]
    by_rank: list[tuple[str | None, list[_DiskDemand]]] = communicator.gather_objects((problem, own))
    problems = [f"rank {rank}: {text}" for rank, (text, _) in enumerate(by_rank) if text is not None]
    disks: dict[tuple[str, int], list[_DiskDemand]] = {}
    for each in (each for _, demands in by_rank for each in demands):
        disks.setdefault((each.host, each.disk), []).append(each)
    for (name, _), demands in disks.items():
        size, free = sum(each.bytes for each in demands), demands[-1].free
        if size > free:
            folders = " and ".join(dict.fromkeys(each.folder for each in demands))
            problems.append(f"nvme_path {folders} on {name}: {size:,} bytes of state are to rest there, "
                            f"and {free:,} are free; make room, give another folder, or shard over more ranks")
    if problems:
        raise TierError("initialize: " + "; ".join(problems))
