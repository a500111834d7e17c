"""Attention over a split sequence is that of one rank, output and gradients, and sends the bytes of the formulas."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from shoal.attention import (
    BigBirdSparsityConfig,
    Blocks,
    BSLongformerSparsityConfig,
    FixedSparsityConfig,
    LocalSlidingWindowSparsityConfig,
    attend,
)
from shoal.errors import NotServed, RanksDisagree, UsageError
from shoal.recording import traffic
from shoal.sequence_parallel import SequenceAxis, attend_sequence, block_plan, exchange_heads, heads_plan
from shoal.testing import run_ranks

BLOCK, LENGTH, DIM, BATCH = 16, 192, 16, 2


def per_head(heads: int) -> Blocks:
    layout = torch.rand(heads, LENGTH // BLOCK, LENGTH // BLOCK, generator=torch.Generator().manual_seed(1)) < 0.15
    layout[:, 3] = True  # a global row
    layout[1, 7], layout[0, 10] = True, False  # of one head; a row that sees nothing
    return Blocks.of(layout, BLOCK)


LAYOUTS = {
    "dense": lambda heads: None,
    "ones": lambda heads: Blocks.dense(LENGTH, LENGTH, BLOCK),
    "window": lambda heads: LocalSlidingWindowSparsityConfig(heads, BLOCK, num_sliding_window_blocks=3).blocks(LENGTH),
    "bigbird": lambda heads: BigBirdSparsityConfig(heads, BLOCK).blocks(LENGTH),
    "longformer": lambda heads: BSLongformerSparsityConfig(heads, BLOCK, global_block_indices=[0, 7]).blocks(LENGTH),
    "fixed": lambda heads: FixedSparsityConfig(heads, BLOCK).blocks(LENGTH),
    "each head its own": per_head,
}


@dataclass(frozen=True)
class Case:
    """One attention, given by numbers, so that every rank and one rank alone make it alike."""

    layout: str
    heads: int = 4
    kv_heads: int = 4
    value_dim: int = DIM
    causal: bool = False
    padded: bool = False
    dropout: float = 0.0
    dtype: torch.dtype = torch.float32
    exchange: Any = "auto"
    backend: Any = "auto"
    least: bool = False
    """Whether padding is added as the least number of fp32, and hides all of the last sample."""
    masked: bool = False
    """Whether there is a mask of each query and key, and a bias of each head, which has a gradient."""

    def blocks(self) -> Blocks | None:
        return LAYOUTS[self.layout](self.heads)

    def operands(self) -> list[Tensor]:
        generator = torch.Generator().manual_seed(3)
        shapes = ((self.heads, DIM), (self.kv_heads, DIM), (self.kv_heads, self.value_dim), (self.heads, self.value_dim))
        return [torch.randn(BATCH, heads, LENGTH, dim, generator=generator).to(self.dtype) for heads, dim in shapes]

    def bias(self) -> Tensor | None:
        generator = torch.Generator().manual_seed(4)
        return torch.randn(self.heads, LENGTH, LENGTH, generator=generator).requires_grad_() if self.masked else None

    def options(self) -> dict[str, Any]:
        mask = (torch.arange(LENGTH)[:, None] * 7 + torch.arange(LENGTH)) % 5 > 0 if self.masked else None
        padding = torch.ones(BATCH, LENGTH, dtype=torch.bool)
        padding[0, -40:] = False
        padding[1, :20] = False
        added = torch.zeros(BATCH, LENGTH).masked_fill(~padding, torch.finfo(torch.float32).min)
        added[-1] = torch.finfo(torch.float32).min
        padding = added if self.least else padding if self.padded else None
        return {"causal": self.causal, "key_padding": padding, "dropout": self.dropout, "seed": 11,
                "mask": mask, "backend": self.backend}


@cache
def whole(case: Case) -> list[Tensor]:
    """Return output and gradients of one rank."""
    query, key, value, gradient = case.operands()
    leaves = [each.requires_grad_() for each in (query, key, value)]
    blocks = case.blocks() or Blocks.dense(LENGTH, LENGTH, 64)
    bias = case.bias()
    attend(*leaves, blocks, bias=bias, **case.options()).backward(gradient)
    output = attend(*leaves, blocks, bias=bias, **case.options()).detach()
    return [output, *(each.grad for each in leaves if each.grad is not None),
            *([] if bias is None or bias.grad is None else [bias.grad])]


def split(cases: list[Case]) -> list[list[Tensor]]:
    """Return for each case the outputs and gradients of this rank's part, after a check of the bytes."""
    axis = SequenceAxis(dist.group.WORLD)
    mine = axis.part(LENGTH)
    results: list[list[Tensor]] = []
    for case in cases:
        query, key, value, gradient = (each[:, :, mine] for each in case.operands())
        leaves = [each.clone().requires_grad_() for each in (query, key, value)]
        blocks = case.blocks()
        before = traffic.bytes_sent
        bias = case.bias()
        output = attend_sequence(*leaves, axis, blocks, exchange=case.exchange, bias=bias, **case.options())
        forward = traffic.bytes_sent - before
        output.backward(gradient)
        both = traffic.bytes_sent - before
        results.append([output.detach(), *(each.grad for each in leaves if each.grad is not None),
                        *([] if bias is None else [torch.zeros_like(bias) if bias.grad is None else bias.grad]),
                        torch.tensor([forward, both - forward])])
    return results


