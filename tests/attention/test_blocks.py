"""The blocks of a layout: found by its content, from several threads, and refused where they cannot be."""

from __future__ import annotations

import copy
import io
import pickle
import random
import sys
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from shoal.attention import Blocks, FixedSparsityConfig, LocalSlidingWindowSparsityConfig
from shoal.errors import UsageError


def test_blocks_are_cached_by_content() -> None:
    layout = torch.eye(4).long()[None]
    other = layout.clone()
    other[0, 0, 3] = 1
    assert Blocks.of(layout, 16) is Blocks.of(layout.clone(), 16)
    assert Blocks.of(other, 16).visited == 5 and Blocks.of(layout, 32) is not Blocks.of(layout, 16)
    assert Blocks.of(layout.expand(6, -1, -1), 16).heads == 1


def test_blocks_keep_their_layout_when_the_caller_writes_to_it() -> None:
    layout = torch.eye(5, dtype=torch.bool)[None]
    blocks = Blocks.of(layout, 16)
    layout.fill_(True)
    assert torch.equal(blocks.layout[0], torch.eye(5, dtype=torch.bool)) and blocks.visited == 5
    assert Blocks.of(layout, 16).visited == 25


def test_blocks_take_memory_for_what_is_visited_alone() -> None:
    layout = torch.eye(2000, dtype=torch.bool)[None]
    layout[0, :, 0] = True
    blocks = Blocks.of(layout, 16)
    held = [*vars(blocks).values(), *vars(blocks.lower).values()]
    assert max(each.nbytes for each in held if isinstance(each, Tensor)) <= 8 * 4001
    assert torch.equal(blocks.layout, layout)
    assert torch.equal(blocks.layout_of_rows(range(7, 9)), layout[:, 7:9])


@contextmanager
def switching_often() -> Generator[None]:
    """Have Python switch threads after a microsecond."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        yield
    finally:
        sys.setswitchinterval(interval)


def test_threads_find_blocks_of_more_layouts_than_the_cache_keeps() -> None:
    layouts = [(torch.arange(49) < count).view(1, 7, 7) for count in range(49)]
    layouts += [layout.transpose(1, 2) for layout in layouts[8:]]

    def find(seed: int) -> None:
        for layout in random.Random(seed).choices(layouts, k=3000):
            assert torch.equal(Blocks.of(layout, 16).layout, layout)

    with ThreadPoolExecutor(8) as pool, switching_often():
        assert list(pool.map(find, range(8))) == [None] * 8


def test_threads_share_a_structure_at_more_lengths_than_it_keeps() -> None:
    structure = LocalSlidingWindowSparsityConfig(num_heads=1)
    expected = {length: structure.blocks(length).visited for length in range(64, 64 + 16 * 80, 16)}

    def find(seed: int) -> None:
        for length in random.Random(seed).choices(list(expected), k=3000):
            assert structure.blocks(length).visited == expected[length]

    with ThreadPoolExecutor(8) as pool, switching_often():
        assert list(pool.map(find, range(8))) == [None] * 8


def test_structures_are_copied_and_pickled_without_their_blocks() -> None:
    structure = FixedSparsityConfig(num_heads=2)
    drawn = structure.blocks(64)
    for other in (copy.deepcopy(structure), pickle.loads(pickle.dumps(structure)), copy.copy(structure)):
        assert other.blocks(64) is drawn, "blocks are found by content"
    with torch.serialization.safe_globals([FixedSparsityConfig]):
        file = io.BytesIO()
        torch.save(structure, file)
        assert torch.load(io.BytesIO(file.getvalue()), weights_only=True).blocks(64) is drawn


@pytest.mark.parametrize(("layout", "message"), [
    (torch.ones(4, 4), "(heads, query blocks, key blocks)"), (torch.full((1, 2, 2), 2), "entries 0 and 1 alone"),
    (torch.ones(1, 0, 2), "each at least 1"), (torch.ones(1, 2, 2, dtype=torch.complex64), "got torch.complex64 on cpu"),
    (torch.ones(1, 2, 2, device="meta"), "on meta: give bool or whole numbers, on a device that stores them"),
    (torch.ones(1, 2, 2).to_sparse(), "got one of torch.sparse_coo: give its to_dense()"),
])  # fmt: skip
def test_bad_layouts_are_refused(layout: Tensor, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        Blocks.of(layout, 16)
    assert message in str(caught.value)


@pytest.mark.parametrize(("sizes", "message"), [
    ((64.0, 64, 16), "a length is a whole number of positions, at least one block; got 64.0"),
    ((65, 64, 16), "a length is a multiple of the block, 16; got 65: pad it by 15"),
    ((64, 64, 0), "a block is a whole number of positions, at least one; got 0"),
])  # fmt: skip
def test_bad_sizes_of_the_layout_of_ones_are_refused(sizes: tuple[Any, int, int], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Blocks.dense(*sizes)
