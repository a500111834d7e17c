"""Weights on disk that the next pass or the step uses first stay in memory where the window has room."""

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
from shoal.tier import store as stores
from shoal.tier.disk_span import _Chunk
from shoal.tier.elastic import DiskBuffer
from shoal.zero.ownership import owner_of
from shoal.zero.trainable_unit import TrainableUnit
from shoal.zero.unit import Unit

pytestmark = pytest.mark.host("weights on disk are used where they are read; a device has a copy")

UNITS, WIDTH = 8, 64


class Block(nn.Module):
    """Calls `look` while its weights are in use: in forward, and in backward."""

    def __init__(self, *, spare: bool = False) -> None:
        super().__init__()
        self.spare = nn.Parameter(torch.ones(16)) if spare else None  # in no graph
        self.linear = nn.Linear(WIDTH, WIDTH, bias=False)
        self.look: Callable[[bool], None] = lambda backward: None

    def forward(self, x: Tensor) -> Tensor:
        self.look(False)
        x = torch.tanh(self.linear(x))
        if x.requires_grad:
            x.register_hook(lambda gradient: self.look(True))
        return x


def stack(*, spare: bool = False, frozen: int = 0) -> nn.Sequential:
    """Return blocks, the first of them frozen."""
    model = nn.Sequential(*(Block(spare=spare) for _ in range(UNITS)))
    for block in model[:frozen]:
        block.requires_grad_(False)
    return model


