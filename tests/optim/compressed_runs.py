"""Models and training loops for the tests of optimizers that compress."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import shoal

FREEZE, SIZE = 4, 40
PARAMS = {"lr": 1e-2, "weight_decay": 0.1}
WARM: dict[str, dict[str, Any]] = {"OneBitAdam": {"freeze_step": FREEZE}, "OneBitLamb": {"freeze_step": FREEZE},
                                   "ZeroOneAdam": {"var_update_scaler": FREEZE, "local_step_clipper": 1}}
KINDS = tuple(WARM)
LOCAL_STEPS = {"var_freeze_step": FREEZE, "local_step_scaler": 4, "local_step_clipper": 3}
"""Steps 5 to 8 synchronise each; then every second step does, then every third, as far as the learning rate has fallen."""


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(SIZE, SIZE), nn.Tanh(), nn.LayerNorm(SIZE), nn.Linear(SIZE, 3))


class Whole(nn.Module):
    """A model of one unit."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(SIZE, SIZE), nn.Linear(SIZE, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).tanh())


def engine_of(stage: int = 1, params: dict[str, Any] | None = None, *, build: Callable[[], nn.Module] = model,
              kind: str = "OneBitAdam", **config: Any) -> shoal.Engine:
    return shoal.initialize(model=build(), config={
        "train_micro_batch_size_per_gpu": 8, "gradient_clipping": 0.0, "zero_optimization": {"stage": stage},
        "optimizer": {"type": kind, "params": PARAMS | WARM[kind] | (params or {})}} | config)[0]


def batch(step: int, rank: int) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(100 * step + rank)
    x = torch.randn(8, SIZE, generator=random)
    return x, x[:, :3].sin()


def train(engine: shoal.Engine, steps: range, *, rank: int | None = None) -> list[float]:
    losses: list[float] = []
    for step in steps:
        x, y = batch(step, engine.global_rank if rank is None else rank)
        loss = nn.functional.mse_loss(engine(x.to(next(engine.module.parameters()).dtype)).float(), y)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def weights(engine: shoal.Engine) -> Tensor:
    return torch.cat([parameter.detach().float().flatten() for parameter in engine.module.parameters()])


def lower_rate(engine: shoal.Engine) -> None:
    """Lower the learning rate to a third after the warm-up."""
    assert engine.optimizer is not None
    for group in engine.optimizer.param_groups:
        group["lr"] = PARAMS["lr"] / (3 if engine.global_steps >= FREEZE else 1)
