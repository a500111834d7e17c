"""A model built under `zero.Init` is the model built without it, and no rank ever holds the whole."""

from __future__ import annotations

import copy
import mmap
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import shoal
from shoal.errors import ReleasedError
from shoal.testing import run_ranks

from .models import FEATURES, batch, loss_of
from .test_guard import engine_of


class Deep(nn.Module):
    """Raw layers made in one go, parameters of its own, and `apply` in its constructor."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(33))
        self.layers = nn.Sequential(*[nn.Linear(33, 33) for _ in range(10)])
        nn.init.normal_(self.scale, std=0.02)
        self.apply(self.reset)
        with torch.no_grad():
            self.layers[0].bias.add_(1.0)

    def reset(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.orthogonal_(module.weight)
            module.bias.data.uniform_(-1, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x * self.scale)


def values(model: nn.Module) -> dict[str, Tensor]:
    with shoal.gathered(model):
        return {name: p.detach().clone() for name, p in model.named_parameters()}


def build(kind: type[nn.Module], sharded: bool) -> nn.Module:
    torch.manual_seed(7)
    with shoal.zero.Init(enabled=sharded):
        return kind()


def same(kind: type[nn.Module], stage: int) -> None:
    plain, sharded = build(kind, False), build(kind, True)
    expected = values(plain)
    assert {n: p.shape for n, p in plain.named_parameters()} == {n: p.shape for n, p in sharded.named_parameters()}
    found = values(sharded)
    assert all(torch.equal(expected[name], found[name]) for name in expected)
    if kind is Deep:
        with pytest.raises(ReleasedError):
            sharded.scale.sum()
        return
    for model in (plain, sharded):
        engine = engine_of(model, stage, bf16={"enabled": True})
        for step in range(2):
            tokens, targets = batch(step, 0, dist.get_rank())
            engine.backward(loss_of(engine(tokens), targets))
            engine.step()
    expected, found = values(plain), values(sharded)
    assert all(torch.equal(expected[name], found[name]) for name in expected)


class Tied(nn.Module):
    """Two names of one weight, and a frozen scale."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(33, 33), nn.Linear(33, 33, bias=False)
        self.last.weight = self.first.weight
        self.scale = nn.Parameter(torch.rand(33), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x * self.scale))


def copied(within: bool, dtype: torch.dtype | None, device: str, folder: Path) -> None:
    offload = {"offload_param": {"device": device, **({"nvme_path": str(folder)} if device == "nvme" else {})}}
    torch.manual_seed(7)
    with shoal.zero.Init(dtype=dtype, config={"zero_optimization": {"stage": 3, **offload}}):
        model, _ = Tied(), nn.Linear(1, 1)  # a module is sharded when the next one begins
        other = copy.deepcopy(model) if within else model
    if not within:
        other = copy.deepcopy(model)
    expected = values(model)
    assert other.last.weight is other.first.weight and not other.scale.requires_grad
    for each in other.parameters():
        with pytest.raises(ReleasedError):
            each.sum()
    found = values(other)
    assert all(torch.equal(expected[name], found[name]) for name in expected)
    with shoal.gathered(other.first.weight, modifier_rank=0), torch.no_grad():
        other.first.weight.zero_()
    found = values(model)
    assert all(torch.equal(expected[name], found[name]) for name in expected)
    assert not values(other)["first.weight"].any()
    engine_of(nn.ModuleList([model, other]), 3, bf16={"enabled": dtype is torch.bfloat16})
    found = values(model)
    assert all(torch.equal(expected[name], found[name]) for name in expected)


def halved(pair: Pair) -> None:
    for mine, other in zip(pair.a.parameters(), pair.b.parameters(), strict=True):
        mine.data.mul_(0.5).add_(other.data, alpha=0.5)


def written(pair: Pair) -> None:
    pair.a.weight[:2] = pair.b.weight[3:]


def mean(pair: Pair) -> None:
    pair.a.weight.copy_(torch.stack([each.weight for each in (pair.a, pair.b, pair.c)]).mean(0))


def assigned(pair: Pair) -> None:
    pair.a.weight.data = pair.b.weight.data


