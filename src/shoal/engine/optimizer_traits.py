"""What is known of the optimizer that `initialize` is given, or that the configuration names, before it is built."""

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
from shoal.optim.elementwise import ADAM_MOMENTS, LAYERWISE, check_elementwise, moments_of
from shoal.optim.groups import Groups
from shoal.optim.registry import make_optimizer

__all__ = ["OptimizerSource", "OptimizerTraits", "check_optimizer", "chosen"]

OptimizerSource = Optimizer | Callable[[Any], Optimizer]


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerTraits:
    """What is known of the optimizer before it is built."""

    name: str = ""
    moments: int = ADAM_MOMENTS
    """How many tensors of a weight's shape it keeps for it."""
    compressing: bool = False
    """Whether it lets state travel as signs."""
    layerwise: bool = False
    """Whether its step needs norms of whole parameters."""

    @classmethod
    def of(cls, optimizer: Optimizer) -> OptimizerTraits:
        return cls(name=type(optimizer).__name__, moments=moments_of(type(optimizer), optimizer.defaults),
                   compressing=isinstance(optimizer, CompressedOptimizer), layerwise=type(optimizer) in LAYERWISE)


def chosen(settings: Config, optimizer: OptimizerSource | None) -> OptimizerTraits:
    """Refuse what can be refused before the model and the optimizer are touched, on a single weight as a stand-in."""
    if isinstance(optimizer, Optimizer):
        check_optimizer(settings, optimizer)
        Groups.check_new(optimizer)
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
    """Raise unless `optimizer` can step slices, in the way that the configuration asks for."""
    check_elementwise(type(optimizer), optimizer.defaults, trusted=settings.zero_allow_untested_optimizer)
    name = type(optimizer).__name__
    if settings.zero_optimization.offload_optimizer.step_in_backward and type(optimizer) in LAYERWISE:
        raise ConfigError(f"zero_optimization.offload_optimizer.step_in_backward: got true beside {name}, whose step needs "
                          f"norms that all ranks add up together, after backward; set it to false, or use an elementwise "
                          f"optimizer such as AdamW")
