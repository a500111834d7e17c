"""The properties of an optimizer that the placement of state depends on, known before the optimizer is built; and the
settings that an optimizer with compressed communication excludes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from shoal.engine.schema import Config
from shoal.errors import ConfigError, NotSupportedYet, UsageError
from shoal.mesh.mesh import Mesh
from shoal.optim.compressed import CompressedOptimizer
from shoal.optim.elementwise import ADAM_MOMENTS, LAYERWISE, arithmetic_class, check_instance, count_moments
from shoal.optim.handed_over import hand_back
from shoal.optim.registry import make_optimizer
from shoal.optim.sharded import ShardedOptimizer
from shoal.optim.views import OptimizerGroups
from shoal.sparse.embeddings import Embeddings
from shoal.zero.placement import STAGES

__all__ = ["OptimizerSource", "OptimizerTraits", "check_compression", "check_optimizer", "check_warm_up", "traits_of"]

OptimizerSource = Optimizer | Callable[[Any], Optimizer]
"""An optimizer over the model's parameters, or a function of parameter groups that returns one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerTraits:
    """The properties of an optimizer that placement depends on, known before it is built."""

    name: str = ""
    moments: int = ADAM_MOMENTS
    """Tensors of a weight's shape that it keeps for each weight."""
    compressing: bool = False
    """Gradients and weights are communicated as one bit an element."""
    layerwise: bool = False
    """A step needs norms of whole parameters."""

    @classmethod
    def of(cls, optimizer: Optimizer) -> OptimizerTraits:
        kind = type(optimizer)
        return cls(name=kind.__name__, moments=count_moments(kind, optimizer.defaults),
                   compressing=isinstance(optimizer, CompressedOptimizer), layerwise=arithmetic_class(kind) in LAYERWISE)


def traits_of(settings: Config, optimizer: OptimizerSource | None) -> OptimizerTraits:
    """Return the traits of the optimizer to build, which is tried on a single weight if the configuration names it.

    Raises for an optimizer that cannot work, before the model and the optimizer are changed.
    """
    if isinstance(optimizer, Optimizer):
        if isinstance(optimizer, ShardedOptimizer):
            raise UsageError("initialize: optimizer is the one that another engine returned; build one over the model")
        hand_back(optimizer)
        check_optimizer(settings, optimizer)
        OptimizerGroups.check_new(optimizer)
        return OptimizerTraits.of(optimizer)
    if optimizer is not None and not callable(optimizer):
        raise UsageError(f"initialize: optimizer is a {type(optimizer).__name__}; pass an instance of a torch optimizer, or "
                         f"a function of parameter groups that returns one. A name goes into the configuration: "
                         f'"optimizer": {{"type": "AdamW", "params": {{...}}}}')
    if optimizer is None and settings.optimizer.type is not None:
        weight = nn.Parameter(torch.zeros(2, dtype=torch.float32, device="cpu"))
        inner = make_optimizer(settings.optimizer.type, settings.optimizer.params, [weight])
        check_optimizer(settings, inner)
        return OptimizerTraits.of(inner)
    return OptimizerTraits()


def check_optimizer(settings: Config, optimizer: Optimizer) -> None:
    """Raise unless `optimizer` can step slices of parameters, when the configuration wants them stepped."""
    check_instance(optimizer, trusted=settings.zero_allow_untested_optimizer)
    name = type(optimizer).__name__
    if settings.zero_optimization.offload_optimizer.step_in_backward and arithmetic_class(type(optimizer)) in LAYERWISE:
        raise ConfigError(f"zero_optimization.offload_optimizer.step_in_backward: got true beside {name}, whose step needs "
                          f"norms that all ranks add up together, after backward; set it to false, or use an elementwise "
                          f"optimizer such as AdamW")


# Compressed communication

_WARM_UP = ("freeze_step", "var_update_scaler")
"""The options of optimizers that name the length of their warm-up."""


def check_compression(settings: Config, mesh: Mesh, model: nn.Module, name: str) -> None:
    """Raise `ConfigError` for a setting that the compressing optimizer `name` cannot serve, naming one that it can.

    Such an optimizer publishes updates of whole weights. So weights rest on every rank (stages 0 to 2), change nowhere else,
    and one owner has the sum of a slice.
    """
    zero = settings.zero_optimization
    if STAGES[zero.stage].shards_weights:
        raise ConfigError(f"zero_optimization.stage: got {zero.stage} with {name}: weights that are gathered for every use "
                          f"travel whole, twice a step, and no update of them can be sent instead; choose 0, 1 or 2 (each "
                          f"keeps masters and moments sharded with {name}), or AdamW at stage 3")
    if mesh.size("replica") > 1:
        raise ConfigError(f"zero_optimization.mics_shard_size: got {mesh.size('replica')} copies of the sharded state with "
                          f"{name}: the copies would add their sums uncompressed; leave it out")
    for key in ("offload_optimizer", "offload_param"):
        if getattr(zero, key).device != "none":
            raise NotSupportedYet(f"zero_optimization.{key}.device: got '{getattr(zero, key).device}' with {name}, whose "
                                  f"masters are compared with the weights at every step; leave it out, or take AdamW")
    if settings.sparse_gradients:
        raise ConfigError(f"sparse_gradients: got true with {name}, which compresses whole gradients to one bit an "
                          f"element: leave it out, and sparse gradients are made dense; or take AdamW or Adagrad with it")
    for path, module in model.named_modules():
        if isinstance(module, Embeddings) and module.max_norm is not None:
            raise ConfigError(f"embedding '{path}' has max_norm={module.max_norm:g} with {name}: it rewrites the rows that "
                              f"a rank looks up in that rank's copy of the weights alone, and copies that receive the same "
                              f"updates never meet again. Leave it out, and bound the rows in the forward instead")


def check_warm_up(optimizer: CompressedOptimizer, total: object) -> None:
    """Raise unless the warm-up ends before a training of `total` steps does, where that is a number."""
    name = type(optimizer).__name__
    for group in optimizer.param_groups:
        if isinstance(total, int | float) and optimizer.warmup_steps(group) >= total:
            key = next(key for key in _WARM_UP if key in group)
            raise ConfigError(f"{name}: {key}: got {group[key]}, and the schedule has {total:g} steps: training would "
                              f"end before anything is compressed; give {max(1, int(total) // 5)}, a fifth of it")
