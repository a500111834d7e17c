"""Weights on disk are prefetched, whichever pass used them last, and independently of the other ranks' prefetching."""

from __future__ import annotations

import random
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shoal
from shoal.optim.step_scheduler import StepScheduler
from shoal.testing import run_ranks
from shoal.zero.sharded import ShardedModel
from shoal.zero.unit import Unit
from shoal.zero.unit_state import Phase
from shoal.zero.window import Window

from .test_tiers import ALL, build, config, engine_of, train


def brought_ahead(folder: str) -> list[bool]:
    """Take a step whose thread is done before the next forward begins; return for each unit whether it was prefetched."""
    tier = {key: {**block, "buffer_count": 2} for key, block in ALL.items()}
    tier["offload_optimizer"]["step_in_backward"] = False
    engine = engine_of(folder, tier)
    train(engine, range(2))
    assert engine.optimizer is not None and engine.sharded is not None
    engine.optimizer._scheduler._join()
    ahead: list[bool] = []
    for unit in engine.sharded.units[1:]:
        def arrives(module: nn.Module, args: object, unit: Unit = unit) -> None:
            ahead.append(not unit.awaits_step and not unit.is_released)

        engine.module.get_submodule(unit.name).register_forward_pre_hook(arrives, prepend=True)
    train(engine, range(2, 3))
    engine.destroy()
    return ahead


def test_units_whose_step_is_done_are_prefetched(tmp_path: Path) -> None:
    [ahead] = run_ranks(1, brought_ahead, str(tmp_path))
    assert ahead == [True] * 2


class Early(nn.Module):
    """Skips all blocks but the first, once `early` is set."""

    early = False

    def __init__(self) -> None:
        super().__init__()
        self.blocks = build()

    def forward(self, x: Tensor) -> Tensor:
        assert isinstance(self.blocks, nn.Sequential)
        for block in self.blocks[:1] if self.early else self.blocks:
            x = block(x)
        return x


def brought_by_one_rank(folder: str, early: bool) -> tuple[bool, Tensor]:
    """Let rank 0 finish its steps and prefetch weights, while steps are pending on rank 1; use no weights, or end."""
    settings = config(folder, {key: {**block, "buffer_count": 4} for key, block in ALL.items()})
    settings["zero_optimization"]["offload_optimizer"]["step_in_backward"] = False
    settings["zero_optimization"]["stage3_prefetch_bucket_size"] = 0  # a prefetched gather would wait for the step
    model = Early()
    engine = shoal.initialize(model=model, config=settings)[0]
    assert engine.optimizer is not None and engine.sharded is not None
    train(engine, range(2))
    stepping = engine.optimizer._scheduler
    with nullcontext() if engine.global_rank == 0 else stepping._lock:  # without which the thread takes no step
        train(engine, range(2, 3))
        if engine.global_rank == 0:
            stepping._join()
            engine.sharded.run_ahead()
        arriving = any(unit.phase is Phase.LOADING for unit in engine.sharded.units)
        model.early = early
        with torch.no_grad():
            engine(torch.zeros(1, 40)) if early else engine.sharded.finish_pending()
    engine.destroy()
    return arriving, torch.nn.utils.parameters_to_vector(engine.module.parameters()).detach()


@pytest.mark.parametrize("early", [False, True])
def test_one_rank_prefetching_alone_does_not_affect_the_others(early: bool, tmp_path: Path) -> None:
    (here, found), (there, others) = run_ranks(2, brought_by_one_rank, str(tmp_path), early)
    assert (here, there) == (True, False)
    assert torch.equal(found, others)


def delay(owner: type, name: str, longest: float, chance: random.Random) -> None:
    """Delay some calls of a method by up to `longest` seconds."""
    method = getattr(owner, name)

    def late(*args: Any, **keywords: Any) -> Any:
        if chance.random() < 0.4:
            time.sleep(longest * chance.random())
        return method(*args, **keywords)

    setattr(owner, name, late)


def trained_at_its_own_pace(folder: str, tier: dict[str, Any], ahead: int, seed: int) -> tuple[list[float], Tensor]:
    """Train, with passes between that use one block; with `seed`, this rank and its thread are late at random."""
    settings = config(folder, tier, gradient_clipping=0.0)
    settings["zero_optimization"]["stage3_prefetch_bucket_size"] = ahead
    model = Early()
    engine = shoal.initialize(model=model, config=settings)[0]
    late = ((StepScheduler, "_next_chunk", 0.01), (Window, "use", 0.02), (ShardedModel, "run_ahead", 0.2))
    for owner, name, longest in late if seed else ():
        delay(owner, name, longest, random.Random(seed + engine.global_rank))
    losses: list[float] = []
    for step in range(6):
        losses += train(engine, range(step, step + 1))
        model.early = step % 2 == 0
        with torch.no_grad():
            losses.append(engine(torch.ones(1, 40)).sum().item())
        model.early = False
    engine.destroy()
    return losses, torch.nn.utils.parameters_to_vector(model.parameters()).detach()


@pytest.mark.parametrize("within", [True, False])
@pytest.mark.parametrize("ahead", [0, 1])
def test_training_does_not_depend_on_the_timing_of_step_threads(ahead: int, within: bool, tmp_path: Path) -> None:
    tier = {key: {**block, "buffer_count": 3} for key, block in ALL.items()}
    tier["offload_optimizer"]["step_in_backward"] = within
    plain = run_ranks(2, trained_at_its_own_pace, str(tmp_path), {}, ahead, 0)
    late = run_ranks(2, trained_at_its_own_pace, str(tmp_path), tier, ahead, 1 + ahead)
    for (losses, weights), (expected, others) in zip(late, plain, strict=True):
        assert losses == expected
        assert torch.equal(weights, others)
