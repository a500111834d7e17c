"""With one tensor rank a sliced model trains under an engine like the plain one, bit for bit, at every stage."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional

import shoal
from shoal.tensor_parallel import Plan, parallelize
from shoal.testing import run_ranks

from .test_plan import PLAN, WORDS, model


def trained(cut: bool, dtype: str) -> list[list[float]]:
    """Return the losses of each stage on two data ranks, each with a tensor axis of one rank."""
    alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    losses: list[list[float]] = []
    for stage in range(4):
        config: dict[str, Any] = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": stage}, "timeout": 20,
                                  "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}, "gradient_clipping": 1.0}
        if dtype != "fp32":
            config[dtype] = {"enabled": True}
        built = model()
        assert alone is not None
        engine, *_ = shoal.initialize(model=parallelize(built, alone, Plan(PLAN, sequence_dim=1)) if cut else built,
                                      config=config)
        losses.append([])
        for step in range(3):
            tokens = torch.randint(WORDS, (2, 8), generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
            loss = functional.cross_entropy(engine(tokens).float().flatten(0, 1), tokens.flatten())
            engine.backward(loss)
            engine.step()
            losses[-1].append(loss.item())
    return losses


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_sliced_model_trains_like_the_plain_one(dtype: str) -> None:
    assert run_ranks(2, trained, True, dtype) == run_ranks(2, trained, False, dtype)
