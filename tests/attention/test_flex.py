"""The flex backend gives the reference's output where the host computes it, and says what it does not serve."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from shoal.attention import Blocks, attend
from shoal.attention.flex import coarse
from shoal.errors import UsageError
from tests.attention.test_attend import CASES, close, operands, random_blocks

SERVED = [case for case in CASES if "dropout" not in CASES[case] and "bias" not in CASES[case]]


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("case", SERVED)
@pytest.mark.parametrize(("block", "kv_heads", "layout_heads"), [(16, 4, 1), (64, 2, 4), (128, 4, 4)])
def test_flex_equals_the_reference(case: str, block: int, kv_heads: int, layout_heads: int) -> None:
    blocks = random_blocks(layout_heads, 5, block)
    tensors = operands(blocks, 4, kv_heads, 16)
    options: dict[str, Any] = {name: value(2, blocks.length, block) if callable(value) else value
                               for name, value in CASES[case].items()}
    got, expected = (attend(*tensors, blocks, backend=backend, **options) for backend in ("flex", "reference"))
    close([got], [expected])


def test_a_coarse_block_is_visited_where_one_of_its_blocks_is() -> None:
    layout = torch.zeros(1, 5, 5, dtype=torch.bool)
    layout[0, 3, 4] = layout[0, 0, 1] = True
    assert coarse(Blocks.of(layout, 64)).nonzero().tolist() == [[0, 0, 0], [0, 1, 2]]
    assert coarse(Blocks.of(layout, 256)).nonzero().tolist() == [
        [0, row, column] for row, columns in ((0, (2, 3)), (1, (2, 3)), (6, (8, 9)), (7, (8, 9))) for column in columns]


@pytest.mark.parametrize(("options", "message"), [
    ({"dropout": 0.1}, "no dropout and no bias"), ({"bias": torch.zeros(96, 96)}, "got dropout 0, a bias, block 48"),
    ({}, "blocks that divide 128"),
])  # fmt: skip
def test_flex_says_what_it_does_not_serve(options: dict[str, Any], message: str) -> None:
    blocks = Blocks.dense(96, 96, 48)
    with pytest.raises(UsageError) as caught:
        attend(*operands(blocks, 2, 2, 16), blocks, backend="flex", **options)
    assert message in str(caught.value)


def test_flex_has_no_backward_on_the_host() -> None:
    blocks = Blocks.dense(64, 64, 16)
    query, key, value = operands(blocks, 2, 2, 16)
    with pytest.raises(UsageError, match="no backward on the host"):
        attend(query.requires_grad_(), key, value, blocks, backend="flex")
