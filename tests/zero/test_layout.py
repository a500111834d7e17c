"""Laws of the flat layout, of the pool, and of the table of placements."""

from __future__ import annotations

import mmap
from math import prod
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shoal.tier import Memory, elastic
from shoal.zero.grad_accumulator import Pool
from shoal.zero.layout import ALIGNMENT, Layout
from shoal.zero.placement import PARTIAL, REPLICATE, SHARD, STAGES, state_bytes

SHAPES = st.lists(st.lists(st.integers(1, 7), max_size=3).map(tuple), min_size=1, max_size=8)


def pack(shapes: list[tuple[int, ...]], ranks: int) -> Layout:
    return Layout.pack([(f"p{i}", shape, 0) for i, shape in enumerate(shapes)], ranks)


@given(SHAPES, st.integers(1, 9))
def test_spans_are_equal_aligned_and_cover_the_buffer(shapes: list[tuple[int, ...]], ranks: int) -> None:
    layout = pack(shapes, ranks)
    shards = [layout.shard_range(rank) for rank in range(ranks)]
    assert [i for shard in shards for i in shard] == list(range(layout.size))
    assert len({len(shard) for shard in shards}) == 1
    assert all(shard.start % ALIGNMENT == 0 for shard in shards)


@given(SHAPES, st.integers(1, 9))
def test_the_parts_of_all_spans_are_every_element_of_every_slot_once(shapes: list[tuple[int, ...]], ranks: int) -> None:
    layout = pack(shapes, ranks)
    found = [(part.slot, element, layout.shard_range(rank).start + part.offset + element - part.start)
             for rank in range(ranks) for part in layout.parts(layout.shard_range(rank))
             for element in range(part.start, part.stop)]
    expected = [(i, element, slot.start + element)
                for i, slot in enumerate(layout.slots) for element in range(prod(slot.shape))]
    assert found == expected


@given(SHAPES, st.integers(1, 9))
def test_slots_and_gaps_divide_the_buffer(shapes: list[tuple[int, ...]], ranks: int) -> None:
    layout = pack(shapes, ranks)
    covered = [i for slot in layout.slots for i in range(slot.start, slot.stop)] + [i for gap in layout.gaps() for i in gap]
    assert sorted(covered) == list(range(layout.size))
    assert layout.elements == sum(prod(shape) for shape in shapes)


@given(SHAPES)
def test_views_have_the_slots_shapes_and_share_the_memory(shapes: list[tuple[int, ...]]) -> None:
    layout = pack(shapes, 2)
    flat = torch.arange(float(layout.size))
    for slot, view in zip(layout.slots, layout.views(flat), strict=True):
        assert view.shape == slot.shape
        assert view.flatten()[0] == slot.start
        assert view.untyped_storage().data_ptr() == flat.untyped_storage().data_ptr()


def resident() -> int:
    """Bytes of this process that are in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


@pytest.mark.parametrize("size", [1000, 16 << 20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_elastic_buffer_keeps_its_span_and_gives_the_rest_back(size: int, dtype: torch.dtype) -> None:
    span = range(size // 4 + 1, size // 2 + 3)
    cpu = torch.device("cpu")
    buffer = elastic(size, dtype, span, cpu, Memory(device=cpu), "a buffer")
    view = buffer.full[: size // 2 * 2].view(2, -1)
    before = resident()
    for value in (1, 2):
        buffer.grow().wait()
        buffer.load_shard()
        buffer.full[: span.start] = 7
        buffer.full[span.stop:] = 7
        buffer.full[span.start:span.stop] = value
        buffer.shard.tensor.fill_(value)
        assert view[0, 0] == 7
        buffer.shrink()
        held = resident() - before
        assert held < size * dtype.itemsize * 0.3 + (1 << 20), "a quarter rests"
        assert buffer.shard.tensor.min() == buffer.shard.tensor.max() == value
        assert view.shape == (2, size // 2)
    buffer.grow()
    buffer.load_shard()
    assert (buffer.full[span.start:span.stop] == 2).all()


@given(st.lists(st.tuples(st.integers(0, 50), st.sampled_from([torch.float32, torch.bfloat16, torch.float64])), max_size=20))
def test_a_pool_never_lends_the_same_memory_twice_and_keeps_what_it_needs(sizes: list[tuple[int, torch.dtype]]) -> None:
    pool = Pool(torch.device("cpu"))
    for count, (elements, dtype) in enumerate(sizes):
        lent = [pool.borrow(elements, dtype), pool.borrow(7, torch.float32)]
        assert lent[0].dtype == dtype
        assert lent[0].numel() == elements
        assert lent[0].untyped_storage().data_ptr() != lent[1].untyped_storage().data_ptr()
        for tensor in lent if count % 2 else reversed(lent):
            pool.give_back(tensor)
    largest = max([elements * dtype.itemsize for elements, dtype in sizes], default=0)
    assert pool.bytes <= 2 * max(largest, 28, 1)


def test_a_small_tensor_leaves_a_large_block_to_others() -> None:
    pool = Pool(torch.device("cpu"))
    pool.give_back(pool.borrow(100, torch.float32))
    small = pool.borrow(50, torch.float32, small=True)
    large = pool.borrow(100, torch.float32)
    assert pool.bytes == 600, "a block of twice the size is not small"
    pool.give_back(large)
    pool.give_back(small)
    pool.borrow(26, torch.float32, small=True)
    assert pool.bytes == 600


def test_each_stage_shards_one_thing_more() -> None:
    rows = [(stage.weight, stage.gradient, stage.master) for stage in STAGES]
    assert rows == [(REPLICATE, PARTIAL, REPLICATE), (REPLICATE, PARTIAL, SHARD), (REPLICATE, SHARD, SHARD),
                    (SHARD, SHARD, SHARD)]


@pytest.mark.parametrize(("stage", "expected"), list(enumerate([2 + 2 + 12, 2 + 2 + 3, 2 + 0.5 + 3, 0.5 + 0.5 + 3])))
def test_bytes_per_parameter_follow_the_published_table(stage: int, expected: float) -> None:
    assert state_bytes(stage, 1000, 4, compute=torch.bfloat16).total == 1000 * expected


@pytest.mark.parametrize(("stage", "expected"), list(enumerate([4 + 4 + 8, 4 + 4 + 2, 4 + 1 + 2, 1 + 1 + 2])))
def test_fp32_weights_are_their_own_masters(stage: int, expected: float) -> None:
    assert state_bytes(stage, 1000, 4, compute=torch.float32).total == 1000 * expected
