"""The plan of a model's activations: which blocks recompute, and where saved tensors are stored until backward."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from functools import partial

import torch
from torch import nn

from shoal.activation import Budget, RecomputeMode, SavedActivations, Slices
from shoal.activation.budget import RESTING, STAYING
from shoal.engine.base import BaseEngine
from shoal.engine.schema import Config
from shoal.errors import ConfigError
from shoal.log import warn_once
from shoal.mesh.mesh import AXES
from shoal.mesh.parameter_groups import AXES_OF_ONE_PASS, REPLICA_AXES
from shoal.module_hooks import is_scripted
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
    found = _blocks_with_layers(engine)
    _refuse_scripted(f"{key}: got {got}", found)
    engine.recompute(found, recompute)
    if not any(engine.parameter_groups.world.gather_objects(len(engine.recomputed))):
        raise ConfigError(f"activation_checkpointing.{key}: got {got}; the {type(engine.module).__name__} "
                          f"has no repeated blocks (modules of one class in a ModuleList or Sequential, with layers or "
                          f"several matrices in them). Call torch.utils.checkpoint.checkpoint in its forward, or remove "
                          f"the key")


def _blocks_with_layers(engine: BaseEngine) -> list[nn.Module]:
    """Return the repeated blocks of this rank that have layers in them; a collective call.

    Layers of a pipeline repeat those of all stages: a stage may have one of them.
    """
    found = {module: None for root in engine.roots for module in blocks(root)}
    if engine.mesh.size("pipeline") > 1:
        layers = [layer for root in engine.roots for layer in root.children()]
        mine = engine.mesh.rank(*(axis for axis in AXES if axis != "pipeline")), [_class(layer) for layer in layers]
        listed = engine.parameter_groups.world.gather_objects(mine)
        counts = Counter(name for coordinate, names in listed if coordinate == 0 for name in names)
        found |= {layer: None for layer in layers
                  if counts[_class(layer)] > 1 and not any(module in found for module in layer.modules())}
    return [module for module in found if _has_layers(module)]


def _has_layers(module: nn.Module) -> bool:
    """Whether a module computes more than one layer does: it has children, or the matrices of several layers."""
    return any(True for _ in module.children()) or sum(parameter.ndim > 1 for parameter in module.parameters()) > 1


def _refuse_scripted(given: str, found: Iterable[nn.Module]) -> None:
    """Raise `ConfigError` for a block with TorchScript in it, which saves other tensors once it has compiled itself."""
    for module in found:
        for name, inner in module.named_modules():
            if is_scripted(inner):
                raise ConfigError(f"activation_checkpointing.{given}; '{name}' in a {type(module).__name__} is a "
                                  f"TorchScript module, and torch's checkpoint cannot end a recompute within its "
                                  f"interpreter. Take the torch module that was scripted or traced, or remove the key")


def _class(module: nn.Module) -> str:
    return f"{type(module).__module__}.{type(module).__qualname__}"


def saved_activations(settings: Config, engine: BaseEngine) -> SavedActivations | None:
    """Return where saved tensors rest until backward, None where all stay. Raises `TierError` for an unusable folder."""
    section, device, groups = settings.activation_checkpointing, engine.device, engine.parameter_groups
    store = open_store(section.offload, settings.aio, device, rank=groups.world.rank)
    if section.offload.device == "cpu" and store.device == device:
        warn_once("activation_checkpointing: saved tensors are to rest in host memory, where the model computes: no effect")
    moves = store.device != device or isinstance(store, Disk)
    if moves:
        _refuse_late_noise(section.offload.device, engine)
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
        most_of, most_of_pass = (partial(_most, groups.communicator(*axes)) for axes in (REPLICA_AXES, AXES_OF_ONE_PASS))
        budget = Budget(section.budget, blocks_of, most_of, most_of_pass, engine.moments, RESTING if moves else STAYING)
    return SavedActivations(store, device, slices=slices, budget=budget) if moves or slices or budget else None


def _refuse_late_noise(rest: str, engine: BaseEngine) -> None:
    """Raise `ConfigError` for a layer whose noise torch saves before it has drawn it, without a later version."""
    for root in engine.roots:
        for name, module in root.named_modules():
            if isinstance(module, nn.RReLU):
                raise ConfigError(f"activation_checkpointing.rest: got '{rest}'; the layer '{name}' is an nn.RReLU, whose "
                                  f"noise torch draws after autograd has saved its memory: a copy lacks it. Leave rest out, "
                                  f"or take another activation, as nn.LeakyReLU or nn.PReLU")


def _most(communicator: Communicator, numbers: list[int]) -> list[int]:
    """Return the largest of each number over the ranks."""
    if communicator.ranks == 1:  # once a pass: no wait for a device
        return numbers
    words = torch.tensor(numbers, dtype=torch.int64, device=communicator.words_device)
    return communicator.gather_words(words).amax(0).tolist()