CASES = [
    *(Case(layout, exchange=exchange) for layout in LAYOUTS for exchange in ("heads", "blocks")
      if not (layout == "dense" and exchange == "blocks")),
    *(Case(layout, 6, 2, causal=True, padded=True, dropout=0.2, exchange=exchange)
      for layout in ("ones", "bigbird", "each head its own") for exchange in ("heads", "blocks")),
    *(Case(layout, 6, 3, padded=True, dropout=0.1, exchange="blocks", backend="gather")
      for layout in ("bigbird", "each head its own")),
    *(Case(layout, least=True, exchange=exchange, backend=backend)
      for layout in ("longformer", "each head its own") for exchange, backend in (("heads", "auto"), ("blocks", "gather"))),
    Case("dense", 3, 1, causal=True, padded=True, dropout=0.3),
    *(Case("bigbird", 6, 2, value_dim=5, exchange=exchange) for exchange in ("heads", "blocks")),
    Case("dense", value_dim=24, causal=True), Case("dense", 1, 1),
    Case("longformer", 5, 5, dtype=torch.bfloat16, exchange="blocks"),
    Case("longformer", 5, 1, dtype=torch.bfloat16, exchange="heads"),
    Case("window", causal=True), Case("bigbird", padded=True),
    Case("bigbird", 5, 5, masked=True, padded=True), Case("dense", 3, 1, masked=True, causal=True, dropout=0.2),
]  # fmt: skip


