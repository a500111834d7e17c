"""A first gradient after the warm-up, where the frozen variance is 0, causes no large step under compression."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shoal
from shoal.testing import run_ranks

RATE = 1e-3


class Late(nn.Module):
    """Uses its second layer, and the last rows of its embedding, from one step on."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.first, self.second = nn.Embedding(256, 16), nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor, *, all: bool) -> Tensor:
        y = self.first(self.embed(x if all else x % 128))
        return self.second(y.tanh()) if all else y


def moved(kind: str, params: dict[str, Any], at: int, native: bool) -> float:
    """Train, with all of the model from step `at` on; return the largest change of a weight in one step."""
    settings = {"lr": RATE, **params, **({} if native else {"eps_inside_sqrt": True, "eps": 1e-16})}
    engine = shoal.initialize(model=Late(), config={
        "train_micro_batch_size_per_gpu": 8, "zero_optimization": {"stage": 1},
        "optimizer": {"type": kind, "params": settings}})[0]
    farthest = 0.0
    for step in range(1, at + 12):
        random = torch.Generator().manual_seed(2 * step + engine.global_rank)
        before = [parameter.detach().clone() for parameter in engine.module.parameters()]
        engine.backward((engine(torch.randint(256, (8,), generator=random), all=step >= at) - 1).square().mean())
        engine.step()
        after = [parameter.detach() for parameter in engine.module.parameters()]
        farthest = max(farthest, *((b - a).abs().max().item() for a, b in zip(before, after, strict=True)))
        assert engine.optimizer is not None
        for group in engine.optimizer.param_groups:
            group["lr"] = RATE / (8 if step > 8 else 1)
    return farthest


LOCAL_STEPS = {"var_update_scaler": 2, "var_freeze_step": 8, "local_step_scaler": 2, "local_step_clipper": 4}


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize(("kind", "params", "far"), [
    ("ZeroOneAdam", {"var_update_scaler": 2}, 20), ("ZeroOneAdam", LOCAL_STEPS, 20), ("OneBitAdam", {"freeze_step": 3}, 20),
    ("OneBitLamb", {"freeze_step": 3}, 80)], ids=str)
def test_a_late_first_gradient_causes_no_large_step(kind: str, params: dict[str, Any], far: int, native: bool) -> None:
    for at in (2, 5, 8, 11, 14, 17):
        for farthest in run_ranks(2, moved, kind, params, at, native):
            assert 0 < farthest < far * RATE, (at, farthest)
