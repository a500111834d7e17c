"""Layers are divided by weight, as evenly as possible; invalid arguments are refused before any layer is built."""

from __future__ import annotations

import re
from itertools import combinations, pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from shoal.errors import UsageError
from shoal.mesh.topology import PipeDataParallelTopology, ProcessTopology
from shoal.pipeline import profile
from shoal.pipeline.layer import LayerSpec, TiedLayerSpec, named
from shoal.pipeline.module import PipelineModule
from shoal.pipeline.stage_partition import balanced, checked_boundaries, divide
from shoal.testing import run_ranks

from .models import WIDTH, Block, Head, gpt, tokens

SIZES = [LayerSpec(nn.Linear, 100, 1), LayerSpec(nn.Linear, 10, 1), torch.relu, LayerSpec(nn.Linear, 40, 1),
         LayerSpec(nn.Linear, 30, 1), nn.ReLU(), LayerSpec(nn.LayerNorm, 20)]
"""101, 11, 0, 41, 31, 0 and 40 parameters."""


def boundaries(method: Any, stages: int = 3, layers: Any = SIZES) -> tuple[int, ...]:
    return divide(named(layers), stages, method).boundaries


def test_each_partition_method_weighs_layers_its_way() -> None:
    assert boundaries("parameters") == boundaries("best") == boundaries("Parameters") == (0, 1, 4, 7)
    assert boundaries("uniform") == (0, 3, 5, 7)
    assert boundaries("type:^LINEAR$") == (0, 3, 4, 7), "two, one and one"
    assert boundaries("type:linear|layernorm", 2) == (0, 4, 7)
    assert boundaries([0, 1, 2, 7]) == (0, 1, 2, 7)


def test_frozen_parameters_have_no_weight() -> None:
    frozen = nn.Linear(1000, 1000).requires_grad_(False)
    assert boundaries("parameters", 2, [frozen, *SIZES[3:5]]) == (0, 2, 3)


