"""Weights on the host under a device that is behind: bounded memory however far the host runs ahead, and whole copies."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import shoal
from shoal.testing import ranks_on, run_ranks
from shoal.tier import Memory, elastic
from tests.late.device import load
from tests.late.ranks import prepare

WIDTH = 256
UNIT = WIDTH * WIDTH * 4
"""Bytes of a unit."""


def _growth(stage: int, layers: int) -> tuple[float, float]:
    """Return by how many units the device's memory grows in an evaluation, and in a pass of training."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)])
    on_host = {"device": "cpu"}
    engine = shoal.initialize(model=model, config={
        "train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}, "log_level": "error",
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0, "offload_param": on_host,
                              "offload_optimizer": on_host, "stage3_prefetch_bucket_size": WIDTH * WIDTH}})[0]
    x = torch.randn(2, WIDTH, device=engine.device)
    found = []
    for training in (False, True):
        torch.accelerator.synchronize()
        torch.accelerator.empty_cache()
        before = torch.accelerator.memory_reserved()
        with torch.set_grad_enabled(training):
            out = engine(x)
            if training:
                engine.backward(out.square().mean())
        found.append((torch.accelerator.memory_reserved() - before) / UNIT)
        if training:
            engine.step()
    engine.destroy()
    return found[0], found[1]


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("stage", [0, 3])
def test_memory_of_a_pass_does_not_grow_with_the_model(stage: int, ranks: int) -> None:
    """The host is a whole pass ahead: it waits for nothing in it."""
    with ranks_on(prepare):
        few, many = (run_ranks(ranks, _growth, stage, layers) for layers in (12, 24))
    for (forward, training), (longer_forward, longer_training) in zip(few, many, strict=True):
        assert longer_forward < 2.5 and abs(longer_forward - forward) < 0.1  # the window is one unit beside the present one
        assert longer_training < training + 0.5


def _overwritten() -> list[float]:
    device = load()
    buffer = elastic(1024, torch.float32, range(1024), device, Memory(device=torch.device("cpu"), pinned=True), "weights")
    buffer.shard.fetch().wait()
    buffer.shard.tensor.fill_(1)
    buffer.shrink()
    buffer.grow().wait()
    buffer.shard.fetch().wait()
    buffer.shard.tensor.fill_(2)  # a step on the host, while the copy of the weights may be queued
    return [buffer.full.min().item(), buffer.full.max().item()]


def test_a_step_on_the_host_waits_for_copies_of_the_weights() -> None:
    with ranks_on(prepare):
        assert run_ranks(1, _overwritten) == [[1.0, 1.0]]


class _Scaled(nn.Module):
    """A layer whose scale is whole numbers, beside a parameter of no elements."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.tensor([1, 2, 3, 4], dtype=torch.int32), requires_grad=False)
        self.empty = nn.Parameter(torch.empty(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) * self.scale


def _on_device(stage: int) -> list[str]:
    model = _Scaled()
    engine = shoal.initialize(model=model, config={
        "train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}, "log_level": "error",
        "zero_optimization": {"stage": stage}})[0]
    engine.backward(engine(torch.ones(2, 4, device=engine.device)).sum())
    engine.step()
    return [parameter.device.type for parameter in (model.scale, model.empty)]


@pytest.mark.parametrize("stage", [0, 3])
def test_parameters_that_no_unit_has_are_on_the_device(stage: int) -> None:
    with ranks_on(prepare):
        assert run_ranks(1, _on_device, stage) == [["late", "late"]]
