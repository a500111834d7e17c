"""Train a small model for a few steps, and keep what two trainings are compared by."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import shoal

from .models import FEATURES, batch, loss_of


@dataclass
class Result:
    """Losses of this rank by microbatch, norms by step, and the weights at the end."""

    losses: list[float]
    norms: list[float | None]
    weights: dict[str, Tensor]


def build(feature: str) -> nn.Module:
    """Return the model of a feature, with the same weights every time."""
    torch.manual_seed(1)
    return FEATURES[feature]()


def precision(dtype: str) -> dict[str, Any]:
    """Return the section that switches a dtype on; fp16 with a scale that stays."""
    sections = {"fp32": {}, "bf16": {"bf16": {"enabled": True}}, "fp16": {"fp16": {"enabled": True, "loss_scale": 128}}}
    return sections[dtype]


def train(feature: str, config: dict[str, Any], *, steps: int,
          groups: Callable[[nn.Module], list[dict[str, Any]]] | None = None) -> Result:
    """Train the model of a feature as `config` says, with the optimizer's groups that `groups` makes of it."""
    model = build(feature)
    engine = shoal.initialize(model=model, model_parameters=None if groups is None else groups(model), config=config)[0]
    losses, norms = [], []
    for step in range(steps):
        for micro in range(engine.gradient_accumulation_steps()):
            tokens, targets = batch(step, micro, dist.get_rank())
            loss = loss_of(engine(tokens.to(engine.device)), targets.to(engine.device))
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        norms.append(engine.get_global_grad_norm())
    with shoal.gathered(model):
        weights = {name: p.detach().float().cpu().clone() for name, p in model.named_parameters()}
    engine.destroy()
    return Result(losses, norms, weights)
