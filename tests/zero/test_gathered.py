"""Contexts that gather weights: nested, without effect, and around weights that other code references."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import shoal
from shoal.errors import TierError, UsageError
from shoal.testing import run_ranks

WIDTH = 64


class Borrowing(nn.Module):
    """Its forward gathers the weights of another block, writes into them without effect, and reads them again."""

    def __init__(self, lender: nn.Linear):
        super().__init__()
        self.lender = [lender]

    def forward(self, x: Tensor) -> Tensor:
        weight = self.lender[0].weight
        x = x @ weight.T
        with shoal.gathered(weight), torch.no_grad():
            weight.add_(1 + dist.get_rank())
        return x @ weight.T


def engine_of(folder: str, way: str, *, borrowing: bool = False) -> shoal.Engine:
    """Return an engine at stage 3, in one of the ways of `WAYS`."""
    torch.manual_seed(0)
    blocks = [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4)]
    model = nn.Sequential(*blocks, *([Borrowing(blocks[0])] if borrowing else []))
    disk = {"offload_param": {"device": "nvme", "nvme_path": folder}} if "disk" in way else {}
    return shoal.initialize(model=model, config={
        "train_micro_batch_size_per_gpu": 2, "timeout": 20, "bf16": {"enabled": "bf16" in way},
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}}, "zero_optimization": {"stage": 3, **disk}})[0]


WAYS = ("memory", "disk", "memory bf16", "disk bf16")


def values(engine: shoal.Engine) -> list[Tensor]:
    """Return what the ranks hold of each parameter, and of its master, together."""
    with shoal.gathered(engine.module):
        return [parameter.detach().float().clone() for parameter in engine.module.parameters()]


def step(engine: shoal.Engine) -> None:
    dtype = next(engine.module.parameters()).dtype
    engine.backward(engine(torch.ones(2, WIDTH, dtype=dtype)).square().mean())
    engine.step()


def inner_dropped(engine: shoal.Engine) -> None:
    """Nest a context that drops writes in one that keeps them."""
    first, second = list(engine.module.parameters())[:2]
    with shoal.gathered(engine.module, modifier_rank=0), torch.no_grad():
        second.fill_(2)
        with shoal.gathered([first, second]):
            first.fill_(9 + dist.get_rank())
            second.fill_(9 + dist.get_rank())
        kept = first.float().clone()
    assert torch.equal(values(engine)[0], kept)
    assert (values(engine)[1] == 2).all()


def inner_kept(engine: shoal.Engine) -> None:
    """Nest a context that keeps writes in one that drops them."""
    first, second = list(engine.module.parameters())[:2]
    before = values(engine)[1]
    with shoal.gathered(engine.module), torch.no_grad():
        with shoal.gathered(first, modifier_rank=1):
            first.fill_(float(dist.get_rank() + 1))
        second.fill_(5)
        first.fill_(7)
    assert (values(engine)[0] == 2).all()
    assert torch.equal(values(engine)[1], before)


def stepped(engine: shoal.Engine) -> None:
    """Step within a context that drops writes: the step stays, a write after it does not."""
    before = values(engine)[0]
    with shoal.gathered(engine.module), torch.no_grad():
        with torch.enable_grad():
            step(engine)
        new = next(engine.module.parameters()).float().clone()
        next(engine.module.parameters()).fill_(7)
    assert not torch.equal(new, before)
    assert torch.equal(values(engine)[0], new)


def check(folder: str) -> None:
    for way in WAYS:
        for case in (inner_dropped, inner_kept, stepped):
            engine = engine_of(folder, way)
            case(engine)
            found = values(engine)
            step(engine)  # from masters, which have the kept writes
            moved = max(float((new - old).abs().max()) for new, old in zip(values(engine), found, strict=True))
            assert moved < 0.5 or case is not inner_kept, (way, case)
            said: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(said, [float(value.double().sum()) for value in values(engine)])
            assert said[0] == said[1], (way, case)
            engine.destroy()


def test_nested_contexts_each_keep_or_drop_their_own_writes(tmp_path: Path) -> None:
    run_ranks(2, check, str(tmp_path))


def borrow(folder: str, way: str) -> None:
    engine = engine_of(folder, way, borrowing=True)
    x = torch.ones(2, WIDTH)
    weights = values(engine)
    expected = x
    for weight in (*weights, weights[0], weights[0]):
        expected = expected @ weight.T
    for _ in range(2):
        assert torch.allclose(engine(x), expected, rtol=1e-4, atol=1e-5)
    engine.destroy()


@pytest.mark.parametrize("way", WAYS[:2])
def test_a_forward_that_gathers_weights_reads_unchanged_values(way: str, tmp_path: Path) -> None:
    run_ranks(2, borrow, str(tmp_path), way)


def as_arrays(way: str, folder: str) -> tuple[list[Tensor], list[Tensor]]:
    """Train twice, and the second time take each weight as a numpy array after each step."""
    found = []
    for looks in (False, True):
        engine = engine_of(folder, way)
        for _ in range(3):
            step(engine)
            with shoal.gathered(engine.module):
                arrays = [weight.detach().numpy() for weight in engine.module.parameters()] if looks else []
                assert all(torch.equal(torch.from_numpy(array), weight) for array, weight in zip(
                    arrays, engine.module.parameters(), strict=looks))
        found.append(values(engine))
        engine.destroy()
    return found[0], found[1]


@pytest.mark.parametrize("way", WAYS[:2])
def test_weights_exposed_as_numpy_arrays_train_the_same(way: str, tmp_path: Path) -> None:
    for plain, seen in run_ranks(2, as_arrays, way, str(tmp_path)):
        assert all(torch.equal(a, b) for a, b in zip(plain, seen, strict=True))


PLACES: dict[str, dict[str, Any]] = {
    "memory": {}, "weights on disk": {"offload_param": {"device": "nvme"}},
    "all on disk": {"offload_param": {"device": "nvme"}, "offload_optimizer": {"device": "nvme"}}}


def kept(engine: shoal.Engine) -> list[Tensor]:
    """Return tensors that share the memory of the weights, collected within a context at stage 3 and without one below."""
    if engine.zero_optimization_stage() < 3:
        return [parameter.detach() for parameter in engine.module.parameters()]
    with shoal.gathered(engine.module):
        return [parameter.detach() for parameter in engine.module.parameters()]


def lend(folder: str, place: str, stage: int, width: int) -> None:
    weights: list[list[Tensor]] = []
    for keeps in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(3)))
        tier = {key: {**block, "nvme_path": folder} for key, block in PLACES[place].items()}
        engine = shoal.initialize(model=model, config={
            "train_micro_batch_size_per_gpu": 2, "timeout": 20, "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
            "zero_optimization": {"stage": stage, **tier}})[0]
        for turn in range(5):
            loss = engine(torch.ones(2, width)).square().mean()
            early = kept(engine) if keeps and turn == 4 else []  # while the graph has these weights in use, and is no user
            engine.backward(loss)
            engine.step()
            shared = kept(engine) if keeps and turn in (1, 2) else early
            now = values(engine)
            assert all(torch.equal(a, b) for a, b in zip(shared, now, strict=keeps and turn in (1, 2, 4)))
        del shared, early
        weights.append(now)
        assert engine.sharded is not None
        engine.eval()(torch.ones(2, width))
        engine.sharded.finish_pending()
        assert all(not unit.memory.is_exposed for unit in engine.sharded.units), "no outside reference is left"
        engine.destroy()
    assert all(torch.equal(a, b) for a, b in zip(*weights, strict=True))


@pytest.mark.parametrize("width", [64, 640], ids=["in a heap", "in pages"])
@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("place", PLACES)
def test_tensors_that_share_weight_memory_read_the_new_weights(place: str, stage: int, width: int, tmp_path: Path) -> None:
    run_ranks(2, lend, str(tmp_path), place, stage, width)


def look(folder: str, place: str) -> list[bool]:
    """Return whether tensors that share the memory of weights equal them right after each step, on one rank."""
    torch.manual_seed(0)
    tier = {key: {**block, "nvme_path": folder} for key, block in PLACES[place].items()}
    engine = shoal.initialize(model=nn.Sequential(*(nn.Linear(640, 640, bias=False) for _ in range(3))), config={
        "train_micro_batch_size_per_gpu": 2, "timeout": 20, "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": 3, **tier}})[0]
    shared, found = kept(engine), list[bool]()
    for _ in range(3):
        engine.backward(engine(torch.ones(2, 640)).square().mean())
        engine.step()
        now = [weight.clone() for weight in shared]
        found += map(torch.equal, now, values(engine))
    engine.destroy()
    return found


@pytest.mark.parametrize("place", PLACES)
def test_tensors_that_share_weight_memory_show_each_step(place: str, tmp_path: Path) -> None:
    assert all(run_ranks(1, look, str(tmp_path), place)[0])


def enter_in_vain(folder: str, leaving: bool) -> None:
    engine = engine_of(folder, "memory")
    assert engine.sharded is not None
    units = engine.sharded.units
    unit = units[2]

    def fail() -> None:
        raise TierError("the disk is gone")

    name = "release" if leaving else "gather"
    with pytest.raises(TierError, match="the disk is gone"), shoal.gathered(engine.module):
        setattr(unit, name, fail)
        with shoal.gathered(engine.module):
            assert leaving
    delattr(unit, name)
    engine.sharded.finish_pending()
    unit.release()
    assert [(unit.name, unit.readers, unit.is_released) for unit in units] == [(unit.name, 0, True) for unit in units]
    step(engine)
    engine.destroy()


@pytest.mark.parametrize("leaving", [False, True])
def test_a_context_that_fails_leaves_no_hold(leaving: bool, tmp_path: Path) -> None:
    run_ranks(1, enter_in_vain, str(tmp_path), leaving)


def _edited(folder: str, stage: int, way: str) -> None:
    """Write to one element of one parameter: the masters of all others keep their bits."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3)])
    offload = {"offload_optimizer": {"device": "nvme", "nvme_path": folder}} if way == "disk" else {}
    engine = shoal.initialize(model=model, config={
        "train_micro_batch_size_per_gpu": 2, "timeout": 20, "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}}, "zero_optimization": {"stage": stage, **offload}})[0]
    for _ in range(2):
        step(engine)
    before = engine.consolidated_state_dict(torch.float32)
    for _ in range(2):
        with shoal.gathered(model, modifier_rank=0), torch.no_grad():
            if dist.get_rank() == 0:
                model[1].weight[3, 5] = 7
    after = engine.consolidated_state_dict(torch.float32)
    if dist.get_rank() == 0:
        assert after["1.weight"][3, 5] == 7
        after["1.weight"][3, 5] = before["1.weight"][3, 5]
        assert any((value != value.bfloat16().float()).any() for value in before.values())
        for name, value in before.items():
            assert torch.equal(after[name], value), name
    engine.destroy()


@pytest.mark.parametrize("way", ["memory", "disk"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_an_edit_leaves_the_masters_of_what_it_does_not_write(stage: int, way: str, tmp_path: Path) -> None:
    run_ranks(2, _edited, str(tmp_path), stage, way)


def dropped_writes(folder: str, way: str) -> None:
    """Read, write for all ranks, and write in vain as `merge_adapter` of PEFT does: only the last is warned of."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("shoal").addHandler(handler)
    engine = engine_of(folder, way)
    weights = list(engine.module.parameters())
    step(engine)
    with shoal.gathered(engine.module):
        assert all(bool(weight.isfinite().all()) for weight in weights)
        with shoal.gathered(weights[0], modifier_rank=0), torch.no_grad():
            weights[0].fill_(torch.nan)
    with shoal.gathered(weights[0]):
        assert weights[0].isnan().all()
    assert not any("gathered:" in each for each in said), said
    with shoal.gathered(engine.module):
        weights[2].data += 1
    assert [each for each in said if "gathered: parameter '2.weight' was written within the context" in each]


@pytest.mark.parametrize("way", WAYS)
def test_writes_that_gathered_drops_are_named(way: str, tmp_path: Path) -> None:
    run_ranks(2, dropped_writes, str(tmp_path), way)


def test_a_module_in_the_place_of_modifier_rank_is_refused() -> None:
    with pytest.raises(UsageError, match=r"gathered: modifier_rank: got a Linear; give the number of a rank or None"), \
            shoal.gathered(nn.Linear(2, 2), nn.Linear(2, 2)):  # type: ignore[arg-type]
        pass
