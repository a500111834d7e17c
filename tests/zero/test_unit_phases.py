"""Every legal transition of a phase but those to LOST is taken by some program; a lost unit raises its step's error."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shoal
from shoal.errors import TierError
from shoal.testing import run_ranks
from shoal.zero.unit import Unit
from shoal.zero.unit_state import TRANSITIONS, Phase

Change = tuple[Phase, Phase]


class Words(nn.Module):
    """An embedding whose gradient is rows, and two blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(4096, 8, sparse=True)
        self.blocks = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))

    def forward(self, words: Tensor) -> tuple[Tensor, Tensor]:
        """Return a loss of both blocks, and one of the first."""
        first = self.blocks[0](self.table(words))
        return self.blocks[1](first).square().mean(), first.square().mean()


def engine_of(stage: int, **zero: Any) -> shoal.Engine:
    torch.manual_seed(0)
    return shoal.initialize(model=Words(), config={
        "train_micro_batch_size_per_gpu": 1, "log_level": "error", "sparse_gradients": True,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0, **zero}})[0]


def recorded() -> set[Change]:
    """Return the set to which every later change of phase on this rank is added."""
    found: set[Change] = set()
    enter = Unit._enter

    def noted(unit: Unit, phase: Phase) -> None:
        found.add((unit.phase, phase))
        enter(unit, phase)

    Unit._enter = noted
    return found


def train(engine: shoal.Engine) -> None:
    words = torch.arange(2)
    for of_first in (False, False, True):  # the last backward does not reach the second block
        engine.backward(engine(words)[of_first])
        engine.step()
    engine(words)  # without its backward


def changes(stage: int, folder: str | None = None, reuse: int = 0) -> set[Change]:
    """Train; fetch and gather units that nothing then uses. Return the changes of phase on this rank."""
    found = recorded()
    place = {"offload_param": {"device": "nvme", "nvme_path": folder},
             "offload_optimizer": {"device": "nvme", "nvme_path": folder}} if folder is not None else {}
    engine = engine_of(stage, stage3_max_reuse_distance=reuse, **place)
    train(engine)
    engine.eval()
    with torch.no_grad():
        engine(torch.arange(2))
    assert engine.sharded is not None
    units = engine.sharded.units
    for unit in units:
        unit.fetch()
        unit.release()
        unit.prefetch()
        unit.finish_transfers()
    engine.destroy()
    return found


def test_every_legal_transition_is_taken(tmp_path: Path) -> None:
    found = {change for stage, reuse in ((1, 0), (3, 0), (3, 1000)) for rank in run_ranks(2, changes, stage, None, reuse)
             for change in rank}
    found |= run_ranks(1, changes, 3, str(tmp_path))[0]
    assert found == {change for change in TRANSITIONS if change[1] is not Phase.LOST}


def fails(stage: int) -> str:
    engine = engine_of(stage)
    train(engine)
    inner = engine.optimizer.optimizer

    def raising(*_: object, **__: object) -> None:
        raise ArithmeticError("no step today")

    engine.backward(engine(torch.arange(2))[0])
    inner.step = raising
    with pytest.raises(ArithmeticError):
        engine.step()
    assert engine.sharded is not None
    assert {unit.phase for unit in engine.sharded.units} == {Phase.LOST}
    with pytest.raises(TierError) as raised:
        engine.module.blocks[0].weight.sum()
    return str(raised.value)


@pytest.mark.parametrize("stage", [1, 3])
def test_weights_after_a_failed_step_raise_its_error(stage: int) -> None:
    for message in run_ranks(2, fails, stage):
        assert "a step was taken in part" in message and "no step today" in message
