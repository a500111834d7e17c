"""A step that begins within backward gives the same bits as a step after it.

Every feature and every stage meets every tier and every case, and every tier every case; a feature at a stage takes every
other tier and one case.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import shoal
from shoal.device import current_device, on_accelerator
from shoal.testing import run_ranks
from shoal.tier import store as stores

from .models import FEATURES, turn_of
from .trained import Result, precision, train

RANKS, STEPS = 2, 4
NVME = {"device": "nvme", "buffer_count": 2}
TIERS: dict[str, dict[str, Any]] = {
    "memory": {"offload_optimizer": {}},
    "optimizer on disk": {"offload_optimizer": NVME},
    "weights on disk": {"offload_optimizer": {}, "offload_param": NVME},
    "all on disk": {"offload_optimizer": NVME, "offload_param": NVME},
    "half of it": {"offload_optimizer": {**NVME, "ratio": 0.5}, "offload_param": {**NVME, "max_in_cpu": 2000}},
}
APART: dict[str, dict[str, Any]] = {
    "optimizer apart": {"offload_optimizer": {"device": "cpu"}},
    "all apart": {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}},
}
"""Tiers of another memory than the compute device's, as a GPU's host is."""

ADAM = {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}}
TORCH = {"type": "RMSprop", "params": {"lr": 1e-3, "momentum": 0.9}}
SCHEDULE = {"type": "WarmupLR", "params": {"warmup_num_steps": 3, "warmup_max_lr": 1e-2, "warmup_min_lr": 1e-3}}
CASES: list[dict[str, Any]] = [
    {"optimizer": ADAM, **precision("fp32"), "gradient_accumulation_steps": 2},
    {"optimizer": ADAM, "bf16": {"enabled": True, "check_grad_overflow": False}, "scheduler": SCHEDULE},
    {"optimizer": TORCH, **precision("fp32")},
]


def config(case: dict[str, Any], stage: int, tier: dict[str, Any], folder: str, *, within: bool) -> dict[str, Any]:
    placed = {key: {**block, "nvme_path": folder} for key, block in tier.items()}
    placed["offload_optimizer"]["step_in_backward"] = within
    return {"train_micro_batch_size_per_gpu": 2, "timeout": 20, "gradient_clipping": 0.0, **case,
            "zero_optimization": {"stage": stage, "sub_group_size": 700, **placed}}


def train_all(feature: str, stage: int, folder: str) -> list[tuple[str, Result, Result]]:
    """Train a case without tiers, then with steps within backward in every other tier."""
    found: list[tuple[str, Result, Result]] = []
    turn = turn_of(feature, stage)
    case = CASES[turn % len(CASES)]
    plain = train(feature, config(case, stage, {"offload_optimizer": {}}, folder, within=False), steps=STEPS)
    hosts = [*((torch.device("cpu"), tier) for tier in TIERS.items()),
             *((torch.device("cpu", 0), tier) for tier in APART.items())]  # torch takes them for two
    for host, (name, tier) in hosts[turn % 2::2]:
        stores.HOST = host
        if on_accelerator(current_device()):  # a step on its host rounds as native code does, one of state on it as torch
            plain = train(feature, config(case, stage, tier, folder, within=False), steps=STEPS)
        found.append((f"{name}, {case}", plain, train(feature, config(case, stage, tier, folder, within=True), steps=STEPS)))
    return found


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("feature", FEATURES)
def test_a_step_within_backward_trains_as_one_after_it(feature: str, stage: int, tmp_path: Path) -> None:
    for case, plain, found in run_ranks(RANKS, train_all, feature, stage, str(tmp_path))[0]:
        assert found.losses == plain.losses, case
        for name, weight in plain.weights.items():
            assert torch.equal(found.weights[name], weight), (case, name)
    assert list(tmp_path.iterdir()) == [], "swap files are left"


class RecomputedAndCalled(nn.Module):
    """Calls each block twice: within re-entrant recompute, and outside of it."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(cast(Tensor, checkpoint(block, x, use_reentrant=True)))
        return x.square().mean()


def train_with_discarded_gradients(*, within: bool) -> list[Tensor]:
    """Discard the first gradient of an accumulation after the forward of the second."""
    torch.manual_seed(0)
    engine = shoal.initialize(model=RecomputedAndCalled(), config={
        "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2, "gradient_clipping": 0.0, "optimizer": ADAM,
        "zero_optimization": {"stage": 2, "offload_optimizer": {"step_in_backward": within}}})[0]
    for _ in range(2):
        engine.backward(engine(torch.ones(2, 4, device=current_device(), requires_grad=True)))
        engine.step()
        loss = engine(torch.ones(2, 4, device=current_device(), requires_grad=True))
        engine.optimizer.zero_grad()
        engine.backward(loss)
        engine.step()
    return [parameter.detach().clone() for parameter in engine.module.parameters()]


def recompute_survives_zero_grad() -> None:
    plain, found = (train_with_discarded_gradients(within=within) for within in (False, True))
    assert all(torch.equal(a, b) for a, b in zip(plain, found, strict=True))


def test_gradients_discarded_before_recompute_step_no_unit_early() -> None:
    run_ranks(1, recompute_survives_zero_grad)
