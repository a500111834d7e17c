"""A budget of saved tensors is never exceeded, and none that can be kept within it is recomputed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import shoal
from shoal.activation import RecomputeMode
from shoal.activation.budget import BlockBytes, choose, peak
from shoal.errors import ConfigError
from shoal.testing import run_ranks

from .test_activations import BLOCKS, ROWS, WIDTH, Block

MEGABYTE = 1 << 20


@st.composite
def _blocks(draw: st.DrawFn) -> list[BlockBytes]:
    found: list[BlockBytes] = []
    for _ in range(draw(st.integers(1, 8))):
        inputs, selective, kept = sorted(draw(st.lists(st.integers(1, 1000), min_size=3, max_size=3)))
        found.append(BlockBytes(inputs=inputs, selective=selective, kept=kept))
    return found


@given(_blocks(), st.integers(0, 1000), st.integers(1, 9000))
def test_the_peak_of_a_choice_is_within_the_budget(blocks: list[BlockBytes], outside: int, budget: int) -> None:
    choice = choose(blocks, outside, budget)
    if choice is None:
        assert peak(blocks, [RecomputeMode.FULL] * len(blocks), outside) > budget
        return
    assert peak(blocks, choice, outside) <= budget
    for index, recompute in enumerate(choice):  # and none can recompute less
        if recompute is not RecomputeMode.NONE:
            assert peak(blocks, [*choice[:index], RecomputeMode.NONE, *choice[index + 1:]], outside) > budget


def test_the_peak_counts_a_block_that_is_recomputed_beside_earlier_ones() -> None:
    block = BlockBytes(inputs=1, selective=3, kept=10)
    assert peak([block] * 3, [RecomputeMode.FULL] * 3, 5) == 5 + 2 + 10
    assert peak([block] * 3, [RecomputeMode.FULL, RecomputeMode.FULL, RecomputeMode.NONE], 5) == 5 + 2 + 10
    assert peak([block] * 3, [RecomputeMode.NONE] * 3, 5) == 5 + 30


def _trained(section: dict[str, Any], rows: tuple[int, ...] = (ROWS, ROWS, ROWS)) -> tuple[list[float], list[str], int]:
    torch.manual_seed(0)
    engine = shoal.initialize(model=nn.Sequential(*[Block() for _ in range(2 * BLOCKS)], nn.Linear(WIDTH, 8)), config={
        "train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}, "log_level": "error",
        "activation_checkpointing": section})[0]
    losses: list[float] = []
    for count in rows:
        loss = engine(torch.randn(count, WIDTH)).square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    budget = None if engine.activations is None else engine.activations.budget
    engine.destroy()
    return (losses, [], 0) if budget is None else (losses, [each.value for each in budget.choice], budget.expected)


@pytest.mark.parametrize("ranks", [1, 2])
def test_blocks_recompute_as_little_as_the_budget_allows(ranks: int) -> None:
    plain = run_ranks(ranks, _trained, {})
    shares: list[int] = []
    for budget in ("2.5MB", "4MB", "1GB"):
        found = run_ranks(ranks, _trained, {"budget": budget})
        assert [each[0] for each in found] == [each[0] for each in plain]
        choice, expected = found[0][1], found[0][2]
        shares.append(choice.count("none"))
        assert expected <= {"2.5MB": 2_500_000, "4MB": 4_000_000, "1GB": 10**9}[budget]
        assert all(each[1] == choice for each in found)
    assert shares[0] < shares[-1] == 2 * BLOCKS
    assert sorted(shares) == shares


def test_a_larger_batch_recomputes_more() -> None:
    (_, same, _), = run_ranks(1, _trained, {"budget": "4MB"})
    (_, grown, expected), = run_ranks(1, _trained, {"budget": "4MB"}, rows=(ROWS, ROWS, 2 * ROWS, ROWS))
    assert grown.count("none") < same.count("none") and expected <= 4_000_000


def test_too_small_a_budget_names_the_least() -> None:
    with pytest.raises(AssertionError, match=r"budget: got 70,000 bytes; with every block recomputed"):
        run_ranks(1, _trained, {"budget": 70_000})


@pytest.mark.parametrize(("section", "message"), [
    ({"budget": "12 lots"}, "budget"),
    ({"budget": 0}, "budget"),
    ({"budget": "1GB", "recompute": "full"}, "the budget chooses what is recomputed"),
])
def test_bad_budgets_are_refused(section: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        shoal.initialize(model=nn.Linear(2, 2), config={"train_batch_size": 1, "activation_checkpointing": section})


@pytest.mark.parametrize(("text", "size"), [("12GB", 12 * 10**9), ("512MiB", 512 * MEGABYTE), ("1.5kb", 1500), (70, 70)])
def test_sizes_are_bytes_or_texts_with_a_unit(text: object, size: int) -> None:
    from shoal.activation import ActivationSettings

    assert ActivationSettings.model_validate({"budget": text}).budget == size