def drawn(pair: Pair) -> None:
    pair.a.weight.data = torch.rand(5, 5)


def replaced_beside(pair: Pair) -> None:
    pair.b.weight.data = torch.ones(5, 5)
    pair.b.weight.add_(pair.a.weight)


def replaced_and_written(pair: Pair) -> None:
    pair.b.weight.data = torch.ones(5, 5)
    pair.b.weight.data.add_(pair.a.weight.data)
    pair.c.weight.copy_(pair.b.weight @ pair.a.weight)


TOGETHER: dict[str, Callable[[Pair], object]] = {
    "copy": lambda pair: pair.a.weight.data.copy_(pair.b.weight.data),
    "copy to a parameter": lambda pair: pair.a.weight.copy_(pair.b.weight),
    "product": lambda pair: pair.a.weight.add_(pair.b.weight @ pair.c.weight),
    "product of data": lambda pair: pair.a.weight.data.add_(pair.b.weight.data * pair.c.weight),
    "list": lambda pair: pair.a.bias.copy_(nn.utils.parameters_to_vector(pair.b.parameters())[:5]),
    "load": lambda pair: pair.a.load_state_dict(pair.b.state_dict()),
    "comparison": lambda pair: pair.a.weight.fill_(torch.equal(pair.a.weight, pair.b.weight)),
    "replaced, beside another": replaced_beside, "replaced, and written with another": replaced_and_written,
    "halved": halved, "written": written, "mean": mean, "assigned": assigned, "drawn": drawn}
"""Operations on several parameters of a model, each of which is released before it."""


class Pair(nn.Module):
    """Its constructor runs an operation on parameters that are sharded already."""

    def __init__(self, operation: Callable[[Pair], object]) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(5, 5) for _ in range(3))
        with torch.no_grad():
            operation(self)


def together() -> None:
    for name, operation in TOGETHER.items():
        torch.manual_seed(7)
        expected = values(Pair(operation))
        torch.manual_seed(7 + dist.get_rank())  # what rank 0 draws counts
        with shoal.zero.Init():
            pair = Pair(operation)
        found = values(pair)
        assert all(torch.equal(expected[each], found[each]) for each in expected), name


def copied_at_rest(device: str, dtype: torch.dtype | None, folder: Path) -> None:
    offload = {"offload_param": {"device": device, **({"nvme_path": str(folder)} if device == "nvme" else {})}}
    torch.manual_seed(7)
    with shoal.zero.Init(config={"zero_optimization": {"stage": 3, **offload}}):
        online = nn.Linear(33, 33)
    with shoal.zero.Init(dtype=dtype):
        target = nn.Linear(33, 33)
    target.weight.data.copy_(online.weight.data)
    with torch.no_grad():
        assert target.bias.copy_(online.bias, non_blocking=True) is target.bias
        online.weight.copy_(online.weight)
    assert all("released" in repr(p) for model in (online, target) for p in model.parameters())
    expected, found = values(online), values(target)
    assert all(torch.equal(expected[name].to(dtype), found[name]) for name in expected)
    with shoal.gathered(online.weight, modifier_rank=0), torch.no_grad():
        online.weight.zero_()
    assert torch.equal(values(target)["weight"], found["weight"]) and not values(online)["weight"].any()
    for refused in (lambda: target.weight.data.copy_(online.bias.data), lambda: target.weight.data.add_(online.weight.data),
                    lambda: target.weight.copy_(online.weight)):  # the last one autograd refuses, once it is gathered
        with pytest.raises(ReleasedError):
            refused()


