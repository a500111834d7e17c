"""The properties of an optimizer that the placement of state depends on, known before the optimizer is built."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from shoal.engine.schema import Config
from shoal.errors import ConfigError, UsageError
from shoal.optim.compressed import CompressedOptimizer
from shoal.optim.elementwise import ADAM_MOMENTS, LAYERWISE, arithmetic_class, check_elementwise, count_moments
from shoal.optim.handed_over import hand_back
from shoal.optim.registry import make_optimizer
from shoal.optim.sharded import ShardedOptimizer
from shoal.optim.views import OptimizerGroups

__all__ = ["OptimizerSource", "OptimizerTraits", "check_optimizer", "traits_of"]

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
        weight = nn.Parameter(torch.zeros(2))
        inner = make_optimizer(settings.optimizer.type, settings.optimizer.params, [weight])
        check_optimizer(settings, inner)
        return OptimizerTraits.of(inner)
    return OptimizerTraits()


def check_optimizer(settings: Config, optimizer: Optimizer) -> None:
    """Raise unless `optimizer` can step slices of parameters, when the configuration wants them stepped."""
    check_elementwise(type(optimizer), optimizer.defaults, trusted=settings.zero_allow_untested_optimizer)
    name = type(optimizer).__name__
    if settings.zero_optimization.offload_optimizer.step_in_backward and arithmetic_class(type(optimizer)) in LAYERWISE:
        raise ConfigError(f"zero_optimization.offload_optimizer.step_in_backward: got true beside {name}, whose step needs "
                          f"norms that all ranks add up together, after backward; set it to false, or use an elementwise "
                          f"optimizer such as AdamW")
