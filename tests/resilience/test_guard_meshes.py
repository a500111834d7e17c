"""The guard judges alike on every rank of any mesh: pipelines, tensor ranks and data ranks, and fp16 with its loss scale."""

from __future__ import annotations

import logging
import os
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shoal
from shoal.data.order import permutation
from shoal.errors import GuardError
from shoal.recording.page import PAGES
from shoal.tensor_parallel import Column, Plan, Row, Whole, parallelize
from shoal.testing import run_ranks

STEPS, FAULT = 20, 15
"""Steps of a run, and those that are taken before the fault."""
WIDTH = 8
PLAN = Plan({"0": Whole(), "*.up": Column(), "*.down": Row(), "3": Whole()})
FP16 = {"fp16": {"enabled": True, "initial_scale_power": 4, "loss_scale_window": 3, "hysteresis": 1, "auto_cast": True}}
LARGE = frozenset(range(20, 400, 40))
"""Samples whose activations overflow in fp16."""
OVERFLOWS = [5, 7, 9, 14, 15]
"""The steps that such samples are in; the last two are after the last copy before the fault."""


class Rows(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    def __init__(self, poisoned: frozenset[int], large: frozenset[int]) -> None:
        self.poisoned, self.large = poisoned, large

    def __len__(self) -> int:
        return 400

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        row = torch.randn(WIDTH, generator=torch.Generator().manual_seed(index))
        return row * (torch.nan if index in self.poisoned else 6e4 if index in self.large else 1), row.sum().reshape(1)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.down(torch.tanh(self.up(x))))


@dataclass(frozen=True, kw_only=True)
class Case:
    """A job, and the fault of one of its attempts."""

    pipeline: int = 1
    tensor: int = 1
    stage: int = 0
    fp16: bool = False
    flip: int | None = None
    """The rank whose gradient is wrong at step `FAULT + 1`."""
    factor: float = 1e9
    poisoned: frozenset[int] = frozenset()
    guarded: bool = True
    skipped: tuple[int, ...] = ()
    """Samples that the loader leaves out from the first epoch on."""


@dataclass(frozen=True, kw_only=True)
class Found:
    """What one rank saw of an attempt."""

    losses: dict[int, float]
    """By steps taken."""
    scales: dict[int, float]
    skipped_steps: int
    messages: list[str]
    ended: str


def loss_of(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs.float() - targets).square().mean()


def build(case: Case) -> Any:
    config = {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": case.stage},
              "optimizer": {"type": "Adam", "params": {"lr": 0.01}}, **(FP16 if case.fp16 else {}),
              "resilience": {"vault": {"every": 4}, "guard": {"enabled": case.guarded, "deviations": 50}}}
    mesh = shoal.Mesh(pipeline=case.pipeline, tensor=case.tensor)
    torch.manual_seed(0)
    layers = [(nn.Linear, (WIDTH, WIDTH)), (Block, ()), (Block, ()), (nn.Linear, (WIDTH, 1))]
    model = (shoal.PipelineModule([shoal.LayerSpec(kind, *args) for kind, args in layers], loss_fn=loss_of,
                                  num_stages=case.pipeline)
             if case.pipeline > 1 else nn.Sequential(*(kind(*args) for kind, args in layers)))
    if case.tensor > 1:
        parallelize(model, mesh.group("tensor"), PLAN, stages=mesh.group("pipeline"))
    rows = Rows(case.poisoned, LARGE if case.fp16 else frozenset())
    engine, _, loader, _ = shoal.initialize(model=model, config=config, training_data=rows, mpu=mesh)
    assert loader is not None
    loader.skip(0, case.skipped)

    def flip(gradient: Tensor) -> Tensor:
        wrong = engine.global_rank == case.flip and engine.global_steps == FAULT
        return gradient * case.factor if wrong else gradient

    next(iter(model.parameters())).register_hook(flip)
    return engine


def step(engine: Any, rows: Any) -> float:
    if isinstance(engine, shoal.PipelineEngine):
        return engine.train_batch(rows).item()
    total = 0.0
    for _ in range(engine.gradient_accumulation_steps()):
        inputs, targets = next(rows)
        loss = loss_of(engine(inputs), targets)
        engine.backward(loss)
        engine.step()
        total += loss.item()
    return total


