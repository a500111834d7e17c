"""The published marks of modules that stage 3 gathers whole, which set Shoal's own leaf modules."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

import shoal
import shoal.compat.deepspeed as deepspeed
from shoal.compat.leaf_modules import z3_leaf_module
from shoal.testing import run_ranks


def leaves_of(config: dict[str, Any]) -> list[str]:
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.Tanh()))
    engine = deepspeed.initialize(model=model, config={
        "train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "Adam", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": 3, "leaf_module": config}})[0]
    marked = [name for name, module in model.named_modules() if z3_leaf_module(module)]
    assert marked == [name for name, module in model.named_modules() if module in shoal.zero.get_leaf_modules(model)]
    engine.destroy()
    return marked


@pytest.mark.parametrize(("config", "marked"), [
    ({"names": ["1"]}, ["1"]), ({"name_suffixes": ["1.0"]}, ["1.0"]), ({"classes": ["Tanh"]}, ["1.1"]), ({}, []),
])  # fmt: skip
def test_the_key_leaf_module_marks_modules_to_be_gathered_whole(config: dict[str, Any], marked: list[str]) -> None:
    assert run_ranks(1, leaves_of, config) == [marked]
