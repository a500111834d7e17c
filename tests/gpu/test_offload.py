"""Offload from one GPU to its host or to disk trains like no offload, within rounding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import shoal

from .test_one_gpu import batch, model_of

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; here is none")]

TIERS: dict[str, dict[str, Any]] = {
    "optimizer on the host": {"offload_optimizer": {"device": "cpu"}},
    "all on the host": {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}},
    "half on the host": {"offload_optimizer": {"device": "cpu", "ratio": 0.5}},
    "all on disk": {"offload_optimizer": {"device": "nvme"}, "offload_param": {"device": "nvme"}},
}


def train(tier: dict[str, Any], stage: int, dtype: str, folder: str) -> tuple[list[float], list[Tensor]]:
    offload = {key: {**block, "nvme_path": folder} for key, block in tier.items()}
    config = {"train_micro_batch_size_per_gpu": 8, "gradient_clipping": 0.5, "gradient_accumulation_steps": 2,
              "zero_optimization": {"stage": stage, **offload}, "data_types": {"grad_accum_dtype": "fp32"},
              "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.01}},
              **({dtype: {"enabled": True}} if dtype == "bf16" else {})}
    engine = shoal.initialize(model=model_of(), config=config)[0]
    compute = {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype]
    losses = []
    for step in range(6):
        loss = engine(batch(step).to(compute)).float().pow(2).mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    weights = list((engine.consolidated_state_dict(dtype=torch.float32) or {}).values())
    engine.destroy()
    return losses, weights


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("tier", TIERS)
def test_offload_trains_like_no_offload(tier: str, stage: int, dtype: str, tmp_path: Path) -> None:
    resident, offloaded = train({}, stage, dtype, str(tmp_path)), train(TIERS[tier], stage, dtype, str(tmp_path))
    assert offloaded[0] == pytest.approx(resident[0], rel=1e-5 if dtype == "fp32" else 2e-2)
    rtol, atol = (1e-4, 1e-5) if dtype == "fp32" else (2e-2, 2e-2)
    for one, other in zip(offloaded[1], resident[1], strict=True):
        torch.testing.assert_close(one, other, rtol=rtol, atol=atol)
