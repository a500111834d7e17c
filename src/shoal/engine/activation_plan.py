"""Activations by plan: which blocks recompute, and where the tensors that autograd saves rest until backward."""

from __future__ import annotations

from functools import partial

from shoal.activation import Budget, RecomputeMode, SavedActivations, Slices
from shoal.engine.base import BaseEngine
from shoal.engine.schema import Config
from shoal.errors import ConfigError
from shoal.log import warn_once
from shoal.mesh.parameter_groups import COPIES
from shoal.tier import Disk
from shoal.tier.store import open_store
from shoal.transport.collectives import Communicator
from shoal.zero.partition import blocks

__all__ = ["recompute_as_configured", "saved_activations"]


def recompute_as_configured(settings: Config, engine: BaseEngine) -> None:
    """Have the repeated blocks of the engine's model recompute their activations as configured."""
    section = settings.activation_checkpointing
    recompute = RecomputeMode(section.recompute)
    if recompute is RecomputeMode.NONE and section.budget is None:
        return
    key, got = ("budget", section.budget) if section.budget is not None else ("recompute", f"'{recompute.value}'")
    engine.recompute([module for root in engine.roots for module in blocks(root) if any(True for _ in module.children())],
                     recompute)
    if not any(engine.parameter_groups.world.gather_objects(len(engine.recomputed))):
        raise ConfigError(f"activation_checkpointing.{key}: got {got}; the {type(engine.module).__name__} "
                          f"has no repeated blocks (modules of one class in a ModuleList or Sequential, with layers in "
                          f"them). Call torch.utils.checkpoint.checkpoint in its forward, or remove the key")


def saved_activations(settings: Config, engine: BaseEngine) -> SavedActivations | None:
    """Return where saved tensors rest until backward, None where all stay. Raises `TierError` for an unusable folder."""
    section, device, groups = settings.activation_checkpointing, engine.device, engine.parameter_groups
    store = open_store(section.offload, settings.aio, device, rank=groups.world.rank)
    if section.offload.device == "cpu" and store.device == device:
        warn_once("activation_checkpointing: saved tensors are to rest in host memory, where the model computes: no effect")
    slices = budget = None
    if section.partition_activations and groups.tensor is None:
        warn_once("activation_checkpointing.partition_activations: has no effect without several tensor ranks")
    elif section.partition_activations and not engine.recomputed:
        warn_once("activation_checkpointing.partition_activations: has no effect without recompute: of saved tensors only "
                  "the inputs of recomputed blocks are alike on all tensor ranks. Set recompute to selective or full")
    elif section.partition_activations and groups.tensor is not None:
        slices = Slices(groups.tensor, engine.recomputed)
    if section.budget is not None:
        blocks_of = {root: [block for block in engine.recomputed if block in set(root.modules())] for root in engine.roots}
        budget = Budget(section.budget, blocks_of, partial(_most, groups.communicator(*COPIES)), engine.moments)
    moves = store.device != device or isinstance(store, Disk)
    return SavedActivations(store, device, slices=slices, budget=budget) if moves or slices or budget else None


def _most(communicator: Communicator, numbers: list[int]) -> list[int]:
    """Return the largest of each number over the ranks."""
    return [max(each) for each in zip(*communicator.gather_objects(numbers), strict=True)]