def attempt(case: Case, memory: str) -> Found:
    """Train to the last step from what an earlier attempt left."""
    os.environ[PAGES] = memory
    os.makedirs(memory, exist_ok=True)
    messages: list[str] = []
    logging.getLogger("shoal").addHandler(handler := logging.Handler())
    handler.emit = lambda record: messages.append(record.getMessage())
    engine = build(case)
    engine.load_checkpoint(f"{memory}/none")
    losses, scales, ended = dict[int, float](), dict[int, float](), ""
    rows = iter(engine.training_dataloader)
    try:
        while engine.global_steps < STEPS:
            loss = step(engine, rows)
            losses[engine.global_steps], scales[engine.global_steps] = loss, engine.loss_scale()
    except GuardError as error:
        ended = f"{type(error).__name__}: {error}"
    return Found(losses=losses, scales=scales, skipped_steps=engine.skipped_steps, messages=messages, ended=ended)


def attempts(ranks: int, memory: Path, *cases: Case) -> list[list[Found]]:
    return [run_ranks(ranks, attempt, case, str(memory)) for case in cases]


def check_same_training(found: list[list[Found]], expected: list[Found]) -> None:
    """Assert that the last attempts to reach each step did what one without a fault does, bit by bit."""
    for rank, alone in enumerate(expected):
        losses = {at: loss for each in found for at, loss in each[rank].losses.items()}
        assert repr(losses) == repr(alone.losses)  # of steps that overflow the loss is no number, which equals nothing
        assert {at: scale for each in found for at, scale in each[rank].scales.items()} == alone.scales
        assert found[-1][rank].skipped_steps == alone.skipped_steps


@pytest.mark.parametrize(("ranks", "case"), [
    (4, Case(pipeline=2, stage=1, flip=3)),
    (4, Case(tensor=2, stage=3, flip=1)),
    (8, Case(pipeline=2, tensor=2, stage=2, fp16=True, flip=5, factor=300.0)),
], ids=["pipeline x data", "tensor x data", "pipeline x tensor x data, fp16"])
def test_every_rank_of_a_mesh_replays_and_the_faulty_one_is_named(ranks: int, case: Case, tmp_path: Path) -> None:
    found = attempts(ranks, tmp_path / "memory", case, replace(case, flip=None))
    (ended,) = {each.ended for each in found[0]}
    assert ended.startswith(f"GuardRewind: step {FAULT + 1}: the gradient norm is ")
    assert {each.ended for each in found[1]} == {""}
    assert any(f"hardware: rank {case.flip} had another result" in text for text in found[1][0].messages)
    (undisturbed,) = attempts(ranks, tmp_path / "other", replace(case, flip=None, guarded=False))
    assert not case.fp16 or [step for step, loss in undisturbed[0].losses.items() if loss != loss] == OVERFLOWS
    check_same_training(found, undisturbed)




def test_an_overflow_at_a_replay_is_another_result_and_stays_the_scalers(tmp_path: Path) -> None:
    case = Case(stage=1, fp16=True, flip=1, factor=300.0)
    found = attempts(4, tmp_path / "memory", case, replace(case, factor=1e9))
    assert {each.ended.partition(":")[0] for each in found[0]} == {"GuardRewind"}
    assert {each.ended for each in found[1]} == {""}
    assert any("hardware: rank 1 had another result" in text for text in found[1][0].messages)
    assert {each.skipped_steps for each in found[1]} == {len(OVERFLOWS) + 1}


def test_a_pipeline_goes_on_without_the_samples_at_fault(tmp_path: Path) -> None:
    poisoned = int(permutation(400, seed=0, epoch=0, shuffle=True)[8 * FAULT + 3])
    case = Case(pipeline=2, stage=1, poisoned=frozenset([poisoned]))
    found = attempts(4, tmp_path / "memory", *[case] * 3)
    assert all(f"step {FAULT + 1}: the loss is nan" in each.ended and "it is replayed" in each.ended for each in found[0])
    (ended,) = {each.ended for each in found[1]}
    (skipped,) = re.findall(r"without the samples of this step \(epoch 0: ([\d, ]+)\)", ended)
    ids = tuple(int(each) for each in skipped.split(", "))
    assert len(set(ids)) == 8
    assert poisoned in ids
    assert {each.ended for each in found[2]} == {""}
    (without,) = attempts(4, tmp_path / "other", replace(case, skipped=ids, guarded=False))
    check_same_training(found, without)
