"""Parameters that are frozen and thawed during training, and parameters that were frozen at `initialize`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shoal
from shoal.errors import UsageError
from shoal.testing import run_ranks

FROZEN = {2: ["0.weight", "0.bias", "4.bias"], 4: ["0.bias", "2.weight", "2.bias"], 6: []}
"""The names that are frozen, by the step from which they are."""


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))


def engine_of(whole: nn.Module, stage: int, **config: Any) -> shoal.Engine:
    return shoal.initialize(model=whole, config={
        "train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": stage}, "gradient_clipping": 0.5,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}}, **config})[0]


def batch(step: int) -> Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(step))


def freeze(whole: nn.Module, names: list[str]) -> None:
    for name, parameter in whole.named_parameters():
        parameter.requires_grad_(name not in names)


def trained(stage: int, config: dict[str, Any]) -> dict[str, Tensor]:
    whole = model()
    engine = engine_of(whole, stage, **config)
    for step in range(8):
        if step in FROZEN:
            freeze(whole, FROZEN[step])
        engine.backward(engine(batch(step)).square().mean())
        engine.step()
    return engine.consolidated_state_dict(torch.float32) or {}


@pytest.mark.parametrize("config", [{}, {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 16}},
                                    {"zero_optimization": {"stage": 1, "ignore_unused_parameters": False}}], ids=str)
@pytest.mark.parametrize("ranks", [1, 2])
def test_freezing_for_some_steps_trains_as_in_plain_torch(ranks: int, config: dict[str, Any]) -> None:
    plain = model()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2, weight_decay=0.1)
    for step in range(8):
        if step in FROZEN:
            freeze(plain, FROZEN[step])
        plain(batch(step)).square().mean().backward()
        nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    for stage in (0, 1, 2, 3) if not config else (config["zero_optimization"]["stage"],):
        found = run_ranks(ranks, trained, stage, config)[0]
        torch.testing.assert_close(found, dict(plain.state_dict()), rtol=1e-5, atol=1e-6)


def thawed(stage: int, folder: str) -> str:
    whole = model()
    whole[0].requires_grad_(False)
    engine = engine_of(whole, stage)
    engine.backward(engine(batch(0)).square().mean())
    engine.step()
    engine.save_checkpoint(folder)
    whole[0].requires_grad_(True)
    with pytest.raises(UsageError) as raised:
        engine.backward(engine(batch(1)).square().mean())
    again = engine_of(model(), stage)
    again.load_checkpoint(folder)
    before = again.consolidated_state_dict() or {}
    again.backward(again(batch(1)).square().mean())
    again.step()
    after = again.consolidated_state_dict() or {}
    assert all(not torch.equal(before[name], after[name]) for name in before)
    return str(raised.value)


@pytest.mark.parametrize("stage", [0, 3])
def test_training_a_parameter_frozen_at_initialize_is_refused_by_name(stage: int, tmp_path: Path) -> None:
    for rank, error in enumerate(run_ranks(2, thawed, stage, str(tmp_path))):
        assert error.startswith(f"rank {rank}: backward: 0.weight, 0.bias required no gradient")