@pytest.mark.parametrize(("method", "stages", "words"), [
    ("parameters", 8, "7 layers cannot be split over 8 stages"),
    ("uniform", 6, r"stage 1 of 6 has no parameters: its layers are '2' \(relu\) by partition_method='uniform'; choose"),
    ([0, 5, 6, 7], 3, r"stage 1 of 3 has no parameters: its layers are '5' \(ReLU\) by partition_method=\[0, 5, 6, 7\]"),
    ([0, 3, 7], 3, r"boundaries \[0, 3, 7\]; 7 layers in 3 stages take 4 ascending numbers"),
    ("type:Conv", 3, "'type:Conv' matches no layer; their classes are Linear, relu, ReLU, LayerNorm"),
    ("type:(", 3, "'type:\\(', which is no regular expression"),
    ("type:", 3, "got 'type:'; choose 'parameters', 'uniform'"),
    ("parameter", 3, "got 'parameter'; choose"),
    ("profile", 3, "'profile': give sample="),
])  # fmt: skip
def test_a_partition_that_is_impossible_is_refused(method: Any, stages: int, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        boundaries(method, stages)


def test_a_model_without_parameters_is_refused() -> None:
    with pytest.raises(UsageError, match="stage 0 of 2 has no parameters"):
        boundaries("parameters", 2, [torch.relu, torch.tanh])


CLOCK = [0.0]


class Slow(nn.Module):
    """A layer that takes the given seconds on the test's clock in forward, and again in backward."""

    def __init__(self, seconds: float, parameters: int = 1):
        super().__init__()
        self.seconds = seconds
        self.scale = nn.Parameter(torch.ones(parameters))

    def forward(self, x: dict[str, Tensor]) -> dict[str, Tensor]:
        assert self.training
        CLOCK[0] += self.seconds
        y = x["x"] * self.scale[0]
        y.register_hook(self._tick)
        return {"x": y, "kept": x["kept"]}

    def _tick(self, gradient: Tensor) -> None:
        CLOCK[0] += self.seconds


def first(x: Tensor) -> dict[str, Tensor]:
    return {"x": x.float(), "kept": torch.ones(1, dtype=torch.int64)}


def last(x: dict[str, Tensor], labels: Tensor) -> Tensor:
    CLOCK[0] += 20
    return (x["x"] - labels).pow(2).mean()


def timed() -> tuple[tuple[int, ...], bool]:
    profile._now = lambda device: CLOCK[0]  # pyright: ignore[reportPrivateUsage]
    given = Slow(5)
    state = torch.get_rng_state()
    layers = [first, LayerSpec(Slow, 1, 7), LayerSpec(Slow, 2, 6), LayerSpec(Slow, 3, 5), given, LayerSpec(Slow, 1, 2)]
    net = PipelineModule(layers, num_stages=2, loss_fn=last, partition_method="profile",
                         sample=(torch.arange(3), torch.ones(3)))
    return net.partitions(), torch.equal(state, torch.get_rng_state()) and given.scale.grad is None


def test_profile_divides_by_measured_time() -> None:
    """2, 4, 6 and 10 seconds, and 22 with the loss."""
    assert run_ranks(2, timed) == [((0, 5, 6), True)] * 2


def failing() -> str:
    with pytest.raises(UsageError) as caught:
        PipelineModule([LayerSpec(nn.Linear, 2, 3), LayerSpec(nn.Linear, 4, 3)], num_stages=2, partition_method="profile",
                       sample=(torch.ones(1, 2), torch.ones(1)))
    return str(caught.value)


def test_a_layer_that_fails_on_the_sample_is_named_on_every_rank() -> None:
    for said in run_ranks(2, failing):
        assert said.startswith("partition_method 'profile': rank 0 could not measure the layers: UsageError: layer '1' (Lin")
        assert "shapes cannot be multiplied" in said


LINEAR = LayerSpec(nn.Linear, 2, 2)
REFUSED: dict[str, tuple[Any, dict[str, Any], str]] = {
    "no size": ([LINEAR], {}, "give num_stages, or a topology"),
    "uneven": ([LINEAR], {"num_stages": 3}, "num_stages: got 3; the 2 ranks of the job do not divide by it"),
    "none": ([LINEAR], {"num_stages": 0}, "num_stages: got 0"),
    "world": ([LINEAR], {"topology": PipeDataParallelTopology(2, 2)}, "of 4 ranks and num_stages=None"),
    "axis": ([LINEAR], {"topology": ProcessTopology(["data"], [2])}, "has an axis 'pipe'"),
    "both": ([LINEAR], {"topology": PipeDataParallelTopology(2, 1), "num_stages": 1}, "and num_stages=1"),
    "zbv": ([LINEAR] * 9, {"num_stages": 2, "schedule": "zbv", "stages_per_rank": 1},
            "zbv: stages_per_rank: got 1; zbv takes 2"),
    "stages": ([LINEAR] * 9, {"num_stages": 2, "stages_per_rank": 0}, "stages_per_rank: got 0"),
    "empty": ([], {"num_stages": 1}, "layers: got none"),
    "number": ([LINEAR, 7], {"num_stages": 1}, "layers: '1' is 7, a int; give a LayerSpec"),
    "class": ([nn.ReLU], {"num_stages": 1}, r"layers: '0' is the class ReLU; write LayerSpec\(ReLU, ...\)"),
    "text": ("abc", {"num_stages": 1}, "layers: got a str"),
    "dots": ({"a..b": LINEAR}, {"num_stages": 1}, r"the name 'a..b'; names are words"),
    "within": ({"h": LINEAR, "h.0": LINEAR}, {"num_stages": 1}, "'h.0' lies within 'h', which is a layer itself"),
    "taken": ({"stages": LINEAR}, {"num_stages": 1}, "the name 'stages' cannot be: attribute 'stages' already exists"),
    "taken later": ({"tied": LINEAR}, {"num_stages": 1}, "the name 'tied' cannot be"),
    "nested": ([LayerSpec(PipelineModule, [LINEAR])], {"num_stages": 1}, "is a PipelineModule, and pipelines do not nest"),
    "interval": ([LINEAR], {"num_stages": 1, "activation_checkpoint_interval": -1}, "checkpoint_interval: got -1"),
    "seed": ([LINEAR], {"num_stages": 1, "seed_fn": torch.manual_seed}, "seed_fn: got one without seed_layers"),
    "sample": ([LINEAR], {"num_stages": 1, "sample": (1, 2)}, "sample: got one with partition_method='parameters'"),
    "loss": ([LINEAR], {"num_stages": 1, "loss_fn": nn.Linear(1, 1)}, "loss_fn: Linear has parameters"),
    "bad sample": ([LINEAR], {"num_stages": 1, "partition_method": "profile", "sample": 3}, "sample: got a int; give one"),
    "shared": ((lambda one: [one, one])(nn.Linear(2, 2)), {"num_stages": 2},
               r"layers '0' \(Linear\) and '1' \(Linear\) share a parameter \(2, 2\), but run in stages 0 and 1"),
    "tied shape": ([TiedLayerSpec("w", nn.Embedding, 13, WIDTH), TiedLayerSpec("w", nn.Linear, WIDTH, 12)],
                   {"num_stages": 2}, r"TiedLayerSpec 'w': layers '0' \(Embedding\) and '1' \(Linear\) .*weight \(13, 8\) "
                   r"torch.float32, and weight \(12, 8\)"),
    "tied dtype": ([TiedLayerSpec("w", nn.Embedding, 13, WIDTH),
                    TiedLayerSpec("w", Head, dtype=torch.float64, tied_weight_attr="scores.weight")], {"num_stages": 2},
                   r"scores.weight \(13, 8\) torch.float64"),
    "tied number": ([TiedLayerSpec("w", nn.Linear, 2, 2, tied_weight_attr="bias"),
                     TiedLayerSpec("w", nn.Linear, 2, 2, tied_weight_attr=["bias", "weight"])], {"num_stages": 2},
                    "must agree in number"),
    "tied name": ([TiedLayerSpec("w", Head)], {"num_stages": 1},
                  r"layer '0' \(Head\): tied_weight_attr: got 'weight'; its parameters are scores.weight, scores.bias"),
}  # fmt: skip


def refused() -> dict[str, str]:
    said: dict[str, str] = {}
    for kind, (layers, options, _) in REFUSED.items():
        with pytest.raises(UsageError) as caught:
            PipelineModule(layers, **options)
        said[kind] = str(caught.value)
    return said


def test_invalid_pipeline_arguments_are_named() -> None:
    for said in run_ranks(2, refused):
        assert [(kind, said[kind]) for kind in REFUSED if not re.search(REFUSED[kind][2], said[kind])] == []


@pytest.mark.parametrize("typename", [torch.relu, nn.Linear(1, 1), int])
def test_a_spec_needs_a_module_class(typename: Any) -> None:
    with pytest.raises(UsageError, match="LayerSpec: typename: got"):
        LayerSpec(typename, 1)


def test_a_spec_prints_as_the_call_that_it_makes() -> None:
    assert repr(LayerSpec(nn.Linear, 2, 3, bias=False)) == "Linear(2, 3, bias=False)"
    assert LayerSpec(nn.Linear, 2, 3, bias=False).build().bias is None
    assert isinstance(gpt()["body.h.1"].build(), Block)
    assert tokens().shape == (2, 5)


# Balanced boundaries

WEIGHTS = st.lists(st.integers(0, 12), min_size=1, max_size=9)


def cost(weights: list[int], boundaries: tuple[int, ...]) -> tuple[int, int]:
    parts = [sum(weights[start:stop]) for start, stop in pairwise(boundaries)]
    return max(parts), sum(part * part for part in parts)


@given(WEIGHTS, st.data())
def test_no_other_partition_is_better_balanced(weights: list[int], data: st.DataObject) -> None:
    parts = data.draw(st.integers(1, len(weights)))
    found = balanced(weights, parts)
    assert checked_boundaries(found, len(weights), parts) == found
    every = [(0, *inner, len(weights)) for inner in combinations(range(1, len(weights)), parts - 1)]
    assert cost(weights, found) == min(cost(weights, other) for other in every)


@given(WEIGHTS, st.data())
def test_no_part_has_weight_zero_if_that_is_avoidable(weights: list[int], data: st.DataObject) -> None:
    nonzero = sum(weight > 0 for weight in weights)
    parts = data.draw(st.integers(1, max(1, nonzero)))
    found = balanced(weights, parts)
    assert nonzero < parts or all(sum(weights[start:stop]) for start, stop in pairwise(found))


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=40), st.data())
def test_any_weights_can_be_partitioned(weights: list[float], data: st.DataObject) -> None:
    parts = data.draw(st.integers(1, len(weights)))
    assert checked_boundaries(balanced(weights, parts), len(weights), parts)


