"""Tied weights are one weight, and nothing else of their layers is."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from shoal.pipeline.module import PipelineModule
from shoal.pipeline.spec import TiedLayerSpec
from shoal.pipeline.tying import Tied
from shoal.testing import run_ranks

from .models import WIDTH, WORDS, gpt, loss_of, tokens


def one(stages_per_rank: int) -> None:
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
def test_on_one_rank_a_tied_weight_is_one_parameter_and_gets_both_gradients(stages_per_rank: int) -> None:
    run_ranks(1, one, stages_per_rank)


def apart(schedule: str, stages_per_rank: int) -> tuple[dict[str, Tied], list[str]]:
    layers = {**gpt(), "again": TiedLayerSpec("words", nn.Embedding, WORDS, WIDTH, forward_fn=lambda module, x: x)}
    method = [0, 2, 4, 6, 8] if stages_per_rank == 2 else "uniform"
    net = PipelineModule(layers, num_stages=2, stages_per_rank=stages_per_rank, schedule=schedule, partition_method=method)
    return dict(net.tied), [name for name, _ in net.named_parameters() if "h." not in name and "norm" not in name]


def test_a_tied_weight_has_the_name_of_its_first_layer_wherever_it_rests() -> None:
    first, last = run_ranks(2, apart, "1f1b", 1)
    tied = Tied(name="embed.weight", stages=(0, 1))
    assert first == ({"embed.weight": tied}, ["embed.weight"])
    assert last == ({"head.scores.weight": tied}, ["head.scores.weight", "head.scores.bias"])


def test_both_ends_of_a_v_hold_one_parameter() -> None:
    first, last = run_ranks(2, apart, "zbv", 2)
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


def several() -> None:
    layers = [TiedLayerSpec("pair", Two, ("a", "b"), tied_weight_attr=["a", "b"]),
              TiedLayerSpec("pair", Two, ("c", "d"), tied_weight_attr=["c", "d"]),
              TiedLayerSpec("alone", Two, ("a", "b"), tied_weight_attr=["a"])]
    net = PipelineModule(layers, num_stages=1)
    assert net.get_parameter("1.c") is net.get_parameter("0.a")
    assert net.get_parameter("1.d") is net.get_parameter("0.b")
    assert net.get_parameter("1.own") is not net.get_parameter("0.own")
    assert list(net.tied) == ["0.a", "0.b"], "a key of one layer ties nothing"


def test_several_weights_are_tied_in_the_order_of_their_names() -> None:
    run_ranks(1, several)
