"""A step within backward that may yet be clipped or skipped is the step after it, bit for bit: it can be undone."""

from __future__ import annotations

from collections import Counter
from math import isfinite
from pathlib import Path
from typing import Any

import pytest
import torch

from shoal.testing import run_ranks

from ..attempts import counted_ends
from .models import FEATURES, turn_of
from .trained import Result, precision, train

RANKS, STEPS = 2, 8
DISK = {"device": "nvme", "buffer_count": 2}
TIERS: dict[str, dict[str, Any]] = {
    "all on disk": {"offload_optimizer": DISK, "offload_param": DISK},
    "some weights in memory": {"offload_optimizer": DISK, "offload_param": {**DISK, "max_in_cpu": 700}},  # not attempted
}
ONE = ("recompute, re-entrant", "auxiliary")
"""Features of which but one unit is attempted, and none where its weights are in memory."""
ADAM = {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}}
MOMENTUM = {"type": "SGD", "params": {"lr": 1e-2, "momentum": 0.9}}
CASES: dict[str, dict[str, Any]] = {
    "fp32": {"optimizer": ADAM, **precision("fp32"), "gradient_accumulation_steps": 2},
    "bf16": {"optimizer": ADAM, **precision("bf16")},
    "fp16": {"optimizer": ADAM,
             "fp16": {"enabled": True, "initial_scale_power": 18, "loss_scale_window": 2, "hysteresis": 1}},
    "momentum": {"optimizer": MOMENTUM, **precision("fp32")},
}
PAIRS = [("fp32", "bf16"), ("fp16", "momentum")]
"""What a test trains, each in one of the tiers; in each pair some attempts stand and some are undone."""


def config(case: str, stage: int, tier: dict[str, Any], folder: str, *, within: bool, clipping: float) -> dict[str, Any]:
    placed = {key: {**block, "nvme_path": folder} for key, block in tier.items()}
    placed.setdefault("offload_optimizer", {})["step_in_backward"] = within
    return {"train_micro_batch_size_per_gpu": 2, "timeout": 20, "gradient_clipping": clipping, **CASES[case],
            "zero_optimization": {"stage": stage, "sub_group_size": 700, **placed}}


def train_all(feature: str, stage: int, folder: str) -> tuple[list[tuple[str, Result, Result]], Counter[str]]:
    """Return a pair of cases, trained without tiers and by attempts, and how many of these stood, and were undone."""
    found, (turn, pair) = list[tuple[str, Result, Result]](), divmod(turn_of(feature, stage), len(PAIRS))
    with counted_ends() as ends:
        for case, (name, tier) in zip(PAIRS[pair], [*TIERS.items()][::(-1) ** turn], strict=True):
            free = train(feature, config(case, stage, {}, folder, within=False, clipping=1e9), steps=STEPS)
            norms = sorted(norm for norm in free.norms if norm is not None and isfinite(norm))
            limit = norms[2 * len(norms) // 3]
            plain = train(feature, config(case, stage, {}, folder, within=False, clipping=limit), steps=STEPS)
            found.append((f"{case}, {name}", plain,
                          train(feature, config(case, stage, tier, folder, within=True, clipping=limit), steps=STEPS)))
    return found, ends


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("feature", FEATURES)
def test_a_step_ahead_of_the_norm_trains_as_one_after_it(feature: str, stage: int, tmp_path: Path) -> None:
    found, ends = run_ranks(RANKS, train_all, feature, stage, str(tmp_path))[0]
    for case, plain, attempted in found:
        assert attempted.losses == plain.losses, case
        assert str(attempted.norms) == str(plain.norms), case  # some are not a number
        for name, weight in plain.weights.items():
            assert torch.equal(attempted.weights[name], weight), (case, name)
    assert ends["undo"] and (ends["accept"] or feature in ONE), ends
    assert list(tmp_path.iterdir()) == [], "swap files are left"
