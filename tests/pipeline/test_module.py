"""Every division of a list of layers is the same model: the same names, weights and results."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from shoal.errors import PipelineError
from shoal.mesh.topology import PipeDataParallelTopology, ProcessTopology
from shoal.pipeline.layer import LayerSpec
from shoal.pipeline.module import PipelineModule
from shoal.testing import run_ranks
from shoal.zero.partition import blocks

from .models import WIDTH, Block, gpt, loss_of, tokens

State = dict[str, Tensor]


def state(ranks: int, schedule: str, stages_per_rank: int) -> tuple[State, tuple[int, ...], list[int], list[int]]:
    Block.built.clear()
    before = torch.get_rng_state()
    net = PipelineModule(gpt(6, tied=False), num_stages=ranks, seed_layers=True, schedule=schedule,
                         stages_per_rank=stages_per_rank)
    assert torch.equal(torch.get_rng_state(), before), "seeding layers restores the generator"
    assert [stage.number for stage in net.stages] == list(net.numbers)
    own = [net.names[index] for stage in net.stages for index in (layer.index for layer in stage.layers)]
    numbers = [int(name.removeprefix("body.h.")) for name in own if name.startswith("body")]
    return {name: p.detach().clone() for name, p in net.named_parameters()}, net.owner, Block.built.copy(), numbers


@pytest.mark.parametrize(("ranks", "schedule", "stages_per_rank", "owner"), [
    (1, "1f1b", 1, (0,)), (1, "interleaved", 3, (0, 0, 0)), (2, "1f1b", 1, (0, 1)), (2, "interleaved", 2, (0, 1, 0, 1)),
    (2, "zbv", 2, (0, 1, 1, 0)), (4, "1f1b", 1, (0, 1, 2, 3)), (4, "zbv", 2, (0, 1, 2, 3, 3, 2, 1, 0)),
])  # fmt: skip
def test_any_division_builds_the_same_weights_each_on_one_rank(ranks: int, schedule: str, stages_per_rank: int,
                                                               owner: tuple[int, ...]) -> None:
    (whole, *_), = run_ranks(1, state, 1, "1f1b", 1)
    parts = run_ranks(ranks, state, ranks, schedule, stages_per_rank)
    names = [name for part, *_ in parts for name in part]
    assert sorted(names) == sorted(whole)
    for part, found, built, own in parts:
        assert found == owner
        assert built == own, "a rank builds only its own layers"
        assert all(torch.equal(part[name], whole[name]) for name in part)


def plain() -> None:
    """A plain model with the same names gives its state to a pipeline, and both compute the same."""
    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(13, WIDTH)
            self.body = nn.ModuleDict({"h": nn.ModuleList([Block(n) for n in range(4)])})
            self.norm = nn.LayerNorm(WIDTH)
            self.head = gpt(tied=False)["head"].build()

        def forward(self, x: Tensor) -> Tensor:
            x = self.embed(x)
            for block in self.body["h"]:  # pyright: ignore[reportGeneralTypeIssues]  a ModuleList
                x = block(x)
            return self.head(self.norm(x))

    model, net = Plain(), PipelineModule(gpt(tied=False), num_stages=1, stages_per_rank=3,
                                        schedule="interleaved", loss_fn=loss_of)
    assert list(net.state_dict()) == list(model.state_dict())
    net.load_state_dict(model.state_dict())
    assert torch.equal(net(tokens()), model(tokens()))
    assert net.loss_fn is loss_of


def test_names_with_dots_share_checkpoints_with_a_plain_model() -> None:
    run_ranks(1, plain)


def numbered() -> None:
    layers = [nn.Linear(2, 3), torch.relu, nn.Linear(3, 4), LayerSpec(nn.Linear, 4, 2)]
    net = PipelineModule(layers, num_stages=1, schedule="zbv")
    assert [name for name, _ in net.named_parameters()] == ["0.weight", "0.bias", "2.weight", "2.bias", "3.weight", "3.bias"]
    assert net.names == ("0", "1", "2", "3")
    assert net.partitions() == (0, 3, 4), "25 and 10, rather than 9 and 26"
    assert net.get_parameter("0.weight") is layers[0].weight
    whole = PipelineModule(nn.Sequential(*layers[:1], nn.ReLU(), layers[2]), num_stages=1)
    assert list(whole.state_dict()) == ["0.weight", "0.bias", "2.weight", "2.bias"]
    ordered = PipelineModule(nn.Sequential(layers[0]), num_stages=1)
    assert ordered(torch.ones(1, 2)).shape == (1, 3)


def test_layers_of_a_list_are_named_by_their_number() -> None:
    run_ranks(1, numbered)


def layers_alive() -> list[bool]:
    layers = [nn.Linear(2, 2) for _ in range(4)]
    alive = [weakref.ref(layer) for layer in layers]
    net = PipelineModule(layers, num_stages=2)
    layers.clear()
    gc.collect()
    assert net.num_pipeline_stages() == 2
    return [ref() is not None for ref in alive]


def test_modules_of_other_stages_are_not_kept() -> None:
    assert run_ranks(2, layers_alive) == [[True, True, False, False], [False, False, True, True]]


def placement(kind: str) -> tuple[int, tuple[int, ...], list[int]]:
    topology = {"plain": None, "pipe, data": PipeDataParallelTopology(2, 2),
                "data, pipe": ProcessTopology(["data", "pipe"], [2, 2])}[kind]
    net = PipelineModule(gpt(6), num_stages=None if topology else 2, topology=topology)
    return net.pipeline_rank, net.numbers, net.topology().get_axis_comm_lists("pipe")[0]


@pytest.mark.parametrize(("kind", "wanted", "group"), [
    ("plain", [0, 0, 1, 1], [0, 2]), ("pipe, data", [0, 0, 1, 1], [0, 2]), ("data, pipe", [0, 1, 0, 1], [0, 1]),
])  # fmt: skip
def test_the_pipeline_is_the_slowest_axis_without_a_topology(kind: str, wanted: list[int], group: list[int]) -> None:
    assert run_ranks(4, placement, kind) == [(rank, (rank,), group) for rank in wanted]


def published_methods() -> None:
    net = PipelineModule(gpt(6), num_stages=2, stages_per_rank=2, schedule="interleaved", partition_method=[0, 2, 4, 6, 9])
    assert net.partitions() == (0, 2, 4, 6, 9)
    assert [net.stage_owner(index) for index in range(9)] == [0, 0, 1, 1, 0, 0, 1, 1, 1]
    assert net.get_additional_losses() is None
    assert f"pipeline rank {dist.get_rank()} of 2" in repr(net)
    with pytest.raises(PipelineError, match=r"divided over 2 pipeline ranks; use train_batch"):
        net(tokens())


def test_the_published_methods_of_a_module_work() -> None:
    run_ranks(2, published_methods)


def moves_and_modes() -> None:
    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("weight", torch.ones(13))

        def forward(self, scores: Tensor, labels: Tensor) -> Tensor:
            return nn.functional.cross_entropy(scores, labels, weight=self.get_buffer("weight"))

    loss = Loss()
    net = PipelineModule(gpt(), num_stages=1, schedule="zbv", loss_fn=loss).eval().double()
    assert not any(module.training for module in (net, loss, *net.stages, *net.modules()))
    assert {p.dtype for stage in net.stages for p in stage.parameters()} == {torch.float64}
    assert loss.get_buffer("weight").dtype == torch.float64
    assert not any(name == "weight" or "loss" in name for name in net.state_dict())
    assert {id(p) for p in net.parameters()} == {id(p) for stage in net.stages for p in stage.parameters()}


def test_moves_and_modes_reach_the_stages_and_the_loss() -> None:
    run_ranks(1, moves_and_modes)


def repeated() -> list[str]:
    net = PipelineModule(gpt(6), num_stages=1)
    return [type(module).__name__ for module in blocks(net.stages[0])]


def test_repeated_layers_of_a_stage_are_blocks() -> None:
    assert run_ranks(1, repeated) == [["Block"] * 6]


class ReadsValues(nn.Module):
    """A layer whose constructor reads a random value."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3) * torch.rand(()).item())

    def forward(self, x: Any) -> Any:
        return x


def built_scales() -> list[float]:
    torch.manual_seed(3)
    net = PipelineModule([LayerSpec(ReadsValues), LayerSpec(ReadsValues)], num_stages=1)
    return [p[0].item() for p in net.parameters()]


def test_a_constructor_that_reads_values_can_be_counted() -> None:
    torch.manual_seed(3)
    assert run_ranks(1, built_scales)[0] == pytest.approx([torch.rand(()).item() for _ in range(2)])
