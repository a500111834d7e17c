"""Masters follow what a script writes into their weights; where backward has stepped them, it is warned of the loss."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import nn

import shoal
from shoal.log import logger
from shoal.testing import run_ranks


def model(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))


class LogText(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.text = ""

    def emit(self, record: logging.LogRecord) -> None:
        self.text += record.getMessage()


def written(config: dict[str, Any], within: bool) -> tuple[str, float]:
    """Load other weights while training, `within` a gather or not; return the log and the largest difference at the end."""
    said, other = LogText(), model(1).state_dict()
    logger.addHandler(said)
    whole = model(0)
    engine = shoal.initialize(model=whole, config={"train_micro_batch_size_per_gpu": 2, **config})[0]
    for step in range(4):
        if step == 2:
            if within:
                with shoal.gathered(whole, modifier_rank=0):
                    whole.load_state_dict(other)
            else:
                whole.load_state_dict(other)
        x = torch.ones(2, 8, dtype=next(whole.parameters()).dtype)
        engine.backward(engine(x).float().square().mean())
        engine.step()
    now = engine.consolidated_state_dict(torch.float32) or other
    return said.text, max((now[name] - value).abs().max().item() for name, value in other.items())


BF16 = {"bf16": {"enabled": True}, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}
ONE_BIT = {"optimizer": {"type": "OneBitAdam", "params": {"lr": 1e-3, "freeze_step": 1}}}
FP32 = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}
OFFLOADED = {"device": "cpu"}
IN_BACKWARD = {"device": "cpu", "step_in_backward": True}


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_masters_follow_what_a_script_writes_into_weights(stage: int) -> None:
    for config in (BF16, ONE_BIT, FP32, BF16 | {"zero_optimization": {"offload_optimizer": OFFLOADED}}):
        zero = {**config.get("zero_optimization", {}), "stage": stage}
        for within in (False, True):
            said, apart = run_ranks(2, written, {**config, "zero_optimization": zero}, within)[0]
            assert apart < 0.02 and "it is lost" not in said, (config, within, apart, said)


def test_a_write_into_weights_whose_masters_have_stepped_is_logged() -> None:
    config = {**BF16, "bf16": {"enabled": True, "check_grad_overflow": False}, "gradient_clipping": 0,
              "zero_optimization": {"stage": 2, "offload_optimizer": IN_BACKWARD}}
    said, apart = run_ranks(2, written, config, False)[0]
    assert apart > 0.02 and "backward has stepped its masters, which do not know of it: it is lost" in said


def clamped() -> None:
    """Elements that a script does not change keep the precision of their masters."""
    whole = model(0)
    engine = shoal.initialize(model=whole, config={"train_micro_batch_size_per_gpu": 2, **BF16, "optimizer": {
        "type": "SGD", "params": {"lr": 1e-5}}, "zero_optimization": {"stage": 1}})[0]
    before = engine.consolidated_state_dict(torch.float32) or {}
    with torch.no_grad():
        for p in whole.parameters():
            p.clamp_(max=0.1)
    engine.backward(engine(torch.zeros(2, 8, dtype=torch.bfloat16)).float().square().mean())
    engine.step()
    after = engine.consolidated_state_dict(torch.float32) or {}
    weight = before["0.weight"]  # no gradient: the inputs are zeros
    kept = weight.bfloat16() <= 0.1
    assert torch.equal(after["0.weight"][kept], weight[kept]) and after["0.weight"].max() < 0.101 < weight.max()


def test_elements_that_a_write_leaves_keep_their_masters() -> None:
    run_ranks(1, clamped)
