"""Coalescing, changed rows, their owners, and the choice between rows and the dense collective."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from shoal.sparse.row_exchange import ROW_COST, RowTable, changed_rows, coalesced


@pytest.mark.parametrize("columns", [1, 3, 16, 33])
def test_coalesced_rows_are_those_of_the_dense_gradient_bit_for_bit(columns: int) -> None:
    words = torch.randint(40, (8, 30))
    weight, upstream = torch.randn(50, columns), torch.randn(8, 30, columns)
    gradients = []
    for sparse in (False, True):
        parameter = nn.Parameter(weight.clone())
        (nn.functional.embedding(words, parameter, sparse=sparse) * upstream).sum().backward()
        gradients.append(parameter.grad)
    dense, sparse = gradients
    rows, values = coalesced(sparse)
    assert torch.equal(rows, words.unique())
    assert torch.equal(dense[rows], values)


@pytest.mark.parametrize(("dtype", "columns"), [
    (torch.float32, 1), (torch.float32, 7), (torch.float32, 64), (torch.bfloat16, 5), (torch.float16, 48),
    (torch.float64, 3)])
def test_a_row_has_changed_if_any_of_its_bits_differs(dtype: torch.dtype, columns: int) -> None:
    whole = torch.randn(30, columns).to(dtype)
    whole[4] = float("nan")
    now = whole[1:].clone()
    before = now.clone()
    now[0, 0] = -now[0, 0]
    now[9, -1] *= 2
    before[20] = 0.0
    now[20] = -0.0
    assert changed_rows(now, before).tolist() == [0, 9, 20]
    assert changed_rows(whole[1:], whole[1:].clone()).tolist() == []


def test_a_row_is_owned_by_the_rank_whose_shard_holds_it() -> None:
    table = RowTable(columns=4, rows_per_rank=10, ranks=3)
    assert table.count_by_owner(torch.tensor([0, 9, 10, 29])).tolist() == [2, 1, 1]
    assert table.count_by_owner(torch.tensor([], dtype=torch.int64)).tolist() == [0, 0, 0]


def test_a_row_number_takes_four_bytes_if_they_suffice() -> None:
    assert RowTable(columns=128, rows_per_rank=100_000, ranks=2).row_bytes(torch.float32) == 128 * 4 + 4
    assert RowTable(columns=128, rows_per_rank=1 << 31, ranks=2).row_bytes(torch.bfloat16) == 128 * 2 + 8


def test_rows_are_preferred_up_to_the_break_even_density() -> None:
    table = RowTable(columns=64, rows_per_rank=1000, ranks=4)
    most = int(3 * 1000 * 64 * 4 / (ROW_COST * (64 * 4 + 4)))
    assert table.prefers_rows(most, torch.float32)
    assert not table.prefers_rows(most + 1, torch.float32)
    assert table.prefers_rows(0, torch.float32)
