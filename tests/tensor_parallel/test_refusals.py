"""Plans that would train wrongly are refused: gradients in split sequences, split heads; the model stays as it was."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from shoal.errors import RanksDisagree, UsageError
from shoal.tensor_parallel import (
    Column,
    Kind,
    Norm,
    Plan,
    Region,
    Row,
    Sequence,
    VocabularyEmbedding,
    Whole,
    parallelize,
)
from shoal.testing import run_ranks

from .test_layers import world

WIDTH = 8


class Block(nn.Module):
    def __init__(self, *, scaled: bool = False) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.ones(())) if scaled else 1.0

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale * self.down(torch.relu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self, *, scaled: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(scaled=scaled) for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.norm(x)


PLAN: dict[str, Kind] = {"blocks.0": Sequence(split="x"), "blocks.*.norm": Norm(), "up": Column(), "down": Row(),
                         ".norm": Norm(gather_output=True)}


def said(kinds: dict[str, Kind], *, scaled: bool = False, sequence_dim: int | None = 1) -> str:
    with pytest.raises(UsageError) as caught:
        parallelize(Model(scaled=scaled), world(), Plan(kinds, sequence_dim=sequence_dim))
    return str(caught.value)


def without(pattern: str, **other: Kind) -> dict[str, Kind]:
    return {name: kind for name, kind in PLAN.items() if name != pattern} | other


def split_regions() -> list[str]:
    torch.manual_seed(0)
    parallelize(Model(), world(), Plan(without("blocks.*.norm")))  # whole sequences, whole gradients
    return [said(without("blocks.*.norm")), said(without("blocks.*.norm", **{"blocks.*.norm": Whole()})),
            said(without("blocks.0", **{"blocks.*": Sequence(split="x")}), scaled=True),
            said(without("blocks.0", **{"blocks.*": Region()}), scaled=True), said(PLAN, scaled=True)]


def test_every_parameter_in_a_split_sequence_must_be_matched() -> None:
    for forgotten, whole, inner, region, other in run_ranks(1, split_regions):
        assert "no pattern matches blocks.*.norm (LayerNorm), 2 of them; the nearest is '.norm': each rank" in forgotten
        assert "get its part of the gradient: say Norm() where it runs between regions" in forgotten
        assert "blocks.*.norm (LayerNorm), 2 of them, is Whole() in a list of blocks whose sequences are split" in whole
        assert "blocks.* (Block), 2 of them, has parameters of its own, of which Sequence() takes no care" in inner
        assert "of which Region() takes no care where sequences are split" in region
        assert "no pattern matches blocks.* (Block), 1 of them" in other and "which Sequence() takes no care" in other


class Layered(nn.Module):
    """The model of a pipeline rank: layers with numeric names, possibly only one of its class."""

    def __init__(self, *numbers: int) -> None:
        super().__init__()
        for number in numbers:
            self.add_module(str(number), Block())


def of_two_stages(case: str) -> str:
    alone = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
    assert alone is not None
    torch.manual_seed(0)
    kinds: dict[str, Kind] = {"up": Column(), "down": Row(), "norm": Norm()}
    if case == "forgotten":
        del kinds["norm"]
    if case == "plan" and dist.get_rank() == 1:
        kinds["norm"] = Norm(gather_output=True)
    model = Layered(dist.get_rank())
    if case == "heads" and dist.get_rank() == 1:
        model.get_submodule("1").up = nn.Linear(WIDTH, 2 * WIDTH + 1)
    if case == "heads":
        kinds["up"] = Column(heads=2)
    with pytest.raises((UsageError, RanksDisagree)) as caught:
        parallelize(model, alone, Plan(kinds, sequence_dim=1), stages=world())
    assert type(model.get_submodule(f"{dist.get_rank()}.down")) is nn.Linear
    return str(caught.value)


@pytest.mark.parametrize(("case", "words"), [
    ("forgotten", "no pattern matches *.norm (LayerNorm), 1 of them"),
    ("plan", "the pipeline ranks begin with different plans or models: rank 0 has 'norm': Norm(per_head=False, "
             "gather_output=False); rank 1 has"),
    ("heads", "1.up: Column: 17 outputs are not 2 heads of one size"),
])
def test_the_stages_of_a_pipeline_are_one_model_to_a_plan(case: str, words: str) -> None:
    for found in run_ranks(2, of_two_stages, case):
        assert words in found


def test_heads_are_never_sliced_in_the_middle() -> None:
    assert run_ranks(1, said, without("up", up=Column(heads=3)))[0] == (
        "blocks.0.up: Column: 16 outputs are not 3 heads of one size, and would be sliced in the middle of one; give heads "
        "a number that divides 16")


def state_of(model: nn.Module) -> dict[str, Any]:
    return {path: (id(module), {name: dict(value) if isinstance(value, dict) else value
                                for name, value in vars(module).items()}) for path, module in model.named_modules()}


def left_alone() -> None:
    torch.manual_seed(0)
    model = Model()
    plain, before = copy.deepcopy(model), state_of(model)
    kinds = without("down", **{"blocks.0.down": Row(), "blocks.1.down": Column(heads=3)})  # the last module to be sliced
    with pytest.raises(UsageError, match=r"blocks.1.down: Column: 8 outputs are not 3 heads of one size"):
        parallelize(model, world(), Plan(kinds, sequence_dim=1))
    assert state_of(model) == before
    x = torch.randn(2, 4, WIDTH)
    assert torch.equal(model.blocks[0](x), plain.blocks[0](x))


def test_a_model_that_a_plan_does_not_fit_is_left_as_it_was() -> None:
    run_ranks(1, left_alone)


def odd_arguments() -> None:
    model: Any = Model()
    with pytest.raises(UsageError, match="group: got None; give the process group of the ranks that share the layers"):
        parallelize(model, None, Plan(PLAN))  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="plan: got a dict; give a Plan"):
        parallelize(model, world(), PLAN)  # type: ignore[arg-type]
    for wrong in ("column", Column):
        with pytest.raises(UsageError, match=r"Plan: 'up': got .*olumn.*; give a kind as a value, such as Column"):
            Plan({"up": wrong})  # type: ignore[dict-item]
    with pytest.raises(UsageError, match="Plan: got a list; give a mapping of name patterns to kinds"):
        Plan([Column()])  # type: ignore[arg-type]


def test_a_wrong_group_plan_or_rule_is_named() -> None:
    run_ranks(1, odd_arguments)


def paddings() -> None:
    assert VocabularyEmbedding(10, 4, world(), padding_idx=-1).padding_idx == 9
    for wrong in (10, 11, -11):
        with pytest.raises(UsageError, match=rf"padding_idx: got {wrong}; the vocabulary has 10 words: give 0 to 9"):
            VocabularyEmbedding(10, 4, world(), padding_idx=wrong)


def test_a_padding_word_lies_within_the_vocabulary() -> None:
    run_ranks(1, paddings)
