"""Some rows of a layout give the rows of the whole: output, gradients and what is dropped, on every backend."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from shoal.attention import BigBirdSparsityConfig, Blocks, attend

BLOCK, LENGTH = 16, 160
ROWS = range(4, 9)


def blocks_of(heads: int) -> Blocks:
    structure = BigBirdSparsityConfig(heads, BLOCK, different_layout_per_head=heads > 1, num_random_blocks=2)
    return structure.blocks(LENGTH, causal=True)


def operands(length: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(2, heads, each, 16, generator=generator, requires_grad=True)
            for heads, each in ((4, length), (2, LENGTH), (2, LENGTH))]


@pytest.mark.parametrize("backend", ["reference", "gather", "native"])
@pytest.mark.parametrize("heads", [1, 4])
@pytest.mark.parametrize("dropout", [0.0, 0.4])
def test_rows_of_a_part_are_those_of_the_whole(backend: Any, heads: int, dropout: float) -> None:
    blocks = blocks_of(heads)
    query, key, value = operands(LENGTH)
    bias = torch.randn(1, 4, LENGTH, LENGTH, generator=torch.Generator().manual_seed(1)).requires_grad_()
    padding = torch.ones(2, LENGTH, dtype=torch.bool)
    padding[0, :40] = False
    options: Any = {"causal": True, "dropout": dropout, "seed": 3, "backend": backend, "key_padding": padding}
    places = slice(ROWS.start * BLOCK, ROWS.stop * BLOCK)
    whole = attend(query, key, value, blocks, bias=bias, **options)[:, :, places]
    part = attend(query[:, :, places], key, value, blocks.part(ROWS, range(blocks.column_blocks)), bias=bias[:, :, places],
                  **options)
    torch.testing.assert_close(part, whole, rtol=1e-5, atol=1e-6)
    upstream = torch.randn(whole.shape, generator=torch.Generator().manual_seed(2))
    for got, expected in zip(*(torch.autograd.grad(each, (query, key, value, bias), upstream) for each in (part, whole)),
                             strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("backend", ["reference", "gather", "native", "flex"])
def test_a_part_may_leave_out_the_first_columns(backend: Any) -> None:
    blocks = blocks_of(1)
    query, key, value = (each.detach() for each in operands(LENGTH))
    rows, columns = slice(ROWS.start * BLOCK, ROWS.stop * BLOCK), slice(3 * BLOCK, 9 * BLOCK)
    seen = torch.zeros(LENGTH, dtype=torch.bool)
    seen[columns] = True
    whole = attend(query, key, value, blocks, causal=True, key_padding=seen.expand(2, -1), backend="reference")
    part = attend(query[:, :, rows], key[:, :, columns], value[:, :, columns], blocks.part(ROWS, range(3, 9)), causal=True,
                  backend=backend)
    torch.testing.assert_close(part, whole[:, :, rows], rtol=1e-5, atol=1e-6)


def test_a_part_of_everything_is_the_layout_and_others_are_made_once() -> None:
    blocks = blocks_of(4)
    assert blocks.part(range(10), range(10)) is blocks
    assert blocks.part(ROWS, range(10)) is blocks.part(ROWS, range(10))


def test_blocks_above_the_diagonal_of_the_whole_are_not_visited() -> None:
    part = Blocks.dense(LENGTH, LENGTH, BLOCK).part(ROWS, range(10))
    assert part.lower.visited == sum(row + 1 for row in ROWS) and part.lower.lower is part.lower
