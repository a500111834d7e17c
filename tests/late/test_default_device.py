"""A script may call `torch.set_default_device`: what the library makes for itself stays where it belongs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shoal
from shoal.testing import ranks_on, run_ranks
from tests.late.ranks import prepare

WIDTH = 16
HOST: dict[str, Any] = {"device": "cpu", "step_in_backward": True}
DISK: dict[str, Any] = {"device": "nvme", "buffer_count": 2}


def _trained(folder: str, default: str, tier: dict[str, Any]) -> list[Tensor]:
    """Train, save, load and train on with this default device; return the weights."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(3)])
    placed = {key: {"nvme_path": folder, **block} for key, block in tier.items()}
    torch.set_default_device(default)
    engine = shoal.initialize(model=model, config={
        "train_micro_batch_size_per_gpu": 2, "log_level": "error", "gradient_clipping": 0.0,
        "bf16": {"enabled": True, "check_grad_overflow": False}, "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0, **placed}})[0]
    for step in range(3):
        random = torch.Generator().manual_seed(step)
        x = torch.randn(2, WIDTH, generator=random, device="cpu").to(engine.device, torch.bfloat16)
        engine.backward(engine(x).float().square().mean())
        engine.step()
        if step == 1:
            engine.save_checkpoint(f"{folder}/saved {default}")
            engine.load_checkpoint(f"{folder}/saved {default}")
    with shoal.gathered(model):
        weights = [parameter.detach().cpu() for parameter in model.parameters()]
    engine.destroy()
    return weights


@pytest.mark.parametrize("tier", [{}, {"offload_optimizer": HOST}, {"offload_optimizer": DISK, "offload_param": DISK}],
                         ids=["device", "host", "disk"])
def test_training_does_not_depend_on_the_default_device(tier: dict[str, Any], tmp_path: Any) -> None:
    with ranks_on(prepare):
        (usual,), (other,) = (run_ranks(1, _trained, str(tmp_path), default, tier) for default in ("cpu", "late"))
    assert all(map(torch.equal, usual, other))
