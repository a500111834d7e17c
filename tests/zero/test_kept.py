"""Weights on disk that the next pass begins with, or the step, are not read again where the window has room for them."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shoal
from shoal.testing import run_ranks
from shoal.tier.trace import Event

UNITS, WIDTH = 8, 64
BYTES = 4 * WIDTH * WIDTH
"""Of the weights of one unit."""


def engine_of(folder: str, buffers: int, **more: Any) -> shoal.Engine:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.Tanh()) for _ in range(UNITS)))
    disk = {"device": "nvme", "nvme_path": folder}
    zero = {"stage": 3, "stage3_prefetch_bucket_size": 0, "offload_param": {**disk, "buffer_count": buffers},
            "offload_optimizer": {**disk, "step_in_backward": more.pop("within", False)}}
    config = {"train_micro_batch_size_per_gpu": 2, "timeout": 20, "gradient_clipping": 0.0, "zero_optimization": zero,
              "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}}, **more}
    return shoal.initialize(model=model, config=config)[0]


def read(folder: str, buffers: int, within: bool, more: dict[str, Any]) -> tuple[float, int]:
    """Return of how many units the third iteration reads the weights, and the most that are in memory at once."""
    engine = engine_of(folder, buffers, within=within, **more)
    assert engine.sharded is not None and engine.optimizer is not None
    units, most = engine.sharded.units, 0

    def look(module: nn.Module, *_: object) -> None:
        nonlocal most
        most = max(most, sum(not unit.is_released for unit in units))

    for module in engine.module.children():
        module.register_forward_hook(look)
        module.register_full_backward_pre_hook(look)
    events: list[Event] = []
    for step in range(3):
        with engine.trace() as trace:
            for _ in range(engine.gradient_accumulation_steps()):
                engine.backward(engine(torch.randn(2, WIDTH, dtype=units[0].full.dtype)).square().mean())
                engine.step()
            engine.optimizer.settle()
            while engine.sharded.residence.swaps[0].writing_bytes:  # else forward finds what the step has left
                pass
        if step == 0:
            most = 0
        events = [event for event in trace.events if event.lane == "read" and event.name.startswith("weights of unit")]
    engine.destroy()
    return sum(event.bytes or 0 for event in events) / BYTES, most


@pytest.mark.parametrize("buffers", [1, 3, 5])
def test_weights_that_come_again_soon_are_not_read_again(buffers: int, tmp_path: Path) -> None:
    """Forward reads all; backward all but the last units, and a step after it, of masters that are the weights, all but
    the first. A second microbatch begins its forward with what backward left.
    """
    kept = min(buffers, UNITS)
    expected = {"after": 3 * UNITS - 2 * kept, "within": 2 * UNITS - kept, "twice": 5 * UNITS - 4 * kept,
                "bf16": 2 * UNITS - kept}
    ways: dict[str, tuple[bool, dict[str, Any]]] = {
        "after": (False, {}), "within": (True, {}), "twice": (False, {"gradient_accumulation_steps": 2}),
        "bf16": (False, {"bf16": {"enabled": True}})}
    for way, (within, more) in ways.items():
        found, most = run_ranks(1, read, str(tmp_path), buffers, within, more)[0]
        assert found * (2 if way == "bf16" else 1) == expected[way], way
        assert most <= buffers, way


def alone(folder: str, stage: int, tiers: bool) -> tuple[int, float, float]:
    """Return how many forwards that no backward followed are still in memory, and two losses around writes to be dropped."""
    engine = engine_of(folder, 3) if tiers else plain(stage)
    for _ in range(2):
        engine.backward(engine(torch.ones(2, WIDTH)).square().mean())
        engine.step()
    inputs: list[weakref.ref[torch.Tensor]] = []
    for x in [torch.ones(2, WIDTH, requires_grad=True) for _ in range(3)]:
        engine(x).square().mean()
        inputs.append(weakref.ref(x))
        del x
    gc.collect()
    before = engine(torch.ones(2, WIDTH)).square().mean().item()
    with shoal.gathered(engine.module), torch.no_grad():
        for parameter in engine.module.parameters():
            parameter.mul_(0.5)
    after = engine(torch.ones(2, WIDTH)).square().mean().item()
    with torch.set_grad_enabled(not (tiers and engine.global_rank)):  # ranks without gradients gather as the others do
        engine(torch.ones(2, WIDTH))
        engine(torch.ones(2, WIDTH))
    engine.destroy()
    return sum(ref() is not None for ref in inputs), before, after


def plain(stage: int) -> shoal.Engine:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.Tanh()) for _ in range(UNITS)))
    config = {"train_micro_batch_size_per_gpu": 2, "timeout": 20, "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
              "zero_optimization": {"stage": stage, "stage3_max_reuse_distance": 1e9}}
    return shoal.initialize(model=model, config=config)[0]


@pytest.mark.parametrize(("stage", "tiers"), [(3, True), (3, False), (1, False)])
def test_a_forward_that_no_backward_follows_leaves_nothing(stage: int, tiers: bool, tmp_path: Path) -> None:
    found = run_ranks(2, alone, str(tmp_path), stage, tiers)
    assert all(alive == 0 for alive, _, _ in found)
    assert found[0][1:] == found[1][1:]
    if stage == 3:
        assert found[0][1] == found[0][2], "what was written without a modifier is dropped"
