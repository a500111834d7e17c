"""The host gives the device whole steps without waiting for it: what it decides, it decides on the device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import shoal
from shoal.testing import ranks_on, run_ranks
from tests.late.device import queued
from tests.late.ranks import prepare

STEPS = 4


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(16, 16) for _ in range(4)])


def _inputs() -> list[torch.Tensor]:
    return [torch.randn(4, 16, generator=torch.Generator().manual_seed(step)) for step in range(STEPS)]


def _steps(stage: int, clipping: float, more: dict[str, Any]) -> tuple[list[int], list[float], float | None]:
    """Return how many tasks wait after each step, then the sums of the weights and the norm of the last step."""
    model = _model()
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 4, "gradient_clipping": clipping, "log_level": "error",
        "optimizer": {"type": "AdamW", "params": {"lr": 0.1, "weight_decay": 0.01}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0}, **more}
    engine = shoal.initialize(model=model, config=config)[0]
    inputs = [x.to(engine.device) for x in _inputs()]
    waiting: list[int] = []
    for x in inputs:
        engine.backward(engine(x).square().mean())
        engine.step()
        waiting.append(queued())
    norm = engine.get_global_grad_norm()
    with shoal.gathered(model):
        sums = [parameter.double().sum().item() for parameter in model.parameters()]
    return waiting, sums, norm


def _plain(clipping: float) -> tuple[list[float], float]:
    model, norm = _model(), torch.zeros(())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for x in _inputs():
        optimizer.zero_grad()
        model(x).square().mean().backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), clipping or float("inf"))
        optimizer.step()
    return [parameter.double().sum().item() for parameter in model.parameters()], norm.item()


@pytest.mark.parametrize("clipping", [0.0, 0.1])
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("stage", range(4))
def test_steps_wait_for_nothing_with_clipping_and_without(stage: int, ranks: int, clipping: float) -> None:
    sums, norm = _plain(clipping)
    with ranks_on(prepare):
        for waiting, found, found_norm in run_ranks(ranks, _steps, stage, clipping, {}):
            assert waiting == sorted(set(waiting)), "a wait ran tasks that had been queued"
            assert found == pytest.approx(sums, rel=1e-3)
            assert found_norm == pytest.approx(norm, rel=1e-3)
