"""Moments that an optimizer allocates at construction rest in the configured tier, and do not change the weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import shoal
from shoal.testing import run_ranks


def rounded(folder: str, dtype: str, stage: int) -> bool:
    """Whether weights equal the model's, rounded, after building an optimizer that allocates moments at construction."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(6)))
    wanted = [parameter.detach().to(getattr(torch, dtype)) for parameter in model.parameters()]
    disk = {"device": "nvme", "nvme_path": folder}
    short = {"bfloat16": "bf16", "float16": "fp16"}[dtype]
    engine = shoal.initialize(model=model, config={
        "train_micro_batch_size_per_gpu": 1, short: {"enabled": True},
        "optimizer": {"type": "Adagrad", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": stage, "offload_param": disk, "offload_optimizer": disk}})[0]
    assert engine.optimizer is not None
    engine.optimizer.finish_deferred_steps()
    with shoal.gathered(model):
        found = [parameter.detach().clone() for parameter in model.parameters()]
    engine.destroy()
    return all(map(torch.equal, found, wanted))


@pytest.mark.parametrize("stage", [0, 1, 3])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_moments_allocated_at_construction_do_not_change_weights(dtype: str, stage: int, tmp_path: Path) -> None:
    assert all(run_ranks(1, rounded, str(tmp_path), dtype, stage)[0] for _ in range(3))
