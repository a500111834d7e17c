"""Where the state of a model is to rest, as the configuration says; what cannot work is said before anything is moved.

All ranks check, and all raise if one of them finds something.
"""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shoal.collectives import Communicator
from shoal.errors import TierError
from shoal.precision.policy import Policy
from shoal.schema import Config
from shoal.tier import Disk, Residence, Store
from shoal.tier.opening import open_store
from shoal.tier.place import free_bytes
from shoal.zero.placement import state_bytes

__all__ = ["residence"]


def residence(settings: Config, model: nn.Module, trained: Iterable[nn.Parameter], moments: int, policy: Policy,
              communicator: Communicator, device: torch.device) -> Residence:
    """Return the stores of weights and of optimizer's state for `model`, of which `trained` is stepped with `moments`.

    Raises `TierError` on every rank, naming the ranks and folders, for a folder that is missing, not writable or has too
    little space for what is to rest in it.
    """
    zero = settings.zero_optimization
    found: Residence | None = None
    problem: str | None = None
    needed: dict[Path, int] = {}
    try:
        weight = open_store(zero.offload_param, settings.aio, device, rank=communicator.rank)
        state = open_store(zero.offload_optimizer, settings.aio, device, rank=communicator.rank, at_once=zero.sub_group_size)
        found = Residence(device=device, weight=weight, state=state, ratio=zero.offload_optimizer.ratio,
                          near=zero.offload_param.max_in_cpu)
        needed = _needed(settings, model, set(trained), moments, policy, communicator.ranks, weight, state)
    except TierError as error:
        problem = str(error).removeprefix(f"rank {communicator.rank}: ")
    _agree(problem, needed, communicator)
    assert found is not None
    return found


def _needed(settings: Config, model: nn.Module, trained: set[nn.Parameter], moments: int, policy: Policy, ranks: int,
            weight: Store, state: Store) -> dict[Path, int]:
    """Return the bytes that this rank will put into each folder, beyond what is there already."""
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
    return dict(needed)


def _agree(problem: str | None, needed: dict[Path, int], communicator: Communicator) -> None:
    """Raise on every rank what any of them found, or when the ranks of a machine need more than its disk has."""
    mine = {f"{socket.gethostname()}:{folder.stat().st_dev}": (str(folder), size, free_bytes(folder))
            for folder, size in needed.items()}
    said: list[tuple[str | None, dict[str, Any]]] = communicator.gather_objects((problem, mine))
    problems = [f"rank {rank}: {text}" for rank, (text, _) in enumerate(said) if text is not None]
    totals = Counter[str]()
    places: dict[str, tuple[str, int]] = {}
    for _, disks in said:
        for disk, (folder, size, free) in disks.items():
            totals[disk] += size
            places[disk] = (folder, free)
    for disk, size in totals.items():
        folder, free = places[disk]
        if size > free:
            problems.append(f"nvme_path {folder} on {disk.partition(':')[0]}: {size:,} bytes of state are to rest there, "
                            f"and {free:,} are free; make room, give another folder, or shard over more ranks")
    if problems:
        raise TierError("initialize: " + "; ".join(problems))
