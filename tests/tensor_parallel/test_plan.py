"""A plan of a few lines slices one's own model; one that does not fit is refused on every rank, with names and the fix."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from shoal.errors import RanksDisagree, UsageError
from shoal.mesh.tensor_slice import cuts_of
from shoal.tensor_parallel import (
    Column,
    Dropout,
    Head,
    Heads,
    Kind,
    Norm,
    Plan,
    Region,
    Row,
    Sequence,
    Vocabulary,
    Whole,
    parallelize,
)
from shoal.tensor_parallel.plan import matches
from shoal.testing import run_ranks

from .test_layers import assert_equal, gradients, joined, world

WIDTH, HEADS, WORDS, BLOCKS = 16, 4, 30, 3


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.heads = HEADS
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        return self.out(functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2))


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.up = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.down = nn.Linear(3 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(functional.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.attention, self.mlp = Attention(), Gated()
        self.drop = nn.Dropout(0.0)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop(self.attention(self.before(x)))
        return x + self.drop(self.mlp(self.between(x)))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.positions = nn.Embedding(8, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.positions.weight[:tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


PLAN: dict[str, Kind] = {
    "embed": Vocabulary(),
    "attention": Region(divide=("heads",)),
    "attention.qkv": Heads(heads=HEADS, head_dim=WIDTH // HEADS),
    "attention.out": Row(),
    "mlp": Region(enter="x"),
    "mlp.gate|up": Column(),
    "mlp.down": Row(),
    "head": Head(),
    "blocks.0": Sequence(split="x"),
    "blocks.*.before|between": Norm(),
    "blocks.*.drop": Dropout(),
    "norm": Norm(gather_output=True),
}


def model() -> Model:
    torch.manual_seed(1)
    return Model()


def without(*patterns: str, **other: Kind) -> Plan:
    return Plan({**{pattern: kind for pattern, kind in PLAN.items() if pattern not in patterns}, **other})


def parity(sequence_dim: int | None) -> None:
    plain = model()
    mine = parallelize(copy.deepcopy(plain), world(), Plan(PLAN, sequence_dim=sequence_dim))
    tokens = torch.randint(WORDS, (2, 8))
    wanted, found = plain(tokens), mine(tokens)
    torch.testing.assert_close(found, wanted)
    functional.cross_entropy(wanted.flatten(0, 1), tokens.flatten()).backward()
    functional.cross_entropy(found.flatten(0, 1), tokens.flatten()).backward()
    assert_equal(joined(mine, gradients(mine)), gradients(plain))
    assert mine.head.weight is mine.embed.weight
    assert cuts_of(mine)["head.weight"] == cuts_of(mine)["embed.weight"]


@pytest.mark.parametrize("sequence_dim", [None, 1])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_plan_cuts_a_model_of_ones_own(ranks: int, sequence_dim: int | None) -> None:
    run_ranks(ranks, parity, sequence_dim)


def copied() -> bool:
    mine = parallelize(model(), world(), Plan(PLAN, sequence_dim=1))
    tokens = torch.randint(WORDS, (2, 8))
    return torch.equal(copy.deepcopy(mine)(tokens), mine(tokens))


def test_a_cut_model_can_be_copied() -> None:
    assert run_ranks(2, copied) == [True] * 2


def compiled() -> None:
    plain = model()
    mine = parallelize(copy.deepcopy(plain), world(), Plan(PLAN, sequence_dim=1))
    tokens = torch.randint(WORDS, (2, 8))
    wanted, found = plain(tokens), torch.compile(mine, backend="aot_eager")(tokens)
    torch.testing.assert_close(found, wanted)
    functional.cross_entropy(wanted.flatten(0, 1), tokens.flatten()).backward()
    functional.cross_entropy(found.flatten(0, 1), tokens.flatten()).backward()
    assert_equal(joined(mine, gradients(mine)), gradients(plain))


def test_a_cut_model_can_be_compiled() -> None:
    run_ranks(2, compiled)


@pytest.mark.parametrize(("pattern", "path", "fits"), [
    ("mlp.up", "blocks.0.mlp.up", True), ("mlp.up", "mlp.up", True), ("mlp.up", "blocks.0.mlp.up.inner", False),
    ("up", "blocks.0.cup", False), ("blocks.*.up", "blocks.0.mlp.up", False), ("blocks.*.*.up", "blocks.0.mlp.up", True),
    ("gate|up", "mlp.up", True), ("gate|up", "mlp.gates", False), ("*_proj", "attn.q_proj", True), ("h.0", "h.10", False),
    (".norm", "norm", True), (".norm", "blocks.0.norm", False), (".blocks.*.up", "blocks.1.up", True),
])  # fmt: skip
def test_a_pattern_is_the_end_of_a_name(pattern: str, path: str, fits: bool) -> None:
    assert matches(pattern, path) is fits


def refused(build: Callable[[], nn.Module], plan: Plan) -> str:
    with pytest.raises(UsageError) as caught:
        parallelize(build(), world(), plan)
    return str(caught.value)


def refusal(plan: Plan, *, ranks: int = 2, build: Callable[[], nn.Module] = model) -> str:
    """Return what all ranks say."""
    said = set(run_ranks(ranks, refused, build, plan))
    assert len(said) == 1
    return said.pop()


def test_a_pattern_that_matches_nothing_is_named_with_the_nearest() -> None:
    assert refusal(without("mlp.down", **{"mlp.donw": Row()})).splitlines()[:2] == [
        "the plan does not fit the model:", "  'mlp.donw' matches no module; did you mean 'mlp.down'?"]


def test_a_module_that_is_matched_twice_is_named_with_both_patterns() -> None:
    said = refusal(without(**{"blocks.1.mlp.down": Row()})).splitlines()
    assert said[1:] == ["  blocks.1.mlp.down is matched by 'mlp.down' and by 'blocks.1.mlp.down': make one of them longer "
                        "(a dot before a pattern makes it the whole name), so that it is matched once"]


def test_unmatched_weights_in_blocks_are_named_with_the_nearest_pattern() -> None:
    said = refusal(without("mlp.gate|up", "attention.out", **{"mlp.gate": Column()})).splitlines()
    assert said[1:] == [
        "  no pattern matches blocks.*.attention.out (Linear), 3 of them; the nearest is 'attention.qkv': say how to slice "
        "it, or that it is Whole()",
        "  no pattern matches blocks.*.mlp.up (Linear), 3 of them; the nearest is 'mlp.down': say how to slice it, or that "
        "it is Whole()"]


def whole_mlp() -> None:
    plain = model()
    mine = parallelize(copy.deepcopy(plain), world(), without("mlp.gate|up", "mlp.down", mlp=Whole()))
    tokens = torch.randint(WORDS, (2, 8))
    torch.testing.assert_close(mine(tokens), plain(tokens))
    assert not any("mlp" in name for name in cuts_of(mine))


def test_a_whole_module_covers_the_modules_within_it() -> None:
    run_ranks(2, whole_mlp)


def test_sizes_that_do_not_divide_are_named_with_those_that_would() -> None:
    assert refusal(Plan(PLAN), ranks=3) == (
        "blocks.0.attention: heads 4 cannot be divided over 3 tensor ranks; make it a multiple of 3 (3 or 6), or use a "
        "number of ranks that divides 4: 1, 2, 4")


def test_an_unknown_attribute_or_argument_is_named_with_the_nearest() -> None:
    assert refusal(without(attention=Region(divide=("head",)))).startswith(
        "blocks.0.attention: Region: Attention has no whole number 'head' to divide; did you mean 'heads'?")
    assert refusal(without(mlp=Region(enter="hidden"))).startswith(
        "blocks.0.mlp: Gated.forward has no argument 'hidden'. It has x")


def test_a_kind_that_does_not_fit_its_module_is_refused() -> None:
    assert refusal(without(head=Vocabulary())) == "head: Linear is no nn.Embedding"
    said = refusal(without(**{"blocks.*.drop": Row()}))
    assert said.startswith("blocks.0.drop: Dropout is no linear layer")


def test_a_tied_weight_of_which_one_layer_is_not_sliced_is_refused() -> None:
    assert refusal(without("head")) == (
        "head.weight is tied to a parameter that is sliced, and Linear is not: slice it likewise, untie it, or if it only "
        "holds it: Whole(follows=('weight',))")
    said = refusal(without(head=Row()))
    assert said.startswith("head: a parameter of shape (30, 16) is tied, and sliced in two ways")


def shared() -> Model:
    built = model()
    built.blocks[2] = built.blocks[0]
    return built


def shared_blocks() -> None:
    plain = shared()
    mine = parallelize(copy.deepcopy(plain), world(), Plan(PLAN))
    tokens = torch.randint(WORDS, (2, 8))
    torch.testing.assert_close(mine(tokens), plain(tokens))
    assert mine.blocks[2].mlp.up is mine.blocks[0].mlp.up


def test_a_module_in_two_places_is_cut_once() -> None:
    run_ranks(2, shared_blocks)


def twice() -> str:
    mine = parallelize(model(), world(), Plan(PLAN))
    with pytest.raises(UsageError) as caught:
        parallelize(mine, world(), Plan(PLAN))
    return str(caught.value)


def test_a_model_is_cut_once() -> None:
    assert run_ranks(2, twice) == ["embed: VocabularyEmbedding is sliced already; parallelize a model once"] * 2


def different(what: str) -> str:
    torch.manual_seed(1 if what != "weights" else dist.get_rank())
    built, plan = Model(), Plan(PLAN)
    if dist.get_rank() == 1 and what == "plan":
        plan = without(mlp=Region())
    if dist.get_rank() == 1 and what == "model":
        built.blocks.append(Block())
    if dist.get_rank() == 1 and what == "none":
        plan = None
    with pytest.raises(RanksDisagree) as caught:
        parallelize(built, world(), plan)
    return str(caught.value)


@pytest.mark.parametrize(("what", "said"), [
    ("plan", "rank 0 has 'mlp': Region(divide=(), enter='x', dropout=False); rank 1 has 'mlp': Region(divide=(), "
             "enter=None, dropout=False)"),
    ("model", "rank 0 has module 'norm': LayerNorm; rank 1 has module 'blocks.3': Block"),
    ("weights", "rank 0 has 'embed.weight': (30, 16) torch.float32, bits that sum to "),
    ("none", "rank 0 has sequence_dim None; rank 1 has parallelize: Model is no model of Hugging Face transformers"),
])  # fmt: skip
def test_ranks_that_begin_differently_all_say_where(what: str, said: str) -> None:
    for found in run_ranks(2, different, what):
        assert found.startswith(f"parallelize: the tensor ranks begin with different plans or models: {said}"), found


def planless() -> str:
    with pytest.raises(UsageError) as caught:
        parallelize(model(), world())
    return str(caught.value)


def test_a_model_of_ones_own_needs_a_plan() -> None:
    said = run_ranks(1, planless)[0]
    assert said.startswith("parallelize: Model is no model of Hugging Face transformers; give it a plan")


def sequences() -> str:
    with pytest.raises(UsageError) as caught:
        parallelize(model(), world(), Plan(PLAN), sequence_parallel=True)
    return str(caught.value)


def test_a_custom_plan_says_where_sequences_are_split() -> None:
    assert run_ranks(1, sequences)[0].startswith("parallelize: sequence_parallel is for plans that the library finds")
