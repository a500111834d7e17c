"""Shared by the engine's tests: an engine of a small model, and training steps on this rank's samples."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

import shoal
from shoal.engine.engine import Engine

from ..zero.models import FEATURES, batch, loss_of

ADAMW = {"type": "AdamW", "params": {"lr": 1e-2}}


def configured(stage: int = 0, **extra: Any) -> dict[str, Any]:
    """Return a configuration; a mapping in `extra` is added to the section of that name."""
    config: dict[str, Any] = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": stage},
                              "optimizer": ADAMW, "timeout": 20}
    for key, value in extra.items():
        section = config.get(key)
        merge = isinstance(section, dict) and isinstance(value, Mapping) and key != "optimizer"
        config[key] = {**section, **value} if merge else value
    return config


def model(feature: str = "plain") -> nn.Module:
    torch.manual_seed(1)
    return FEATURES[feature]()


def build(stage: int = 0, feature: str = "plain", **extra: Any) -> Engine:
    return shoal.initialize(model=model(feature), config=configured(stage, **extra))[0]


def loss(engine: Engine, step: int, micro: int = 0) -> Tensor:
    tokens, targets = batch(step, micro, engine.global_rank)
    return loss_of(engine(tokens), targets)


def train(engine: Engine, steps: int, first: int = 0) -> list[float]:
    """Take steps of as many microbatches as configured; return this rank's losses."""
    losses = []
    for step in range(first, first + steps):
        for micro in range(engine.gradient_accumulation_steps()):
            value = loss(engine, step, micro)
            engine.backward(value)
            engine.step()
            losses.append(value.item())
    return losses


def weights(engine: Engine) -> dict[str, Tensor]:
    with shoal.gathered(engine.module):
        return {name: p.detach().float().clone() for name, p in engine.module.named_parameters()}


def same(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
