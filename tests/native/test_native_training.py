"""An engine with native steps trains as one with torch's steps, and each resumes the other's checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shoal
from shoal.native import step as native
from shoal.optim import step_pass
from shoal.testing import run_ranks

pytestmark = pytest.mark.skipif(not native.available(), reason="native code needs a C++ compiler")


def engine_of(stage: int, dtype: str, *, torch_adam: bool) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(24, 24) for _ in range(4)))
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2, "gradient_clipping": 0.1, "zero_optimization": {"stage": stage}, "timeout": 20,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1, "torch_adam": torch_adam}},
        "data_types": {"grad_accum_dtype": "fp32"}, "communication_data_type": "fp32",
    }
    if dtype != "fp32":
        config[dtype] = {"enabled": True, **({"loss_scale": 128} if dtype == "fp16" else {})}
    return shoal.initialize(model=model, config=config)[0]


def train(engine: Any, steps: range) -> None:
    dtype = engine.module[0].weight.dtype
    for number in steps:
        torch.manual_seed(10 * number + engine.communicator.rank)
        engine.backward(engine(torch.randn(2, 24, dtype=dtype)).float().pow(2).mean())
        engine.step()


def weights(engine: Any) -> list[Tensor]:
    return list((engine.consolidated_state_dict(dtype=torch.float32) or {}).values())


def compared(stage: int, dtype: str) -> tuple[list[Tensor], list[Tensor], int]:
    calls: list[int] = []
    kernel = step_pass.step
    step_pass.step = lambda *args, **kwargs: (calls.append(1), kernel(*args, **kwargs))  # type: ignore[assignment]
    found = []
    for torch_adam in (False, True):
        engine = engine_of(stage, dtype, torch_adam=torch_adam)
        train(engine, range(6))
        found.append(weights(engine))
    return *found, len(calls)


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("stage", range(4))
def test_native_steps_train_as_torch_steps_do(stage: int, dtype: str) -> None:
    ours, theirs, calls = run_ranks(2, compared, stage, dtype)[0]
    tolerance = 1e-5 if dtype == "fp32" else 2e-2
    assert calls > 0
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


def resumed(folder: str, first: bool) -> tuple[list[Tensor], list[Tensor]]:
    straight = engine_of(2, "fp32", torch_adam=first)
    train(straight, range(3))
    straight.save_checkpoint(folder, tag="here")
    straight.wait_for_checkpoint()
    train(straight, range(3, 6))
    other = engine_of(1, "fp32", torch_adam=not first)
    other.load_checkpoint(folder, tag="here")
    train(other, range(3, 6))
    return weights(straight), weights(other)


@pytest.mark.parametrize("first", [False, True])
def test_native_and_torch_steps_resume_each_others_checkpoints(first: bool, tmp_path: Path) -> None:
    for one, other in zip(*run_ranks(2, resumed, str(tmp_path), first)[0], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