@pytest.mark.parametrize(("layers", "parts", "wanted"), [
    (10, 4, (0, 3, 6, 8, 10)), (4, 4, (0, 1, 2, 3, 4)), (7, 1, (0, 7)), (96, 5, (0, 20, 39, 58, 77, 96)),
])  # fmt: skip
def test_equal_layers_are_split_evenly_with_early_parts_longer(layers: int, parts: int, wanted: tuple[int, ...]) -> None:
    assert balanced([1] * layers, parts) == wanted


def test_layers_of_weight_zero_stay_with_the_layer_before() -> None:
    assert balanced([5, 0, 0, 5, 0], 2) == (0, 3, 5)


def test_fewer_layers_than_parts_are_refused() -> None:
    with pytest.raises(UsageError, match="3 layers cannot be split over 4 stages"):
        balanced([1, 1, 1], 4)


@pytest.mark.parametrize("boundaries", [(0, 2), (0, 2, 2, 5), (1, 2, 3, 5), (0, 2, 3, 4), (), (0, 3, 2, 5)])
def test_invalid_boundaries_are_refused(boundaries: tuple[int, ...]) -> None:
    with pytest.raises(UsageError, match=re.escape(str(list(boundaries))) + ".*5 layers in 3 stages take 4 ascending"):
        checked_boundaries(boundaries, 5, 3)
