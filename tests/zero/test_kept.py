"""Weights on disk that the next pass begins with, or the step, are not read again where the window has room for them."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shoal
from shoal.testing import run_ranks
from shoal.tier.elastic import Beneath
from shoal.zero.unit import Unit

UNITS, WIDTH = 8, 64
BYTES = 4 * WIDTH * WIDTH
"""Of the weights of one unit."""


class Block(nn.Module):
    """Calls `look` while its weights are in use: in forward, and in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, bias=False)
        self.look: Callable[[bool], None] = lambda backward: None

    def forward(self, x: Tensor) -> Tensor:
        self.look(False)
        x = torch.tanh(self.linear(x))
        if x.requires_grad:
            x.register_hook(lambda gradient: self.look(True))
        return x


def engine_of(folder: str, buffers: int, **more: Any) -> shoal.Engine:
    torch.manual_seed(0)
    model = more.pop("model", None) or nn.Sequential(*(Block() for _ in range(UNITS)))
    disk = {"device": "nvme", "nvme_path": folder}
    zero = {"stage": 3, "stage3_prefetch_bucket_size": 0, "offload_param": {**disk, "buffer_count": buffers},
            "offload_optimizer": {**disk, "step_in_backward": more.pop("within", False)}, **more.pop("zero", {})}
    config = {"train_micro_batch_size_per_gpu": 2, "timeout": 20, "gradient_clipping": 0.0, "zero_optimization": zero,
              "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}}, **more}
    return shoal.initialize(model=model, config=config)[0]


def pinned(unit: Unit) -> bool:
    """Whether anything of the unit's weights has to be in memory: in use, on its way, or kept."""
    memory = unit._memory
    return isinstance(memory, Beneath) and any(chunk.pins for chunk in memory._memory._chunks)


def count(engine: shoal.Engine, *, backward: bool = True) -> list[int]:
    """Return a list that gets, whenever a block's weights are in use, of how many units weights are in memory."""
    assert engine.sharded is not None
    units, counts = engine.sharded.units, list[int]()
    for module in engine.module.modules():
        if isinstance(module, Block):
            module.look = lambda late: counts.append(sum(map(pinned, units))) if backward or not late else None
    return counts


def rest(engine: shoal.Engine) -> None:
    """Wait until all is on the disk: else forward finds what the step has left."""
    assert engine.sharded is not None and engine.optimizer is not None
    engine.optimizer.settle()
    swap = engine.sharded.residence.swaps[0]
    with swap.lock:
        assert swap.lock.wait_for(lambda: not swap.writing_bytes, timeout=20), "a write hangs"


def step(engine: shoal.Engine) -> None:
    dtype = next(engine.module.parameters()).dtype
    for _ in range(engine.gradient_accumulation_steps()):
        engine.backward(engine(torch.randn(2, WIDTH, dtype=dtype)).square().mean())
        engine.step()
    rest(engine)


def read(folder: str, buffers: int, within: bool, more: dict[str, Any]) -> tuple[float, int]:
    """Return of how many units the third iteration reads the weights, and the most that are in memory at once.

    A step within backward keeps those that wait for it beside the window, so then only forward is looked at.
    """
    engine = engine_of(folder, buffers, within=within, **more)
    step(engine)
    counts = count(engine, backward=not within)
    step(engine)
    with engine.trace() as trace:
        step(engine)
    engine.destroy()
    events = [event for event in trace.events if event.lane == "read" and event.name.startswith("weights of unit")]
    return sum(event.bytes or 0 for event in events) / BYTES, max(counts)


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
        assert most == buffers, way


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


def several(folder: str) -> int:
    """Return the most units whose weights are in memory at once on a rank of two stages."""
    model = shoal.PipelineModule([shoal.LayerSpec(Block) for _ in range(4 * UNITS)], num_stages=2, stages_per_rank=2,
                                 schedule="interleaved", loss_fn=lambda out, label: (out - label).square().mean())
    engine = engine_of(folder, 3, model=model, gradient_accumulation_steps=4, zero={"stage": 0})
    samples = [(torch.ones(2, WIDTH), torch.zeros(2, WIDTH))] * 4
    counts: list[int] = []
    for _ in range(3):
        counts = count(engine)
        engine.train_batch(iter(samples))
        rest(engine)
    engine.destroy()
    return max(counts)


def test_several_stages_of_a_rank_have_one_room(tmp_path: Path) -> None:
    assert run_ranks(2, several, str(tmp_path)) == [3, 3]