def engine_of(folder: str, buffers: int, **more: Any) -> shoal.Engine:
    torch.manual_seed(0)
    model = more.pop("model", None) or stack(**more.pop("blocks", {}))
    disk = {"device": "nvme", "nvme_path": folder}
    zero = {"stage": 3, "stage3_prefetch_bucket_size": 0, "offload_param": {**disk, "buffer_count": buffers},
            "offload_optimizer": {**disk, "step_in_backward": more.pop("within", False)}, **more.pop("zero", {})}
    config = {"train_micro_batch_size_per_gpu": 2, "timeout": 20, "gradient_clipping": 0.0, "zero_optimization": zero,
              "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}}, **more}
    return shoal.initialize(model=model, config=config)[0]


def pinned(unit: Unit) -> bool:
    """Whether a part of the unit's weights must be in memory: in use, in flight, or kept for the next use."""
    return any(chunk.pins for chunk in chunks_of(unit))


def chunks_of(unit: Unit) -> list[_Chunk]:
    memory = unit.memory._elastic
    return memory._memory._chunks if isinstance(memory, DiskBuffer) else []


def count(engine: shoal.Engine, *, backward: bool = True) -> list[int]:
    """Return a list that receives the number of units in memory whenever a block uses its weights."""
    assert engine.sharded is not None
    units, counts = engine.sharded.units, list[int]()
    for module in engine.module.modules():
        if isinstance(module, Block):
            module.look = lambda late: counts.append(sum(map(pinned, units))) if backward or not late else None
    return counts


def on_disk(engine: shoal.Engine) -> None:
    """Wait until all stepped state is on the disk; before that a reader would find it in memory."""
    assert engine.sharded is not None and engine.optimizer is not None
    engine.optimizer._scheduler._join()
    swap = engine.sharded.storage.swaps[0]
    with swap.lock:
        assert swap.write_ended.wait_for(lambda: not swap.writing_bytes, timeout=20), "a write hangs"


def rest(engine: shoal.Engine) -> None:
    """Wait until no transfer is in flight."""
    assert engine.sharded is not None and engine.optimizer is not None
    engine.optimizer.finish_deferred_steps()
    on_disk(engine)
    for unit in engine.sharded.units:
        unit._loading.wait()  # prefetched for the next forward


def step(engine: shoal.Engine) -> None:
    """Take one step; prefetch the first units of the next forward once all state is on the disk."""
    assert engine.sharded is not None
    run_ahead = engine.sharded.run_ahead

    def later() -> None:
        on_disk(engine)
        run_ahead()

    engine.sharded.run_ahead = later  # type: ignore[method-assign]
    dtype = next(engine.module.parameters()).dtype
    for _ in range(engine.gradient_accumulation_steps()):
        engine.backward(engine(torch.randn(2, WIDTH, dtype=dtype, requires_grad=True)).square().mean())
        on_disk(engine)  # of a step within backward
        engine.step()
    engine.sharded.run_ahead = run_ahead  # type: ignore[method-assign]
    rest(engine)


def read(folder: str, buffers: int, within: bool, more: dict[str, Any]) -> tuple[int, int]:
    """Return the number of units whose weights the third iteration reads, and the most that are in memory at once.

    With steps within backward, units that wait for their step stay beside the window, so only forward is counted.
    """
    engine = engine_of(folder, buffers, within=within, **more)
    step(engine)
    counts = count(engine, backward=not within)
    step(engine)
    with engine.trace() as trace:
        step(engine)
    engine.destroy()
    events = [event for event in trace.events if event.lane == "read" and event.name.startswith("weights of unit")]
    return len(events), max(counts)


@pytest.mark.parametrize("buffers", [1, 3, 5])
def test_weights_on_disk_that_are_reused_soon_are_read_once(buffers: int, tmp_path: Path) -> None:
    """Forward reads all units, and backward all but the last ones, which stay. A step whose masters are the weights reads
    all but the first, which backward leaves. With separate masters a step reads no weights. A second microbatch begins
    its forward with the units that backward leaves, and so does the next forward after a step that changes no weights.
    """
    frozen, kept = UNITS // 2, min(buffers, UNITS)
    expected = {"after": 3 * UNITS - 2 * kept, "within": 2 * UNITS - kept, "twice": 5 * UNITS - 4 * kept,
                "bf16": 2 * UNITS - kept, "bf16 twice": 4 * UNITS - 3 * kept, "spare": 5 * UNITS - 4 * kept,
                "frozen": UNITS - min(kept, frozen) + 3 * (UNITS - kept) + UNITS - max(kept, frozen)}
    twice = {"gradient_accumulation_steps": 2}
    bf16 = {"bf16": {"enabled": True}}
    ways: dict[str, tuple[bool, dict[str, Any]]] = {
        "after": (False, {}), "within": (True, {}), "twice": (False, twice), "bf16": (False, bf16),
        "bf16 twice": (False, bf16 | twice), "spare": (False, {**twice, "blocks": {"spare": True}}),
        "frozen": (False, {**twice, "blocks": {"frozen": frozen}})}
    for way, (within, more) in ways.items():
        found, most = run_ranks(1, read, str(tmp_path), buffers, within, more)[0]
        assert (found, most) == (expected[way], buffers), way


def boundary(folder: str) -> list[bool]:
    engine = engine_of(folder, 3, bf16={"enabled": True})
    for _ in range(2):
        step(engine)
    engine.backward(engine(torch.ones(2, WIDTH, dtype=torch.bfloat16)).square().mean())
    assert engine.sharded is not None
    return [pinned(unit) for unit in engine.sharded.units]


def test_weights_that_the_step_overwrites_do_not_stay_resident(tmp_path: Path) -> None:
    assert not any(run_ranks(1, boundary, str(tmp_path))[0])


def alone(folder: str, stage: int, tiers: bool) -> tuple[int, float, float]:
    """Return the number of forwards without backward still in memory, and the losses before and after dropped writes."""
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
def test_a_forward_without_backward_frees_its_graph(stage: int, tiers: bool, tmp_path: Path) -> None:
    found = run_ranks(2, alone, str(tmp_path), stage, tiers)
    assert all(alive == 0 for alive, _, _ in found)
    assert found[0][1:] == found[1][1:]
    if stage == 3:
        assert found[0][1] == found[0][2], "writes without a modifier rank are dropped"


def waiting(folder: str, stage: int) -> list[bool]:
    """Return which chunks of a unit's weights are in memory while it waits for its step within backward."""
    stores.CHUNK = WIDTH * WIDTH // 4
    engine = engine_of(folder, 1, within=True, zero={"stage": stage})
    step(engine)
    assert engine.sharded is not None
    unit = owner_of(engine.module[1].linear.weight)
    assert isinstance(unit, TrainableUnit)
    found: list[bool] = []
    engine.module[0].look = lambda late: found.extend(chunk.pins > 0 for chunk in chunks_of(unit)) if late else None
    step(engine)
    engine.destroy()
    return found


@pytest.mark.parametrize("stage", [1, 2])
def test_a_unit_waiting_for_its_step_keeps_only_its_own_span(stage: int, tmp_path: Path) -> None:
    assert run_ranks(2, waiting, str(tmp_path), stage) == [[True, True, False, False], [False, False, True, True]]


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


def test_stages_of_one_rank_share_one_limit_of_resident_units(tmp_path: Path) -> None:
    assert run_ranks(2, several, str(tmp_path)) == [3, 3]
