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
from shoal.log import logger
from shoal.mesh.parameter_groups import ParameterGroups
from shoal.precision.policy import Policy
from shoal.tier import Disk, StoragePlan, Store
from shoal.tier.disk_span import CHUNK
from shoal.tier.folder_check import free_bytes
from shoal.tier.memory_left import memory_left
from shoal.tier.open_stores import WRITE_AHEAD, open_store
from shoal.transport.collectives import Communicator
from shoal.zero.placement import state_bytes
from shoal.zero.sharded import ShardedModel
from shoal.zero.working_memory import working

__all__ = ["plan_storage", "spares_memory"]

_SHARE = 1 / 8
"""Of the memory that is left: what attempts may take of it unless they are asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Wish:
    """The bytes that a rank is to put into a folder, on which disk of which machine that is, and what is free there."""

    host: str
    disk: int
    folder: str
    bytes: int
    again: int
    """Of what a step writes: it may rest there beside what was there before."""
    free: int


def plan_storage(settings: Config, model: nn.Module, trained: Iterable[nn.Parameter], moments: int, policy: Policy,
              parameter_groups: ParameterGroups, device: torch.device, *, attempted: bool) -> StoragePlan:
    """Return the stores of weights and of optimizer's state for `model`, of which `trained` is stepped with `moments`.

    Where steps are to be `attempted` what they write needs a second place on disk. Raises `TierError` on every rank, naming
    the ranks and folders, for a folder that is missing, not writable or has too little space for what is to rest in it; for
    the second place only if `step_in_backward` asks for it.
    """
    zero = settings.zero_optimization
    found: StoragePlan | None = None
    problem: str | None = None
    once: Mapping[Path, int] = {}
    again: Mapping[Path, int] = {}
    try:
        weight = open_store(zero.offload_param, settings.aio, device, rank=parameter_groups.world.rank)
        state = open_store(zero.offload_optimizer, settings.aio, device, rank=parameter_groups.world.rank,
                           at_once=zero.sub_group_size)
        found = StoragePlan(device=device, weight=weight, state=state, ratio=zero.offload_optimizer.ratio,
                          near=zero.offload_param.max_in_cpu)
        once, again = _needed(settings, model, set(trained), moments, policy, parameter_groups.state_shards, weight, state)
    except TierError as error:
        problem = str(error).removeprefix(f"rank {parameter_groups.world.rank}: ")
    asked = attempted and settings.zero_optimization.offload_optimizer.step_in_backward is not None
    twice, neighbours = _agree(problem, once, again, parameter_groups.world, asked=asked)
    assert found is not None
    found.twice, found.again, found.neighbours = attempted and twice, {} if asked else again, neighbours
    return found


def spares_memory(settings: Config, model: ShardedModel, moments: int, policy: Policy) -> bool:
    """Return whether attempts may take the memory that they take more.

    They may if it is asked for, or at most a `_SHARE` of what is left, for all ranks of this machine: what their scripts
    take beside, activations first of all, is not known.
    """
    zero, left = settings.zero_optimization, memory_left()
    if zero.offload_optimizer.step_in_backward is not None or left is None:
        return True
    attempted, plain = (working(
        [unit.layout.size for unit in model.trainable], zero.stage, model.parameter_groups.state_shards,
        compute=policy.compute, accumulate=policy.accumulate, moments=moments, weights_away=True, state_away=True,
        window=zero.offload_param.buffer_count, pieces=zero.offload_optimizer.buffer_count,
        piece=min(zero.sub_group_size, CHUNK), write_ahead=WRITE_AHEAD, in_backward=within, attempted=within).total
        for within in (True, False))
    more = (attempted - plain) * model.residence.neighbours
    if model.residence.twice and more > _SHARE * left:
        logger.info("steps wait for the end of backward: to attempt them in it would take %d more bytes of memory on this "
                    "machine, of %d that are left; offload_optimizer.step_in_backward true asks for it", more, left)
    return more <= _SHARE * left


def _needed(settings: Config, model: nn.Module, trained: set[nn.Parameter], moments: int, policy: Policy, ranks: int,
            weight: Store, state: Store) -> tuple[Mapping[Path, int], Mapping[Path, int]]:
    """Return the bytes that this rank will put into each folder beyond what is there already, and what steps write of it."""
    zero = settings.zero_optimization
    stepped = sum(p.numel() for p in model.parameters() if p in trained and p.requires_grad)
    whole = sum(p.numel() for p in model.parameters())
    step = state_bytes(zero.stage, int(stepped * zero.offload_optimizer.ratio), ranks, compute=policy.compute,
                       accumulate=policy.accumulate, moments=moments)
    rest = state_bytes(zero.stage, max(0, whole - zero.offload_param.max_in_cpu), ranks, compute=policy.compute)
    once, again = Counter[Path](), Counter[Path]()
    for store, read, written in ((weight, 0, rest.weight), (state, step.gradient, step.master + step.moments)):
        if isinstance(store, Disk):
            once[store.swap.path.parent.parent] += read + written
            again[store.swap.path.parent.parent] += written
    for swap in {store.swap for store in (weight, state) if isinstance(store, Disk)}:
        once[swap.path.parent.parent] -= swap.disk_bytes  # a model that was built there moves over
    return once, again


def _agree(problem: str | None, once: Mapping[Path, int], again: Mapping[Path, int], communicator: Communicator, *,
           asked: bool) -> tuple[bool, int]:
    """Raise on every rank what any of them found, or when the ranks of a machine need more than its disk has.

    Return whether there is room for what steps write to be there twice (at least if that is `asked` for, else if it takes no
    more than half of what is left, as others want to write there too, checkpoints say), and how many ranks are on this
    machine.
    """
    mine = [_Wish(host=socket.gethostname(), disk=folder.stat().st_dev, folder=str(folder),
                  bytes=size + (again[folder] if asked else 0), again=0 if asked else again[folder],
                  free=free_bytes(folder)) for folder, size in once.items()]
    here = socket.gethostname()
    said: list[tuple[str | None, str, list[_Wish]]] = communicator.gather_objects((problem, here, mine))
    problems = [f"rank {rank}: {text}" for rank, (text, _, _) in enumerate(said) if text is not None]
    disks: dict[tuple[str, int], list[_Wish]] = {}
    twice = True
    for wish in (wish for _, _, wishes in said for wish in wishes):
        disks.setdefault((wish.host, wish.disk), []).append(wish)
    for (host, _), wishes in disks.items():
        size, free = sum(wish.bytes for wish in wishes), wishes[-1].free
        twice = twice and 2 * sum(wish.again for wish in wishes) <= free - size
        if size > free:
            folders = " and ".join(dict.fromkeys(wish.folder for wish in wishes))
            problems.append(f"nvme_path {folders} on {host}: {size:,} bytes of state are to rest there, "
                            f"and {free:,} are free; make room, give another folder, or shard over more ranks")
    if problems:
        raise TierError("initialize: " + "; ".join(problems))
    return twice, [host for _, host, _ in said].count(here)
