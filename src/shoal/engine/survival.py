"""The parts of an engine that let a job survive faults: the vault, the guard, and the facts by which it judges a step."""

from __future__ import annotations

from itertools import count
from pathlib import Path
from weakref import WeakSet

import torch

from shoal.data.loader import Loader
from shoal.engine.schema import Config
from shoal.log import warn_once
from shoal.mesh.parameter_groups import ParameterGroups
from shoal.optim.grad_stats import GlobalNorm
from shoal.optim.sharded import ShardedOptimizer
from shoal.resilience.guard import Guard, Samples
from shoal.resilience.vault import Vault
from shoal.transport.process_group import agent_memory
from shoal.zero.sharded import ShardedModel

__all__ = ["StepJudge", "open_guard", "open_vault"]

_vaults = count()
"""Numbers of the vaults of this process; every rank builds its engines in the same order."""
_opened = WeakSet[Vault]()
"""The vaults of the engines of this process."""


def open_vault(config: Config, parameter_groups: ParameterGroups) -> Vault | None:
    """Return the vault of the engine that is being built; None where the configuration asks for none, or no agent owns it.

    A collective call.
    """
    every = config.resilience.vault.every
    if every is None:
        return None
    memory = agent_memory()
    if memory is None:
        warn_once("resilience.vault: has no effect here, because no agent owns memory that outlives the ranks; start the "
                  "script by `shoal run`")
        return None
    if others := {vault.every for vault in _opened} - {every}:
        warn_once(f"resilience.vault.every: got {every}, and {max(others)} for another engine; where the two train "
                  f"together, give both the same, so that a restart finds copies of one step")
    vault = Vault(Path(memory) / f"vault{next(_vaults)}", every, parameter_groups.world, _opened)
    _opened.add(vault)
    return vault


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


class StepJudge:
    """Has the guard judge each step of one engine, and the engine's loader leave out the samples that are at fault.

    The loader is passed to each call, for a script may replace it; one that is not Shoal's is left alone.
    """

    def __init__(self, guard: Guard, sharded: ShardedModel, loader: Loader | None):
        self._guard = guard
        self._sharded = sharded
        for unit in sharded.trainable:
            unit.gradient.accumulator.track_addend_norms()
        if loader is not None:
            loader.note_samples()
        self.leave_samples_out(loader)

    def leave_samples_out(self, loader: object) -> None:
        """Have the loader skip the samples that the guard has found to be at fault."""
        if isinstance(loader, Loader):
            for samples in self._guard.skipped:
                loader.skip(samples.epoch, samples.ids)

    def judge(self, step: int, loader: object, optimizer: ShardedOptimizer, norm: GlobalNorm) -> None:
        """Judge `step` by its gradient norm and this rank's own gradients, before a weight changes.

        An overflow of `optimizer` is one that the loss scale skips. Raises `GuardRewind` and `GuardError` as `Guard.judge`
        does, on every rank.
        """
        norms = [own for unit in self._sharded.trainable if (own := unit.gradient.accumulator.norms) is not None]
        own = torch.stack(norms).sum() if norms else torch.zeros((), dtype=torch.float32, device="cpu")
        self._guard.judge(step, norm.value, own, lambda: _samples_of_step(loader), overflow=optimizer.overflow)

    def forget(self, loader: object) -> None:
        """Forget the losses and the samples of a step that was taken or skipped."""
        self._guard.forget()
        if isinstance(loader, Loader):
            loader.take_samples()


def _samples_of_step(loader: object) -> list[Samples]:
    """Return the samples that the engine's loader has delivered since the last step; none of another loader."""
    if not isinstance(loader, Loader):
        return []
    ids = dict[int, list[int]]()
    for each in loader.take_samples():
        ids.setdefault(each.epoch, []).extend(loader.indices(each))
    return [Samples(epoch=epoch, ids=of_epoch) for epoch, of_epoch in ids.items()]
