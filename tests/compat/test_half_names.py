"""Engines under the published name follow the published loss scale, and skip the published steps, as recorded there."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shoal.compat.deepspeed as deepspeed
from shoal.errors import LossScaleError
from shoal.testing import run_ranks

PATIENT = {"initial_scale_power": 4, "loss_scale_window": 2}
IMPATIENT = {**PATIENT, "hysteresis": 1, "min_loss_scale": 4}
OVERFLOWS = "0100101000"
RECORDED: list[tuple[int, dict[str, int], str, list[int]]] = [
    (0, PATIENT, "000000", [16, 16, 32, 32, 64, 64]),
    (0, PATIENT, OVERFLOWS, [16, 8, 8, 8, 4, 4, 2, 2, 2, 4]),
    (0, IMPATIENT, OVERFLOWS, [16, 8, 8, 8, 4, 4, 4, 4, 4, 8]),
    (1, PATIENT, "000000", [16, 16, 32, 32, 64, 64]),
    (1, PATIENT, OVERFLOWS, [16, 16, 16, 16, 8, 8, 4, 4, 4, 8]),
    (2, {**PATIENT, "loss_scale_window": 3, "hysteresis": 3, "consecutive_hysteresis": True}, "0001100000",
     [16, 16, 16, 16, 16, 16, 16, 16, 32, 32]),
]  # fmt: skip
"""Stage, section, the steps that overflow, and the published scale after each step. At stage 0 hysteresis has no effect."""


class Sum(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, value: Tensor) -> Tensor:
        return (self.weight * value).sum()


def scales(stage: int, fp16: dict[str, Any], overflows: str) -> list[float]:
    engine, *_ = deepspeed.initialize(model=Sum(), config={
        "train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "fp16": {"enabled": True, **fp16}, "zero_optimization": {"stage": stage}})
    found: list[float] = []
    for overflow in overflows:
        engine.backward(engine(torch.full((4,), float("inf") if overflow == "1" else 0.0, dtype=torch.half)))
        engine.step()
        found.append(engine.loss_scale())
    assert engine.skipped_steps == overflows.count("1")
    return found


def trained(stage: int, by_optimizer: bool) -> list[float]:
    torch.manual_seed(0)
    engine, optimizer, *_ = deepspeed.initialize(model=Sum(), config={
        "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 2, "gradient_clipping": 0.0,
        "optimizer": {"type": "SGD", "params": {"lr": 0.5}}, "zero_optimization": {"stage": stage},
        "fp16": {"enabled": True, "initial_scale_power": 4}})
    for value in (1.0, 3.0):
        loss = engine(torch.full((4,), value, dtype=torch.half))
        (optimizer.backward if by_optimizer else engine.backward)(loss)
        engine.step()
    return [engine.global_steps, *engine.module_state_dict()["weight"].tolist()]


def every_trained() -> list[list[float]]:
    return [trained(stage, by_optimizer) for stage in (0, 1, 2) for by_optimizer in (False, True)]


def test_optimizer_backward_scales_the_loss_as_engine_backward_does() -> None:
    found, = run_ranks(1, every_trained)
    assert found == [[1, 0.0, 0.0, 0.0, 0.0]] * 6


def every_recorded() -> list[list[float]]:
    with pytest.raises(LossScaleError):
        scales(1, IMPATIENT, OVERFLOWS)
    return [scales(stage, fp16, overflows) for stage, fp16, overflows, _ in RECORDED]


def test_engines_scale_the_loss_by_the_published_counts() -> None:
    found, = run_ranks(1, every_recorded)
    assert found == [expected for *_, expected in RECORDED]


def skipped_in_fp32(stage: int, clipping: float) -> list[tuple[int, bool]]:
    """Train on numbers of which the second is infinite and the fourth none; return what was skipped, and what is left."""
    engine, *_ = deepspeed.initialize(model=Sum(), config={
        "train_micro_batch_size_per_gpu": 1, "gradient_clipping": clipping, "zero_optimization": {"stage": stage},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.1, "torch_adam": True}}})
    found: list[tuple[int, bool]] = []
    for value in (1.0, float("inf"), 1.0, float("nan"), 1.0):
        engine.backward(engine(torch.full((4,), value)))
        engine.step()
        weights = engine.module_state_dict()["weight"]
        found.append((engine.skipped_steps, bool(torch.isfinite(weights).all())))
    return found


@pytest.mark.parametrize("stage", range(4))
def test_fp32_steps_are_skipped_as_recorded(stage: int) -> None:
    plain = [(0, True), *[(0, False)] * 4]
    sharded = [(0, True), (1, True), (1, True), (2, True), (2, True)]
    for ranks in (1, 2):
        for clipping in (0.0, 1.0):
            assert run_ranks(ranks, skipped_in_fp32, stage, clipping) == [sharded if stage else plain] * ranks
