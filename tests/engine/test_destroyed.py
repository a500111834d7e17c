"""`destroy` detaches the engine even if an error occurs; a destroyed engine refuses every call."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shoal
from shoal.checkpoint import folder as folders
from shoal.engine.engine import Engine
from shoal.errors import CheckpointError, UsageError
from shoal.testing import run_ranks

from ..pipeline.small import Block, Embed, Head, loss_fn
from .trained import build, configured, loss, train, weights


def unsaved(folder: str, stage: int) -> None:
    """Destroy an engine whose last save has failed, before the failure was reported."""
    def refuse(path: Path, tag: str) -> None:
        raise OSError("the disk is gone")

    folders.publish = refuse
    engine = build(stage)
    train(engine, 1)
    engine.save_checkpoint(folder)
    expected, net = weights(engine), engine.module
    with pytest.raises(CheckpointError, match="the disk is gone"):
        engine.destroy()
    assert all(type(p) is nn.Parameter and torch.equal(p, expected[name]) for name, p in net.named_parameters())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in net.modules())
    engine.destroy()
    train(shoal.initialize(model=net, config=configured(stage))[0], 1)


@pytest.mark.parametrize("stage", [1, 3])
def test_destroy_detaches_even_if_the_last_save_failed(stage: int, tmp_path: Path) -> None:
    run_ranks(2, unsaved, str(tmp_path), stage)


CALLS: dict[str, Callable[[Engine, str], object]] = {
    "forward": lambda engine, folder: loss(engine, 0),
    "backward": lambda engine, folder: engine.backward(torch.ones((), requires_grad=True)),
    "step": lambda engine, folder: engine.step(),
    "save_checkpoint": lambda engine, folder: engine.save_checkpoint(folder),
    "load_checkpoint": lambda engine, folder: engine.load_checkpoint(folder),
    "consolidated_state_dict": lambda engine, folder: engine.consolidated_state_dict(),
    "load_module_state_dict": lambda engine, folder: engine.load_module_state_dict({}),
    "trace": lambda engine, folder: engine.trace().__enter__(),
}


def refused(folder: str) -> dict[str, str]:
    engine = build(3)
    train(engine, 1)
    engine.destroy()
    errors = {}
    for name, call in CALLS.items():
        with pytest.raises(UsageError) as raised:
            call(engine, folder)
        errors[name] = str(raised.value)
    return errors


def test_a_destroyed_engine_refuses_every_call(tmp_path: Path) -> None:
    for name, text in run_ranks(1, refused, str(tmp_path))[0].items():
        assert text.startswith(f"{name}: this engine was destroyed") and "shoal.initialize" in text
    assert list(tmp_path.iterdir()) == []


def refused_by_pipeline() -> list[str]:
    module = shoal.PipelineModule([Embed(), Block(), Head()], num_stages=1, loss_fn=loss_fn)
    engine: Any = shoal.initialize(model=module, config=configured())[0]
    engine.destroy()
    errors = []
    for call in (engine.train_batch, engine.eval_batch):
        with pytest.raises(UsageError) as raised:
            call(iter([]))
        errors.append(str(raised.value))
    return errors


def test_a_destroyed_pipeline_engine_refuses_every_call() -> None:
    assert [text.partition(",")[0] for text in run_ranks(1, refused_by_pipeline)[0]] == [
        "train_batch: this engine was destroyed", "eval_batch: this engine was destroyed"]