@cache
def computed(ranks: int) -> list[list[list[Tensor]]]:
    return run_ranks(ranks, split, CASES)


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_split_attention_is_that_of_one_rank(ranks: int) -> None:
    by_rank = computed(ranks)
    for number, case in enumerate(CASES):
        tolerance = 4e-2 if case.dtype == torch.bfloat16 else 2e-5
        for index, expected in enumerate(whole(case)):
            parts = [results[number][index] for results in by_rank]  # rows of each rank; of the bias, the heads of each
            got = torch.cat(parts, dim=2) if index < 4 else torch.stack(parts).sum(0)
            torch.testing.assert_close(got, expected, rtol=0, atol=tolerance * float(expected.float().abs().max()),
                                       msg=lambda text, case=case, index=index: f"{case}, tensor {index}: {text}")


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_the_bytes_sent_are_those_of_the_formula(ranks: int) -> None:
    by_rank = computed(ranks)
    for number, case in enumerate(CASES):
        for rank, results in enumerate(by_rank if case.exchange != "auto" else ()):
            size = case.dtype.itemsize
            blocks = case.blocks()
            if case.exchange == "blocks":
                assert blocks is not None
                plan = block_plan(blocks.lower if case.causal else blocks, case.heads, case.kv_heads, rank, ranks)
                sent = plan.sent_bytes(BATCH, DIM, case.value_dim, size)
            else:
                heads = heads_plan(case.heads, case.kv_heads, rank, ranks)
                sent = heads.sent_bytes(BATCH, LENGTH // ranks, DIM, case.value_dim, size)
            assert results[number][-1].tolist() == [sent.forward, sent.backward], (case, rank)


def through_checkpoints(heads: int, reentrant: bool) -> Tensor:
    """Return the gradient of a whole input of projections and attention, computed again in backward."""
    axis = SequenceAxis(dist.group.WORLD)
    torch.manual_seed(5)
    projection = torch.nn.Linear(heads * DIM, 3 * heads * DIM)

    def block(rows: Tensor) -> Tensor:
        parts = projection(rows).chunk(3, -1)
        return attend_sequence(*(part.unflatten(-1, (heads, DIM)).transpose(1, 2) for part in parts), axis, causal=True)

    whole = torch.randn(BATCH, LENGTH, heads * DIM)
    rows = whole[:, axis.part(LENGTH)].clone().requires_grad_()
    checkpoint(block, rows, use_reentrant=reentrant).square().sum().backward()
    assert rows.grad is not None
    return rows.grad


@pytest.mark.parametrize("reentrant", [False, True])
def test_ranks_without_heads_take_part_in_the_recomputation(reentrant: bool) -> None:
    by_rank = run_ranks(3, through_checkpoints, 1, reentrant)
    alone, = run_ranks(1, through_checkpoints, 1, reentrant)
    torch.testing.assert_close(torch.cat(by_rank, 1), alone, rtol=1e-5, atol=1e-5)


def gradient_of_the_bias_alone(heads: int) -> Tensor:
    axis = SequenceAxis(dist.group.WORLD)
    case = Case("dense", heads, heads, masked=True)
    query, key, value, gradient = (each[:, :, axis.part(LENGTH)] for each in case.operands())
    bias = case.bias()
    assert bias is not None
    attend_sequence(query, key, value, axis, bias=bias).backward(gradient)
    assert bias.grad is not None
    return bias.grad


def test_a_bias_learns_alone_also_on_ranks_without_heads() -> None:
    by_rank = run_ranks(3, gradient_of_the_bias_alone, 2)
    alone, = run_ranks(1, gradient_of_the_bias_alone, 2)
    torch.testing.assert_close(torch.stack(by_rank).sum(0), alone, rtol=1e-5, atol=1e-5)


def errors(calls: dict[str, Callable[..., object]]) -> dict[str, str]:
    """Return what each call raises on this rank, given the rank and its axis."""
    axis = SequenceAxis(dist.group.WORLD)
    said: dict[str, str] = {}
    for name, call in calls.items():
        try:
            call(axis.rank, axis)
        except (UsageError, RanksDisagree) as error:
            said[name] = str(error)
    return said


def zeros(heads: int = 2, length: int = 64, dim: int = 16, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.zeros(1, heads, length, dim, dtype=dtype)


def lengths_differ(rank: int, axis: SequenceAxis) -> None:
    attend_sequence(*[zeros(length=64 + 16 * rank)] * 3, axis)


def layouts_differ(rank: int, axis: SequenceAxis) -> None:
    layout = torch.eye(8, dtype=torch.bool)[None]
    layout[0, 0, 3] = bool(rank)
    attend_sequence(*[zeros()] * 3, axis, Blocks.of(layout, 16), exchange="blocks")


def layouts_of_heads_differ(rank: int, axis: SequenceAxis) -> None:
    layout = torch.eye(8, dtype=torch.bool)[None]
    layout[0, 0, 3] = bool(rank)
    attend_sequence(*[zeros()] * 3, axis, Blocks.of(layout, 16), exchange="heads")


def heads_differ(rank: int, axis: SequenceAxis) -> None:
    attend_sequence(*[zeros(heads=2 + rank)] * 3, axis)


def key_heads(rank: int, axis: SequenceAxis) -> None:
    attend_sequence(zeros(3), zeros(2), zeros(2), axis)


def no_dims(rank: int, axis: SequenceAxis) -> None:
    attend_sequence(*[zeros(dim=0)] * 3, axis)


def infinite_scale(rank: int, axis: SequenceAxis) -> None:
    attend_sequence(*[zeros()] * 3, axis, Blocks.dense(128, 128, 16), exchange="blocks", scale=float("inf"))


def wide_dropout(rank: int, axis: SequenceAxis) -> None:
    attend_sequence(*[zeros()] * 3, axis, Blocks.dense(128, 128, 16), exchange="blocks", dropout=1.5)


def float64(rank: int, axis: SequenceAxis) -> None:
    attend_sequence(*[zeros(dtype=torch.float64)] * 3, axis, Blocks.dense(128, 128, 16), exchange="blocks")


def fraction_as_seed(rank: int, axis: SequenceAxis) -> None:
    seed: Any = 1.5
    attend_sequence(*[zeros()] * 3, axis, Blocks.dense(128, 128, 16), exchange="blocks", dropout=0.1, seed=seed)


def a_layout_itself(rank: int, axis: SequenceAxis) -> None:
    layout: Any = torch.ones(1, 8, 8)
    attend_sequence(*[zeros()] * 3, axis, layout)


def three_dims(rank: int, axis: SequenceAxis) -> None:
    attend_sequence(zeros()[0], zeros(), zeros(), axis)


def dtypes(rank: int, axis: SequenceAxis) -> None:
    attend_sequence(zeros(), zeros(), zeros(dtype=torch.bfloat16), axis)


def local_layout(rank: int, axis: SequenceAxis) -> None:
    attend_sequence(*[zeros()] * 3, axis, Blocks.dense(64, 64, 16))


def layout_heads(rank: int, axis: SequenceAxis) -> None:
    layout = torch.eye(8, dtype=torch.bool).repeat(3, 1, 1)
    layout[0, 0, 3] = True
    attend_sequence(*[zeros()] * 3, axis, Blocks.of(layout, 16))


def no_layout(rank: int, axis: SequenceAxis) -> None:
    attend_sequence(*[zeros()] * 3, axis, exchange="blocks")


def odd_blocks(rank: int, axis: SequenceAxis) -> None:
    attend_sequence(*[zeros(length=40)] * 3, axis, Blocks.dense(80, 80, 16), exchange="blocks")


def unknown_exchange(rank: int, axis: SequenceAxis) -> None:
    attend_sequence(*[zeros()] * 3, axis, exchange="ring")  # pyright: ignore[reportArgumentType]


def odd_length(rank: int, axis: SequenceAxis) -> None:
    axis.part(63)


def oracle(rank: int, axis: SequenceAxis) -> None:
    attend_sequence(*[zeros()] * 3, axis, Blocks.dense(128, 128, 16), exchange="blocks", backend="reference")


def a_mask_and_blocks(rank: int, axis: SequenceAxis) -> None:
    attend_sequence(*[zeros()] * 3, axis, Blocks.dense(128, 128, 16), exchange="blocks", mask=torch.ones(128, 128))


def other_heads_of_a_bias(rank: int, axis: SequenceAxis) -> None:
    attend_sequence(*[zeros()] * 3, axis, bias=torch.ones(3, 128, 128))


def half_a_mask(rank: int, axis: SequenceAxis) -> None:
    attend_sequence(*[zeros()] * 3, axis, Blocks.dense(128, 128, 16), exchange="blocks", key_padding=torch.ones(1, 64))


def seen_as_whole_numbers(rank: int, axis: SequenceAxis) -> None:
    attend_sequence(*[zeros(length=25)] * 3, axis, key_padding=torch.ones(1, 50, dtype=torch.int64))


def an_odd_mask_of_less(rank: int, axis: SequenceAxis) -> None:
    attend_sequence(*[zeros(length=25)] * 3, axis, mask=torch.ones(49, 49, dtype=torch.bool))


def an_odd_bias_of_less(rank: int, axis: SequenceAxis) -> None:
    attend_sequence(*[zeros(length=25)] * 3, axis, bias=torch.zeros(49, 49))


def a_list_as_bias(rank: int, axis: SequenceAxis) -> None:
    attend_sequence(*[zeros()] * 3, axis, bias=[[0.0]])  # pyright: ignore[reportArgumentType]


def an_array_as_key(rank: int, axis: SequenceAxis) -> None:
    attend_sequence(zeros(), zeros().numpy(), zeros(), axis)  # pyright: ignore[reportArgumentType]


def half_a_head(rank: int, axis: SequenceAxis) -> None:
    attend_sequence(*[zeros()] * 3, axis, first_head=0.5)  # pyright: ignore[reportArgumentType]


WRONG: dict[str, tuple[Callable[..., object], str]] = {
    "lengths differ": (lengths_differ, "rank 1 has heads exchanged: query (1, 2, 80, 16)"),
    "layouts differ": (layouts_differ, "give every rank an equal part of the sequence (split_batch), and the same layout"),
    "layouts of heads differ": (layouts_of_heads_differ, "float32, layout"),
    "heads differ": (heads_differ, "rank 1 has heads exchanged: query (1, 3, 64, 16)"),
    "key heads": (key_heads, "the heads of keys divide those of the query"),
    "no dims": (no_dims, "none of them 0; got query (1, 2, 64, 0)"),
    "an infinite scale": (infinite_scale, "scale is a finite number of fp32; got inf"),
    "dropout above 1": (wide_dropout, "dropout is a probability, at least 0 and below 1; got 1.5"),
    "float64": (float64, "operands are float32, bfloat16 or float16; got torch.float64"),
    "a fraction as seed": (fraction_as_seed, "seed is a whole number, or None; got 1.5"),
    "a layout itself": (a_layout_itself, "of class Blocks; got Tensor: give Blocks.of(layout, block)"),
    "three dims": (three_dims, "operands are (batches, heads, positions of this rank, dim)"),
    "dtypes": (dtypes, "one dtype, and one device; got torch.float32 on cpu, torch.float32 on cpu, torch.bfloat16"),
    "the layout of one part": (local_layout, "make the layout for length 128"),
    "the layout of other heads": (layout_heads, "make a layout with 1 or 2 heads"),
    "no layout": (no_layout, "exchange='blocks' needs a layout"),
    "odd blocks": (odd_blocks, "2 ranks do not divide 5 blocks of 16; pad the sequence to a multiple of 32"),
    "unknown exchange": (unknown_exchange, "exchange is one of auto, heads, blocks; got 'ring'"),
    "odd length": (odd_length, "length 63 is not divided by the 2 sequence ranks; pad it to 64"),
    "the oracle": (oracle, "choose among auto, gather, native, triton on a sequence axis"),
    "a mask and blocks": (a_mask_and_blocks, "leave exchange out, or take exchange='heads'"),
    "other heads of a bias": (other_heads_of_a_bias, "give a bias of 1 or 2 heads"),
    "a list as bias": (a_list_as_bias, "attend_sequence: bias is a tensor of the whole sequence; got list"),
    "an array as key": (an_array_as_key, "attend_sequence: key is a tensor (batches, heads, length, dim); got ndarray"),
    "half a head": (half_a_head, "attend_sequence: first_head is the number of a head, from 0; got 0.5"),
    "seen as whole numbers": (seen_as_whole_numbers, "key_padding has whole numbers above 0 (torch.int64), which mode"),
    "odd mask of less": (an_odd_mask_of_less, "mask is (length, kv_length), here (50, 50); got (49, 49)"),
    "odd bias of less": (an_odd_bias_of_less, "bias ends with (length, length), here (50, 50); got (49, 49)"),
    "half a mask": (half_a_mask, "key_padding is (batches, kv_length), here (1, 128); got (1, 64)"),
}  # fmt: skip


def test_bad_input_is_refused_on_every_rank() -> None:
    for said in run_ranks(2, errors, {name: call for name, (call, _) in WRONG.items()}):
        for name, (_, text) in WRONG.items():
            assert text in said.get(name, "nothing"), (name, said.get(name))


def test_a_window_fetches_two_blocks_of_a_thousand() -> None:
    blocks = LocalSlidingWindowSparsityConfig(1, 64, num_sliding_window_blocks=3, attention="bidirectional").blocks(65536)
    plans = [block_plan(blocks, 8, 8, rank, 4) for rank in range(4)]
    assert [plan.fetched for plan in plans] == [1, 2, 2, 1] and not plans[0].splits
    assert plans[1].sent_bytes(1, 64, 64, 4).forward == 2 * 64 * 8 * 2 * 64 * 4  # two blocks, 8 heads, keys and values


def test_a_global_row_is_split_and_its_column_fetched_once() -> None:
    blocks = BigBirdSparsityConfig(1, 64, num_random_blocks=0).blocks(65536)
    plans = [block_plan(blocks, 8, 8, rank, 4) for rank in range(4)]
    assert [plan.foreign for plan in plans] == [0, 1, 1, 1]  # the first row of all
    assert [plan.fetched for plan in plans] == [1, 3, 3, 2]  # neighbours, and the first column


def with_whole_numbers() -> list[Tensor]:
    axis = SequenceAxis(dist.group.WORLD)
    query, key, value = torch.randn(3, 2, 2, 25, 16, generator=torch.Generator().manual_seed(axis.rank))
    seen = torch.rand(2, 50, generator=torch.Generator().manual_seed(7)) < 0.7
    return [attend_sequence(query, key, value, axis, key_padding=each)
            for each in (seen, torch.where(seen, 0, -100000), torch.where(seen, 0.0, -torch.inf))]


def test_padding_of_whole_numbers_hides_at_any_length() -> None:
    for plain, *others in run_ranks(2, with_whole_numbers):
        for other in others:
            torch.testing.assert_close(other, plain)


def no_heads(ranks: int) -> list[Tensor]:
    """Return the gradient of each rank's part where there are fewer heads than ranks."""
    axis = SequenceAxis(dist.group.WORLD)
    leaf = torch.ones(1, 1, 4, 8, requires_grad=True)
    exchange_heads(lambda query, key, value: query + key + value, leaf, leaf, leaf, axis).sum().backward()
    assert leaf.grad is not None
    return [leaf.grad]


def empty_batch() -> list[tuple[int, ...]]:
    axis = SequenceAxis(dist.group.WORLD)
    blocks = LocalSlidingWindowSparsityConfig(2, 16).blocks(64)
    shapes: list[tuple[int, ...]] = []
    for exchange in ("heads", "blocks"):
        operands = [torch.zeros(0, 2, 32, 16, requires_grad=True) for _ in range(3)]
        output = attend_sequence(*operands, axis, blocks, exchange=exchange)
        output.sum().backward()
        assert all(each.grad is not None for each in operands)
        shapes.append(tuple(output.shape))
    return shapes


def test_an_empty_batch_gives_an_empty_part_with_gradients() -> None:
    assert run_ranks(2, empty_batch) == [[(0, 2, 32, 16)] * 2] * 2


def second_derivative() -> str:
    axis = SequenceAxis(dist.group.WORLD)
    query = torch.ones(1, 2, 32, 16, requires_grad=True)
    blocks = LocalSlidingWindowSparsityConfig(2, 16).blocks(64)
    output = attend_sequence(query, query, query, axis, blocks, exchange="blocks")
    with pytest.raises(NotServed) as found:
        torch.autograd.grad(output.sum(), query, create_graph=True)
    return str(found.value)


def test_a_second_derivative_over_ranks_is_refused() -> None:
    for said in run_ranks(2, second_derivative):
        assert "attention over the ranks of a sequence has no second derivative" in said


def test_ranks_without_heads_take_part() -> None:
    assert [bool((gradient == 3).all()) for gradient, in run_ranks(3, no_heads, 3)] == [True] * 3


def on_default_device(device: str, exchange: Any, layout: str) -> Tensor:
    axis = SequenceAxis(dist.group.WORLD)
    leaves = [each[:, :, axis.part(LENGTH)].requires_grad_() for each in Case(layout).operands()[:3]]
    torch.manual_seed(2)
    with torch.device(device):
        output = attend_sequence(*leaves, axis, Case(layout).blocks(), dropout=0.1, exchange=exchange)
        output.backward(leaves[0].detach())
    return torch.stack([output.detach(), *(each.grad for each in leaves if each.grad is not None)])


@pytest.mark.parametrize(("exchange", "layout"), [("heads", "dense"), ("heads", "bigbird"), ("blocks", "bigbird")])
def test_the_default_device_changes_nothing_on_any_rank(exchange: str, layout: str) -> None:
    usual, other = (torch.stack(run_ranks(2, on_default_device, device, exchange, layout)) for device in ("cpu", "meta"))
    assert torch.equal(usual, other)


def under_autocast(exchange: Any) -> Tensor:
    axis = SequenceAxis(dist.group.WORLD)
    query, key, value = (each[:, :, axis.part(LENGTH)] for each in Case("window").operands()[:3])
    with torch.autocast("cpu", torch.bfloat16):
        return attend_sequence(query, key, value.bfloat16(), axis, Case("window").blocks(), exchange=exchange)


@pytest.mark.parametrize("exchange", ["heads", "blocks"])
def test_autocast_takes_operands_of_two_dtypes_on_every_rank(exchange: str) -> None:
    query, key, value = (each.bfloat16() for each in Case("window").operands()[:3])
    blocks = Case("window").blocks()
    assert blocks is not None
    expected = attend(query, key, value, blocks)
    torch.testing.assert_close(torch.cat(run_ranks(2, under_autocast, exchange), 2), expected, rtol=1e-2, atol=1e-2)
