"""A script that writes weights whose masters are elsewhere is warned that the next step overwrites them."""

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


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_write_that_the_next_step_overwrites_is_logged(stage: int) -> None:
    for config, within, kept in ((BF16, False, False), (BF16, True, True), (ONE_BIT, False, False), (ONE_BIT, True, True),
                                 (FP32, False, True), (FP32, True, True)):
        said, apart = run_ranks(2, written, {**config, "zero_optimization": {"stage": stage}}, within)[0]
        assert (apart < 0.02) is kept, (config, within, apart)
        assert ("it is lost" in said) is not kept, (config, within, said)