def resident() -> int:
    """Bytes of this process that are in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


def one_layer_at_a_time() -> None:
    width, layers = 1024, 40
    layer = width * width * 4
    before, peaks = resident(), []

    class Watched(nn.Linear):
        def __init__(self) -> None:
            super().__init__(width, width, bias=False)
            peaks.append(resident() - before)

    with shoal.zero.Init():
        model = nn.Sequential(*[Watched() for _ in range(layers)])
    assert sum(p.numel() for p in model.parameters()) * 4 == layers * layer
    assert max(peaks) < layers * layer / dist.get_world_size() + 13 * layer  # the heap is trimmed every few layers


def existing() -> None:
    torch.manual_seed(0)
    model = FEATURES["tied"]()
    expected = {name: p.detach().clone() for name, p in model.named_parameters()}
    shoal.zero.Init(module=model)
    assert all("released" in repr(p) for p in model.parameters())
    found = values(model)
    assert all(torch.equal(expected[name], found[name]) for name in expected)


class Quantised(nn.Module):
    """A layer whose weights are whole numbers, which ranks make differently."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.levels = nn.Parameter((torch.arange(16).view(4, 4) * (1 + dist.get_rank())).to(dtype), requires_grad=False)
        self.scale = nn.Parameter(torch.full((4,), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        return x @ (self.levels * self.scale)


def whole_numbers(dtype: torch.dtype, stage: int) -> list[float]:
    with shoal.zero.Init():
        model = Quantised(dtype)
    engine = shoal.initialize(model=model, config={
        "train_micro_batch_size_per_gpu": 1, "gradient_clipping": 0.0, "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0}})[0]
    x = torch.ones(1, 4, device=engine.device)
    engine.backward(engine(x).sum())
    engine.step()
    with torch.no_grad():
        return [model.levels.float().sum().item(), engine(x).sum().item()]


def seeds_differ() -> None:
    torch.manual_seed(dist.get_rank())
    with shoal.zero.Init():
        model = nn.Linear(5, 5)
    found = values(model)["weight"]
    torch.manual_seed(0)
    assert torch.equal(found, nn.Linear(5, 5).weight), "what rank 0 drew counts"


@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("kind", [FEATURES["plain"], FEATURES["tied"], FEATURES["frozen"]])
def test_a_model_built_sharded_trains_as_one_built_whole(kind: type[nn.Module], stage: int) -> None:
    run_ranks(2, same, kind, stage)


def test_initialisation_in_and_after_constructors_gives_the_same_values() -> None:
    run_ranks(3, same, Deep, 3)


@pytest.mark.parametrize(("within", "dtype", "device"), [
    (False, None, "none"), (True, None, "none"), (False, torch.bfloat16, "cpu"), (False, None, "nvme"),
    (True, torch.bfloat16, "nvme")])
@pytest.mark.parametrize("ranks", [1, 3])
def test_a_deepcopy_is_sharded_as_its_source(within: bool, dtype: torch.dtype | None, device: str, ranks: int,
                                             tmp_path: Path) -> None:
    run_ranks(ranks, copied, within, dtype, device, tmp_path)


@pytest.mark.parametrize("ranks", [1, 2])
def test_an_operation_finds_all_of_its_operands_gathered(ranks: int) -> None:
    run_ranks(ranks, together)


@pytest.mark.parametrize(("device", "dtype"), [("none", None), ("cpu", torch.bfloat16), ("nvme", None)])
@pytest.mark.parametrize("ranks", [1, 3])
def test_a_copy_of_released_parameters_copies_shards(device: str, dtype: torch.dtype | None, ranks: int,
                                                     tmp_path: Path) -> None:
    run_ranks(ranks, copied_at_rest, device, dtype, tmp_path)


@pytest.mark.host("counts the memory of the process, where a device has its own")
def test_no_rank_holds_more_than_one_layer_while_building() -> None:
    run_ranks(2, one_layer_at_a_time)


def test_an_existing_model_is_sharded_at_once() -> None:
    run_ranks(2, existing)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.bool])
@pytest.mark.parametrize("stage", [1, 3])
def test_weights_of_whole_numbers_stay_whole(stage: int, dtype: torch.dtype) -> None:
    levels = torch.arange(16).view(4, 4).to(dtype)
    scale = torch.full((4,), 0.5) - 0.1 * levels.sum(0)
    right = [levels.float().sum().item(), (torch.ones(1, 4) @ (levels * scale)).sum().item()]
    assert run_ranks(2, whole_numbers, dtype, stage) == [pytest.approx(right)] * 2


def test_every_rank_gets_the_values_of_rank_0() -> None:
    run_ranks(2, seeds_differ)
