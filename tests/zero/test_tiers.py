"""Training in every tier gives the same bits as training without tiers, at every stage.

Every feature meets every tier at every stage in one case of dtype, optimizer, accumulation and clipping, and over the
stages in each of them. Tiers of another memory take turns: each meets every feature, every stage and every case.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from shoal.testing import run_ranks
from shoal.tier import store as stores
from tests.devices import TIERS_AGREE

from .models import FEATURES, turn_of
from .trained import Result, precision, train

RANKS, STEPS = 2, 3
TIERS: dict[str, dict[str, Any]] = {
    "optimizer on the host": {"offload_optimizer": {"device": "cpu"}},
    "optimizer on disk": {"offload_optimizer": {"device": "nvme"}},
    "weights on disk": {"offload_param": {"device": "nvme"}},
    "all on disk": {"offload_optimizer": {"device": "nvme"}, "offload_param": {"device": "nvme", "buffer_count": 2}},
    "half of it": {"offload_optimizer": {"device": "nvme", "ratio": 0.5, "buffer_count": 1},
                   "offload_param": {"device": "nvme", "max_in_cpu": 2000}},
}
APART: dict[str, dict[str, Any]] = {
    "optimizer apart": {"offload_optimizer": {"device": "cpu"}},
    "all apart": {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}},
    "half apart": {"offload_optimizer": {"device": "cpu", "ratio": 0.5}, "offload_param": {"device": "cpu"}},
}
"""Tiers of another memory than the compute device's, as a GPU's host is."""

ALL = TIERS | APART

@dataclass(frozen=True)
class Case:
    feature: str
    dtype: str
    accumulation: int
    clipping: float
    optimizer: dict[str, Any]
    tier: dict[str, Any]


ADAM = {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}}
TORCH = {"type": "RMSprop", "params": {"lr": 1e-3, "momentum": 0.9}}


def cases(feature: str) -> list[Case]:
    return [Case(feature, "fp32", 2, 0.5, ADAM, {}), Case(feature, "bf16", 1, 0.0, TORCH, {}),
            Case(feature, "fp16", 2, 0.5, ADAM, {})]


def config(case: Case, stage: int, folder: str) -> dict[str, Any]:
    tier = {key: {**block, "nvme_path": folder if block["device"] == "nvme" else None} for key, block in case.tier.items()}
    return {
        "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": case.accumulation, "timeout": 20,
        "gradient_clipping": case.clipping, "zero_optimization": {"stage": stage, "sub_group_size": 700, **tier},
        "optimizer": case.optimizer,
        **precision(case.dtype),
    }


def run(case: Case, stage: int, folder: str) -> Result:
    return train(case.feature, config(case, stage, folder), steps=STEPS)


def train_all(feature: str, stage: int, folder: str) -> list[tuple[Case, str, Result, Result]]:
    """Train each case without tiers, then one case in each of `TIERS` and one in one of `APART`, in their turns."""
    found: list[tuple[Case, str, Result, Result]] = []
    turn, every, apart = turn_of(feature, stage), cases(feature), [*APART]
    plains = [run(case, stage, folder) for case in every]
    taken = [(torch.device("cpu"), name, (turn + index) % len(every)) for index, name in enumerate(TIERS)]
    other = torch.device("cpu", 0)  # torch takes it for another device than "cpu"
    taken.append((other, apart[turn % len(apart)], turn // len(apart) % len(every)))
    for host, name, index in taken:
        stores.HOST = host
        found.append((every[index], name, plains[index], run(replace(every[index], tier=ALL[name]), stage, folder)))
    return found


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("feature", FEATURES)
def test_every_tier_trains_as_without_tiers(feature: str, stage: int, tmp_path: Path) -> None:
    for case, tier, plain, found in run_ranks(RANKS, train_all, feature, stage, str(tmp_path))[0]:
        for one, other in ((found.losses, plain.losses), (found.norms, plain.norms), (found.weights, plain.weights)):
            torch.testing.assert_close(one, other, **TIERS_AGREE, msg=lambda text, at=(case, tier): f"{at}: {text}")
    assert list(tmp_path.iterdir()) == [], "swap files are left"
