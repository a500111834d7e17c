"""Which rows there are, who owns them, and when they are worth sending one by one."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from shoal.sparse.row_tables import ROW_COST, Table, changed_rows, summed_duplicates


@pytest.mark.parametrize("columns", [1, 3, 16, 33])
def test_summed_duplicates_are_the_dense_gradient_of_an_embedding_to_the_bit(columns: int) -> None:
    words = torch.randint(40, (8, 30))
    weight, upstream = torch.randn(50, columns), torch.randn(8, 30, columns)
    found = []
    for sparse in (False, True):
        parameter = nn.Parameter(weight.clone())
        (nn.functional.embedding(words, parameter, sparse=sparse) * upstream).sum().backward()
        found.append(parameter.grad)
    dense, sparse = found
    rows, values = summed_duplicates(sparse)
    assert torch.equal(rows, words.unique())
    assert torch.equal(dense[rows], values)


@pytest.mark.parametrize(("dtype", "columns"), [
    (torch.float32, 1), (torch.float32, 7), (torch.float32, 64), (torch.bfloat16, 5), (torch.float16, 48),
    (torch.float64, 3)])
def test_a_row_has_changed_if_any_of_its_bits_has(dtype: torch.dtype, columns: int) -> None:
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


def test_rows_belong_to_the_rank_whose_span_holds_them() -> None:
    table = Table(columns=4, span=10, ranks=3)
    assert table.count_by_owner(torch.tensor([0, 9, 10, 29])).tolist() == [2, 1, 1]
    assert table.count_by_owner(torch.tensor([], dtype=torch.int64)).tolist() == [0, 0, 0]


def test_a_row_travels_with_a_number_of_four_bytes_where_that_is_enough() -> None:
    assert Table(columns=128, span=100_000, ranks=2).row_bytes(torch.float32) == 128 * 4 + 4
    assert Table(columns=128, span=1 << 31, ranks=2).row_bytes(torch.bfloat16) == 128 * 2 + 8


def test_rows_are_preferred_up_to_the_density_at_which_the_whole_is_cheaper() -> None:
    table = Table(columns=64, span=1000, ranks=4)
    most = int(3 * 1000 * 64 * 4 / (ROW_COST * (64 * 4 + 4)))
    assert table.prefers_rows(most, torch.float32)
    assert not table.prefers_rows(most + 1, torch.float32)
    assert table.prefers_rows(0, torch.float32)
