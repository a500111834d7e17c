"""A checkpoint of any stage on any ranks resumes at any other."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import shoal
from shoal.checkpoint import PendingSave
from shoal.checkpoint import folder as folders
from shoal.engine.engine import Engine
from shoal.errors import UsageError
from shoal.testing import run_ranks

from ..zero.models import FEATURES, batch, loss_of

STEPS = 3


def build(feature: str, stage: int, ranks: int, **extra: Any) -> Engine:
    torch.manual_seed(dist.get_rank() if dist.is_initialized() else 0)
    model = FEATURES[feature]()
    config = {
        "train_batch_size": 8, "train_micro_batch_size_per_gpu": 2, "gradient_clipping": 1.0,
        "zero_optimization": {"stage": stage}, "timeout": 20,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-2, "warmup_num_steps": 4}}, **extra,
    }
    return shoal.initialize(model=model, config=config)[0]


def train(engine: Engine, first: int, steps: int) -> list[float]:
    """Train on the same samples on any number of ranks; return the mean losses."""
    ranks, rank, losses = engine.world_size, engine.global_rank, []
    for step in range(first, first + steps):
        total = torch.zeros(())
        for micro in range(engine.gradient_accumulation_steps()):
            tokens, targets = batch(step, 0, micro * ranks + rank)
            loss = loss_of(engine(tokens), targets)
            engine.backward(loss)
            engine.step()
            total += loss.detach()
        dist.all_reduce(total)
        losses.append(total.item() / engine.gradient_accumulation_steps() / ranks)
    return losses


def weights(engine: Engine) -> dict[str, Tensor]:
    with shoal.gathered(engine.module):
        return {name: p.detach().float().clone() for name, p in engine.module.named_parameters()}


def save(folder: str, feature: str, stage: int, extra: dict[str, Any]) -> tuple[list[float], dict[str, Tensor]]:
    engine = build(feature, stage, dist.get_world_size(), **extra)
    train(engine, 0, STEPS)
    engine.save_checkpoint(folder, client_state={"epoch": 7, "ema": torch.arange(3.0)})
    saved = weights(engine)
    rest = train(engine, STEPS, STEPS)
    engine.wait_for_checkpoint()
    return rest, saved


def load(folder: str, feature: str, stage: int, extra: dict[str, Any]) -> tuple[list[float], dict[str, Tensor]]:
    engine = build(feature, stage, dist.get_world_size(), **extra)
    path, client = engine.load_checkpoint(folder)
    assert path is not None and client is not None and client["epoch"] == 7 and client["ema"].tolist() == [0, 1, 2]
    assert engine.global_steps == STEPS
    loaded = weights(engine)
    return train(engine, STEPS, STEPS), loaded


@pytest.mark.parametrize("feature", ["plain", "tied", "frozen", "unused", "sometimes"])
@pytest.mark.parametrize("stage", range(4))
def test_a_resumed_run_has_the_same_bits(feature: str, stage: int, tmp_path: Path) -> None:
    rest, saved = run_ranks(2, save, str(tmp_path), feature, stage, {})[0]
    resumed, loaded = run_ranks(2, load, str(tmp_path), feature, stage, {})[0]
    assert all(torch.equal(saved[name], loaded[name]) for name in saved)
    if feature != "sometimes":  # it counts its own calls, which no checkpoint knows
        assert resumed == rest


@pytest.mark.parametrize(("before", "after"), [((3, 4), (0, 1)), ((0, 1), (3, 4)), ((1, 2), (3, 1)), ((3, 2), (2, 4))])
@pytest.mark.parametrize("feature", ["plain", "unused"])
def test_any_stage_on_any_ranks_loads_any_other(feature: str, before: tuple[int, int], after: tuple[int, int],
                                                tmp_path: Path) -> None:
    rest, saved = run_ranks(before[1], save, str(tmp_path), feature, before[0], {})[0]
    resumed, loaded = run_ranks(after[1], load, str(tmp_path), feature, after[0], {})[0]
    assert all(torch.equal(saved[name], loaded[name]) for name in saved)
    assert resumed == pytest.approx(rest, rel=1e-5)


def test_a_bf16_run_resumes_with_the_same_bits(tmp_path: Path) -> None:
    bf16 = {"bf16": {"enabled": True}}
    rest, _ = run_ranks(2, save, str(tmp_path), "plain", 3, bf16)[0]
    assert run_ranks(2, load, str(tmp_path), "plain", 3, bf16)[0][0] == rest


def lonely(folder: str) -> None:
    engine = build("plain", 3, 1)
    assert engine.load_checkpoint(folder) == (None, None)
    with pytest.raises(UsageError, match=r"client_state\.bad"):
        engine.save_checkpoint(folder, client_state={"bad": object()})
    with pytest.raises(UsageError, match="save_dir is empty"):
        engine.save_checkpoint("")


def test_a_missing_latest_warns_and_bad_client_state_is_refused(tmp_path: Path) -> None:
    run_ranks(1, lonely, str(tmp_path))


def at_once(folder: str) -> None:
    """Load a save that is published only when it is waited for, by the engine that saves and by another one."""
    publish, awaited = folders.publish, threading.Event()

    def when_awaited(path: Path, tag: str) -> None:
        awaited.wait()
        publish(path, tag)

    def then_wait(wait: Callable[[PendingSave], None]) -> Callable[[PendingSave], None]:
        def waiting(pending: PendingSave) -> None:
            if not pending.done:  # as the last one is, which the next save asks for
                awaited.set()
            wait(pending)
        return waiting

    folders.publish = when_awaited
    PendingSave.wait_until_ended = then_wait(PendingSave.wait_until_ended)
    PendingSave.raise_failure = then_wait(PendingSave.raise_failure)
    engine, other = build("plain", 1, 2), build("plain", 3, 2)
    for step, reader in enumerate([engine, other]):
        train(engine, step, 1)
        awaited.clear()
        engine.save_checkpoint(folder)
        assert reader.load_checkpoint(folder)[0] == str(Path(folder) / f"global_step{step + 1}")
        assert reader.global_steps == step + 1


def test_loading_waits_for_a_save_that_is_being_written(tmp_path: Path) -> None:
    run_ranks(2, at_once, str(tmp_path))
