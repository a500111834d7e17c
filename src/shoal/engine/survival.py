"""The parts of an engine that let a job survive faults: the vault, the guard, and the facts by which it judges a step."""

from __future__ import annotations

from itertools import count
from pathlib import Path

import torch

from shoal.data.loader import Loader
from shoal.engine.schema import Config
from shoal.errors import NotSupportedYet
from shoal.log import warn_once
from shoal.mesh.parameter_groups import ParameterGroups
from shoal.resilience.guard import Guard, Samples
from shoal.resilience.vault import Vault
from shoal.transport.process_group import agent_memory
from shoal.zero.sharded import ShardedModel

__all__ = ["judge_step", "open_guard", "open_vault"]

_vaults = count()
"""Numbers of the vaults of this process; every rank builds its engines in the same order."""


def open_vault(config: Config, parameter_groups: ParameterGroups) -> Vault | None:
    """Return the vault of the engine that is being built; None where the configuration asks for none, or no agent owns it.

    Raises `NotSupportedYet` where the ranks are on several nodes.
    """
    every = config.resilience.vault.every
    if every is None:
        return None
    memory = agent_memory()
    if memory is None:
        warn_once("resilience.vault: has no effect here, because no agent owns memory that outlives the ranks; start the "
                  "script by `shoal run`")
        return None
    if not memory.whole_job:
        raise NotSupportedYet("resilience.vault: not supported yet on several nodes; remove it, and save checkpoints where "
                              "all nodes see them")
    return Vault(Path(memory.folder) / f"vault{next(_vaults)}", every, parameter_groups.world)


def open_guard(config: Config, parameter_groups: ParameterGroups, vault: Vault | None) -> Guard | None:
    """Return the guard of the engine that is being built; None where the configuration asks for none, or without vault."""
    settings = config.resilience.guard
    if not settings.enabled:
        return None
    if vault is None:
        warn_once("resilience.guard: has no effect here, because no copy of the training outlives the ranks; start the "
                  "script by `shoal run`")
        return None
    return Guard(vault.folder.with_suffix(".guard.json"), settings, parameter_groups.world)


def judge_step(guard: Guard, step: int, norm: float, sharded: ShardedModel, loader: object, *, overflow: bool) -> None:
    """Have the guard judge `step` by its gradient norm and this rank's own gradients, before a weight changes.

    An `overflow` is one that the loss scale skips.

    Raises `GuardRewind` and `GuardError` as `Guard.judge` does, on every rank.
    """
    norms = [own for unit in sharded.trainable if (own := unit.gradient.accumulator.norms) is not None]
    own = torch.stack(norms).sum() if norms else torch.zeros(())
    guard.judge(step, norm, own, lambda: _samples_of_step(loader), overflow=overflow)


def _samples_of_step(loader: object) -> list[Samples]:
    """Return the samples that the engine's loader has delivered since the last step; none of another loader."""
    if not isinstance(loader, Loader):
        return []
    ids = dict[int, list[int]]()
    for each in loader.take_samples():
        ids.setdefault(each.epoch, []).extend(loader.indices(each))
    return [Samples(epoch=epoch, ids=of_epoch) for epoch, of_epoch in ids.items()]
