"""An engine and its model that a script no longer refers to are freed without `destroy`: a notebook runs a cell again."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from weakref import ref

import pytest
import torch
import torch.distributed as dist

import shoal
from shoal.testing import run_ranks

from ..pipeline import small
from ..zero.models import batch, loss_of
from .trained import build, configured, loss, model, train

SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "bf16": {"bf16": {"enabled": True}},
    "fp16": {"fp16": {"enabled": True, "initial_scale_power": 4}},
    "clipping": {"gradient_clipping": 1.0},
    "accumulation": {"gradient_accumulation_steps": 2},
    "recompute": {"activation_checkpointing": {"recompute": "full"}},
    "selective": {"activation_checkpointing": {"recompute": "selective"}},
    "activations on the host": {"activation_checkpointing": {"rest": "cpu"}},
    "a budget": {"activation_checkpointing": {"budget": 1 << 20}},
    "moments on the host": {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}},
    "one-bit": {"optimizer": {"type": "OneBitAdam", "params": {"lr": 1e-3, "freeze_step": 1}}},
}


def alive(references: dict[str, ref[Any]]) -> list[str]:
    """Return which of these the collector never frees."""
    return left(lambda: [name for name, reference in references.items() if reference() is not None])


def left(look: Callable[[], list[Any]]) -> list[Any]:
    """Return what `look` still finds after some time: transfers under way hold a unit, and its file, until they end."""
    deadline = time.monotonic() + 20
    while True:
        gc.collect()
        found = look()
        if not found or time.monotonic() > deadline:
            return found
        time.sleep(0.02)


def by_engine(stage: int, setting: str) -> dict[str, ref[Any]]:
    engine = build(stage, "tied" if setting == "plain" else "plain", **SETTINGS[setting])
    train(engine, 2)
    with torch.no_grad():
        loss(engine, 2)
    return {"engine": ref(engine), "model": ref(engine.module), "weight": ref(next(engine.module.parameters()))}


def by_own_optimizer(stage: int) -> dict[str, ref[Any]]:
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    config = {key: value for key, value in configured(stage).items() if key != "optimizer"}
    engine = shoal.initialize(model=net, optimizer=optimizer, config=config)[0]
    for step in range(2):
        optimizer.zero_grad()
        loss(engine, step).backward()
        optimizer.step()
    return {"engine": ref(engine), "model": ref(net), "optimizer": ref(optimizer)}


def by_pipeline(stage: int) -> dict[str, ref[Any]]:
    net = shoal.PipelineModule(small.layers(), loss_fn=small.loss_fn, partition_method="uniform", num_stages=2)
    engine = shoal.initialize(model=net, config=configured(stage, gradient_accumulation_steps=2))[0]
    tokens = torch.zeros(2, 5, dtype=torch.long)
    for _ in range(2):
        engine.train_batch(iter([(tokens, tokens)] * 2))
    return {"engine": ref(engine), "model": ref(net)}


def by_disk(folder: str) -> dict[str, ref[Any]]:
    on_disk = {"device": "nvme", "nvme_path": folder}
    engine = build(3, zero_optimization={"offload_optimizer": on_disk, "offload_param": on_disk})
    train(engine, 2)
    return {"engine": ref(engine), "model": ref(engine.module)}


def freed(stage: int, ranks: int, folder: str) -> None:
    for setting in SETTINGS:
        if setting == "one-bit" and stage == 3:  # which refuses it
            continue
        assert not alive(by_engine(stage, setting)), setting
    assert not alive(by_own_optimizer(stage))
    if ranks > 1 and stage < 2:
        assert not alive(by_pipeline(stage))
    if stage == 3:
        assert not alive(by_disk(folder))
        dist.barrier()
        assert not left(lambda: [path for path in Path(folder).rglob("*") if path.is_file()])  # nor do its files stay


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_an_engine_without_references_is_freed(ranks: int, stage: int, tmp_path: Path) -> None:
    run_ranks(ranks, freed, stage, ranks, str(tmp_path))


def model_alone(stage: int) -> list[float]:
    """Train by a model and an optimizer whose engine the script does not refer to."""
    net, losses = model(), []
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
    config = {key: value for key, value in configured(stage).items() if key != "optimizer"}
    shoal.initialize(model=net, optimizer=optimizer, config=config)
    for _ in range(3):
        gc.collect()
        optimizer.zero_grad()
        tokens, targets = batch(0, 0, 0)
        value = loss_of(net(tokens), targets)
        value.backward()
        optimizer.step()
        losses.append(value.item())
    return losses


def unreferenced(stage: int) -> None:
    losses = model_alone(stage)
    assert losses[2] < losses[1] < losses[0]


@pytest.mark.parametrize("stage", [0, 3])
def test_a_model_keeps_its_engine(stage: int) -> None:
    run_ranks(1, unreferenced, stage)
