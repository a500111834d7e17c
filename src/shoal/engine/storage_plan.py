"""Where the state of a model is to rest, as the configuration says; what cannot work is said before anything is moved.

All ranks check, and all raise if one of them finds something.
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
class _Wish:
    """The bytes that a rank is to put into a folder, on which disk of which machine that is, and what is free there."""

    host: str
    disk: int
    folder: str
    bytes: int
    free: int


def plan_storage(settings: Config, model: nn.Module, trained: Iterable[nn.Parameter], moments: int, policy: Policy,
              parameter_groups: ParameterGroups, device: torch.device) -> StoragePlan:
    """Return the stores of weights and of optimizer's state for `model`, of which `trained` is stepped with `moments`.

    Raises `TierError` on every rank, naming the ranks and folders, for a folder that is missing, not writable or has too
    little space for what is to rest in it.
    """
    zero = settings.zero_optimization
    found: StoragePlan | None = None
    problem: str | None = None
    needed: Mapping[Path, int] = {}
    try:
        weight = open_store(zero.offload_param, settings.aio, device, rank=parameter_groups.world.rank)
        state = open_store(zero.offload_optimizer, settings.aio, device, rank=parameter_groups.world.rank,
                           at_once=zero.sub_group_size)
        found = StoragePlan(device=device, weight=weight, state=state, ratio=zero.offload_optimizer.ratio,
                          host_elements=zero.offload_param.max_in_cpu)
        needed = _needed(settings, model, set(trained), moments, policy, parameter_groups.state_shards, weight, state)
    except TierError as error:
        problem = str(error).removeprefix(f"rank {parameter_groups.world.rank}: ")
    _refuse(problem, needed, parameter_groups.world)
    assert found is not None
    return found


def _needed(settings: Config, model: nn.Module, trained: set[nn.Parameter], moments: int, policy: Policy, ranks: int,
            weight: Store, state: Store) -> Mapping[Path, int]:
    """Return the bytes that this rank will put into each folder beyond what is there already."""
    zero = settings.zero_optimization
    stepped = sum(p.numel() for p in model.parameters() if p in trained and p.requires_grad)
    whole = sum(p.numel() for p in model.parameters())
    step = state_bytes(zero.stage, int(stepped * zero.offload_optimizer.ratio), ranks, compute=policy.compute,
                       accumulate=policy.accumulate, moments=moments)
    rest = state_bytes(zero.stage, max(0, whole - zero.offload_param.max_in_cpu), ranks, compute=policy.compute)
    needed = Counter[Path]()
    for store, size in ((weight, rest.weight), (state, step.gradient + step.master + step.moments)):
        if isinstance(store, Disk):
            needed[store.swap.path.parent.parent] += size
    for swap in {store.swap for store in (weight, state) if isinstance(store, Disk)}:
        needed[swap.path.parent.parent] -= swap.disk_bytes  # a model that was built there moves over
    return needed


def _refuse(problem: str | None, needed: Mapping[Path, int], communicator: Communicator) -> None:
    """Raise on every rank the `problem` of any of them, or when the ranks of a machine need more than its disk has."""
    host = socket.gethostname()
    mine = [_Wish(host=host, disk=folder.stat().st_dev, folder=str(folder), bytes=size, free=free_bytes(folder))
            for folder, size in needed.items()]
    gathered: list[tuple[str | None, list[_Wish]]] = communicator.gather_objects((problem, mine))
    problems = [f"rank {rank}: {text}" for rank, (text, _) in enumerate(gathered) if text is not None]
    disks: dict[tuple[str, int], list[_Wish]] = {}
    for wish in (wish for _, wishes in gathered for wish in wishes):
        disks.setdefault((wish.host, wish.disk), []).append(wish)
    for (host, _), wishes in disks.items():
        size, free = sum(wish.bytes for wish in wishes), wishes[-1].free
        if size > free:
            folders = " and ".join(dict.fromkeys(wish.folder for wish in wishes))
            problems.append(f"nvme_path {folders} on {host}: {size:,} bytes of state are to rest there, "
                            f"and {free:,} are free; make room, give another folder, or shard over more ranks")
    if problems:
        raise TierError("initialize: " + "; ".join(problems))
