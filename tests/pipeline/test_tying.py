"""Tied weights train as one weight; all other parameters of their layers stay separate."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

import shoal
from shoal.pipeline.layer import LayerSpec, TiedLayerSpec
from shoal.pipeline.module import PipelineModule
from shoal.pipeline.tying import Tied
from shoal.tensor_parallel import Column, Plan, Whole, parallelize
from shoal.testing import run_ranks

from .models import WIDTH, WORDS, gpt, loss_of, tokens


def tied_on_one_rank(stages_per_rank: int) -> None:
    net = PipelineModule(gpt(), num_stages=1, stages_per_rank=stages_per_rank, loss_fn=loss_of,
                         schedule="1f1b" if stages_per_rank == 1 else "interleaved")
    embed, head = net.get_submodule("embed"), net.get_submodule("head")
    weight = embed.get_parameter("weight")
    assert head.get_parameter("scores.weight") is weight
    assert "head.scores.bias" in dict(net.named_parameters())
    assert net.tied == {"embed.weight": Tied(name="embed.weight", stages=tuple(sorted({0, stages_per_rank - 1})))}
    loss_of(net(tokens()), tokens(1)).backward()
    assert weight.grad is not None

    plain = gpt(tied=False)
    twin = nn.Sequential(*(plain[name].build() for name in plain))
    twin.load_state_dict({key: value for key, value in zip(twin.state_dict(), net.state_dict().values(), strict=True)})
    loss_of(twin(tokens()), tokens(1)).backward()
    first, *_, last, _ = (p.grad for p in twin.parameters())
    assert isinstance(first, Tensor)
    assert isinstance(last, Tensor)
    torch.testing.assert_close(weight.grad, first + last)


@pytest.mark.parametrize("stages_per_rank", [1, 3])
def test_on_one_rank_tied_weights_are_one_parameter(stages_per_rank: int) -> None:
    run_ranks(1, tied_on_one_rank, stages_per_rank)


def tied_over_ranks(schedule: str, stages_per_rank: int) -> tuple[dict[str, Tied], list[str]]:
    layers = {**gpt(), "second": TiedLayerSpec("words", nn.Embedding, WORDS, WIDTH, forward_fn=lambda module, x: x)}
    method = [0, 2, 4, 6, 8] if stages_per_rank == 2 else "uniform"
    net = PipelineModule(layers, num_stages=2, stages_per_rank=stages_per_rank, schedule=schedule, partition_method=method)
    return dict(net.tied), [name for name, _ in net.named_parameters() if "h." not in name and "norm" not in name]


def test_a_tied_weight_is_named_by_its_first_layer_on_every_rank() -> None:
    first, last = run_ranks(2, tied_over_ranks, "1f1b", 1)
    tied = Tied(name="embed.weight", stages=(0, 1))
    assert first == ({"embed.weight": tied}, ["embed.weight"])
    assert last == ({"head.scores.weight": tied}, ["head.scores.weight", "head.scores.bias"])


def test_the_first_and_last_stage_of_a_v_share_one_parameter() -> None:
    first, last = run_ranks(2, tied_over_ranks, "zbv", 2)
    assert first == ({"embed.weight": Tied(name="embed.weight", stages=(0, 3))}, ["embed.weight", "head.scores.bias"])
    assert last == ({}, [])


class Two(nn.Module):
    def __init__(self, names: tuple[str, str]):
        super().__init__()
        for name, size in zip(names, (2, 3), strict=True):
            self.register_parameter(name, nn.Parameter(torch.full((size,), float(size))))
        self.own = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.own


def several_weights() -> None:
    layers = [TiedLayerSpec("pair", Two, ("a", "b"), tied_weight_attr=["a", "b"]),
              TiedLayerSpec("pair", Two, ("c", "d"), tied_weight_attr=["c", "d"]),
              TiedLayerSpec("alone", Two, ("a", "b"), tied_weight_attr=["a"])]
    net = PipelineModule(layers, num_stages=1)
    assert net.get_parameter("1.c") is net.get_parameter("0.a")
    assert net.get_parameter("1.d") is net.get_parameter("0.b")
    assert net.get_parameter("1.own") is not net.get_parameter("0.own")
    assert list(net.tied) == ["0.a", "0.b"], "a key of one layer ties nothing"


def test_several_weights_are_tied_in_the_order_of_their_names() -> None:
    run_ranks(1, several_weights)


SIZE, COUNT, STEPS = 4, 4, 2


@dataclass(frozen=True, kw_only=True)
class Line:
    """A sequence of square layers: "L" has its own weight, layers with any other name share the weight of that key."""

    names: str
    stages: int
    boundaries: list[int]
    schedule: str = "interleaved"
    stages_per_rank: int = 2
    zero: int = 1
    plan: Plan | None = None
    shared: tuple[str, ...] = ("weight",)

    def build(self) -> shoal.PipelineEngine:
        layers = [LayerSpec(nn.Linear, SIZE, SIZE) if name == "L" else
                  TiedLayerSpec(name, nn.Linear, SIZE, SIZE, tied_weight_attr=self.shared) for name in self.names]
        model = PipelineModule(layers, num_stages=self.stages, loss_fn=nn.functional.mse_loss, seed_layers=True,
                               schedule=self.schedule, stages_per_rank=self.stages_per_rank,
                               partition_method=self.boundaries)
        mesh = shoal.Mesh(pipeline=self.stages, tensor=2 if self.plan else 1)
        if self.plan:
            parallelize(model, mesh.group("tensor"), self.plan, stages=mesh.group("pipeline"))
        return shoal.initialize(model=model, mpu=mesh, config={
            "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": COUNT, "gradient_clipping": 0.0,
            "timeout": 20, "zero_optimization": {"stage": self.zero},
            "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.1}}})[0]

    def plain(self) -> nn.Sequential:
        """Build the same layers in one process."""
        model, first = nn.Sequential(), dict[tuple[str, str], nn.Parameter]()
        for number, name in enumerate(self.names):
            torch.manual_seed(1234 + number)
            model.append(nn.Linear(SIZE, SIZE))
            for leaf in self.shared if name != "L" else ():
                setattr(model[number], leaf, first.setdefault((name, leaf), model[number].get_parameter(leaf)))
        return model


def samples() -> list[tuple[Tensor, Tensor]]:
    values = torch.randn(COUNT + 1, 2, SIZE, generator=torch.Generator().manual_seed(0))
    return [(values[number], values[number + 1]) for number in range(COUNT)]


def trained(line: Line) -> tuple[dict[str, Tensor], list[float], dict[str, Tensor]]:
    engine = line.build()
    first = engine.consolidated_state_dict() or {}
    losses = [engine.train_batch(iter(samples())).item() for _ in range(STEPS)]
    return first, losses, engine.consolidated_state_dict() or {}


CUT = Column(gather_output=True)
LINES = {
    "the first copy is on the higher rank": Line(names="LaaL", stages=2, boundaries=[0, 1, 2, 3, 4]),
    "the first copy of one of two keys is": Line(names="LbaabL", stages=2, boundaries=[0, 2, 3, 4, 6]),
    "in a V": Line(names="LababL", stages=2, boundaries=[0, 1, 3, 5, 6], schedule="zbv", zero=2),
    "ranks of two keys overlap": Line(names="abbba", stages=3, boundaries=[0, 2, 3, 5], schedule="1f1b", stages_per_rank=1),
    "a rank has no other weights": Line(names="aaLa", stages=2, boundaries=[0, 2, 4], schedule="1f1b", stages_per_rank=1,
                                        shared=("weight", "bias")),
    "two keys in opposite order": Line(names="baab", stages=2, boundaries=[0, 1, 2, 3, 4], zero=3),
    "tensor ranks cut the first of two keys": Line(names="abba", stages=2, boundaries=[0, 2, 4], schedule="1f1b",
                                                   stages_per_rank=1, plan=Plan({"[03]": CUT, "[12]": Whole()})),
    "tensor ranks cut the second": Line(names="abba", stages=2, boundaries=[0, 2, 4], schedule="1f1b",
                                        stages_per_rank=1, plan=Plan({"[03]": Whole(), "[12]": CUT})),
}


@pytest.mark.parametrize("name", LINES)
def test_tied_weights_start_and_train_as_in_one_process(name: str) -> None:
    line = LINES[name]
    plain = line.plain()
    first, losses, weights = run_ranks(line.stages * (2 if line.plan else 1), trained, line)[0]
    for key, value in plain.state_dict().items():
        assert torch.equal(first[key], value), key
    expected, optimizer = [], torch.optim.AdamW(plain.parameters(), lr=0.01, weight_decay=0.1)
    for _ in range(STEPS):
        found = [nn.functional.mse_loss(plain(value), wanted) / COUNT for value, wanted in samples()]
        sum(found).backward()
        optimizer.step()
        optimizer.zero_grad()
        expected.append(sum(found).item())
    assert losses == pytest.approx(expected, rel=1e-5)
    for key, value in plain.state_dict().items():
        torch.testing.assert_close(weights[key], value, rtol=1e-5, atol=1e-6)
