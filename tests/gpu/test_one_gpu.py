"""On one accelerator every stage and dtype trains like plain PyTorch, and resumes from a checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import shoal

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; here is none")]


def model_of() -> nn.Module:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)) for _ in range(4)]
    return nn.Sequential(nn.Linear(64, 64), *blocks)


def batch(step: int) -> Tensor:
    return torch.randn(8, 64, generator=torch.Generator().manual_seed(step)).cuda()


def reference(dtype: torch.dtype, steps: int) -> list[float]:
    model = model_of().cuda()
    masters = [p.detach().clone().requires_grad_() for p in model.parameters()]
    model.to(dtype)
    optimizer = torch.optim.AdamW(masters, lr=1e-2, fused=True)
    losses = []
    for step in range(steps):
        loss = model(batch(step).to(dtype)).float().pow(2).mean()
        loss.backward()
        for p, master in zip(model.parameters(), masters, strict=True):
            master.grad, p.grad = p.grad.float(), None
        optimizer.step()
        with torch.no_grad():
            for p, master in zip(model.parameters(), masters, strict=True):
                p.copy_(master)
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_every_stage_trains_on_a_gpu_like_plain_pytorch(stage: int, dtype: str, tmp_path: Path) -> None:
    config = {"train_micro_batch_size_per_gpu": 8, "gradient_clipping": 0, "zero_optimization": {"stage": stage},
              "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.01}},
              **({dtype: {"enabled": True}} if dtype == "bf16" else {})}
    compute = {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype]
    engine = shoal.initialize(model=model_of(), config=config)[0]
    losses = []
    for step in range(6):
        loss = engine(batch(step).to(compute)).float().pow(2).mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
        if step == 2:
            engine.save_checkpoint(tmp_path)
    assert losses == pytest.approx(reference(compute, 6), rel=1e-5 if dtype == "fp32" else 2e-2)
    engine.load_checkpoint(tmp_path)
    with torch.no_grad():
        reloaded = engine(batch(3).to(compute)).float().pow(2).mean().item()
    assert reloaded == losses[3]
    engine.backward(engine(batch(3).to(compute)).float().pow(2).mean())
    engine.step()  # a fused kernel reads the step counts on the device
    with torch.no_grad():
        after = engine(batch(4).to(compute)).float().pow(2).mean().item()
    assert after == pytest.approx(losses[4], rel=1e-5 if dtype == "fp32" else 2e-2)
    engine.destroy()
