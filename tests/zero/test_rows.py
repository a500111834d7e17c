"""With sparse_gradients training gives the same bits, and ranks exchange only the rows that a step touches."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import shoal
from shoal.testing import run_ranks
from shoal.transport.collectives import traffic

from .embedding_models import (
    COLUMNS,
    ROW,
    TAKEN,
    WORDS,
    Alone,
    Shared,
    Tied,
    Towers,
    beside_dense,
    differing,
    half,
    some,
    train,
)


def of_all_kinds(stage: int) -> dict[str, list[str]]:
    cases: dict[str, dict[str, Any]] = {
        "plain": {}, "accumulated": {"gradient_accumulation_steps": 3}, "Adam": {"optimizer": "Adam", "steps": 4},
        "bf16": {"bf16": {"enabled": True}, "gradient_accumulation_steps": 2},
        "bf16, reduced in fp32": {"bf16": {"enabled": True}, "communication_data_type": "fp32",
                                  "data_types": {"grad_accum_dtype": "fp32"}},
        "without overlap": {"zero": {"overlap_comm": False}},
    }
    return {name: beside_dense(Towers, stage, **case)[0] for name, case in cases.items()}


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("stage", range(4))
def test_row_gradients_give_the_bits_of_dense_gradients(stage: int, ranks: int) -> None:
    for rank, differ in enumerate(run_ranks(ranks, of_all_kinds, stage)):
        assert all(names == [] for names in differ.values()), (rank, differ)


def beside_embeddings_with_dense_gradients(stage: int) -> list[str]:
    rows, sent = train(Towers, stage, True, gradient_clipping=0.0)
    assert sent["reduce rows"] > 0
    return differing(rows, train(lambda: Towers(sparse=False), stage, False, gradient_clipping=0.0)[0])


@pytest.mark.parametrize("stage", range(4))
def test_sparse_embeddings_give_the_bits_of_dense_embeddings(stage: int) -> None:
    assert run_ranks(2, beside_embeddings_with_dense_gradients, stage) == [[], []]


def shared_or_tied(stage: int) -> dict[str, list[str]]:
    return {name: beside_dense(model, stage, gradient_accumulation_steps=2)[0]
            for name, model in (("tied", lambda: Tied(by_hand=False)), ("by hand", lambda: Tied(by_hand=True)),
                                ("shared", Shared))}


@pytest.mark.parametrize("stage", range(4))
def test_weights_that_several_modules_use_train_the_same(stage: int) -> None:
    assert run_ranks(2, shared_or_tied, stage)[0] == {"tied": [], "by hand": [], "shared": []}


# Bytes


def counted(stage: int, optimizer: str) -> tuple[int, list[int], dict[str, int], dict[str, int]]:
    """Return this rank, the rows that each rank touches, the bytes of steps 2 and 3, and of step 1."""
    one = train(Alone, stage, True, steps=1, optimizer=optimizer)[1]
    three = train(Alone, stage, True, steps=3, optimizer=optimizer)[1]
    touched = [some(step, 0).unique().tolist() for step in (1, 2)]
    return dist.get_rank(), touched, {kind: three[kind] - one.get(kind, 0) for kind in three}, one


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("stage", range(4))
def test_bytes_sent_are_those_of_the_touched_rows(stage: int, ranks: int) -> None:
    found = run_ranks(ranks, counted, stage, "SGD")
    span = -(-WORDS * COLUMNS // (ranks * 48)) * 48 // COLUMNS
    touched = [each[1] for each in found]
    for rank, _, sent, first in found:
        own = range(rank * span, (rank + 1) * span)
        others = sum(row not in own for step in (0, 1) for row in touched[rank][step])
        summed = sum(len({row for each in touched for row in each[step] if row in own}) for step in (0, 1))
        asked = sum(row in own for each in touched[:rank] + touched[rank + 1:] for step in (0, 1) for row in each[step])
        assert sent["reduce rows"] == others * ROW
        assert sent.get("replicate rows", 0) == (summed * (ranks - 1) * ROW if stage == 0 else 0)
        assert sent.get("publish rows", 0) == (summed * (ranks - 1) * ROW if stage in (1, 2) else 0)  # SGD changes no other
        assert sent.get("gather rows", 0) == (others * 4 + asked * 4 * COLUMNS if stage == 3 else 0)
        assert all(sent.get(kind, 0) == 0 for kind in ("reduce", "replicate", "publish", "gather"))
        assert first.get("publish", 0) == (span * COLUMNS * 4 * (ranks - 1) if stage in (1, 2) else 0)  # once, the whole


def nothing_touched(stage: int) -> tuple[list[str], dict[str, int]]:
    def words(step: int, micro: int) -> Tensor:
        return some(step, micro)[:, :0 if dist.get_rank() else TAKEN]

    return beside_dense(Alone, stage, words=words)


@pytest.mark.parametrize("stage", range(4))
def test_a_rank_that_touches_no_row_sends_none(stage: int) -> None:
    first, second = run_ranks(2, nothing_touched, stage)
    assert first[0] == second[0] == []
    assert second[1]["reduce rows"] == 0 < first[1]["reduce rows"]


@pytest.mark.parametrize("stage", range(4))
def test_a_mostly_touched_embedding_is_reduced_whole(stage: int) -> None:
    differ, sent = run_ranks(2, beside_dense, Alone, stage, words=half)[0]
    assert differ == []
    assert "reduce rows" not in sent
    assert "replicate rows" not in sent
    assert "publish rows" not in sent
    assert sent["reduce"] == 3 * (WORDS + 8) // 2 * COLUMNS * 4 or sent["reduce"] == 3 * WORDS // 2 * COLUMNS * 4


def publications(optimizer: str) -> list[int]:
    """Return how often each step compared published weights, with an optimizer that changes all weights."""
    torch.manual_seed(0)
    engine = shoal.initialize(model=Alone(), config={
        "train_micro_batch_size_per_gpu": 3, "sparse_gradients": True, "zero_optimization": {"stage": 1},
        "optimizer": {"type": optimizer, "params": {"lr": 0.05, "weight_decay": 0.1}}})[0]
    marks: list[int] = []
    for step in range(12):
        engine.backward(engine(some(step, 0)).pow(2).sum())
        engine.step()
        marks.append(traffic.calls["words"])
    return [after - before for before, after in pairwise(marks)]


def test_publishing_compares_rows_less_often_where_all_change() -> None:
    assert run_ranks(2, publications, "AdamW")[0] == [3, 2, 3, 2, 2, 2, 3, 2, 2, 2, 2]
