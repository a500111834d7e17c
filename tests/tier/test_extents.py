"""Extents never overlap, free ones merge, and a file grows only if no free extent is large enough."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.tier.extents import ALIGNMENT, Extent, Extents

SIZES = st.integers(0, 5 * ALIGNMENT)


def allocated(extents: Extents, size: int) -> Extent:
    if (shortage := extents.shortage(size)) > 0:
        extents.grow(shortage)
    return extents.allocate(size)


@given(st.lists(st.one_of(SIZES, st.tuples(st.just("free"), st.integers(0, 20)))))
def test_allocated_extents_are_aligned_and_never_overlap(steps: list[int | tuple[str, int]]) -> None:
    extents, held = Extents(), list[Extent]()
    for step in steps:
        if isinstance(step, int):
            held.append(allocated(extents, step))
            assert held[-1].bytes >= step and held[-1].bytes - step < ALIGNMENT
        elif held:
            extents.free(held.pop(step[1] % len(held)))
        ordered = sorted(extent for extent in held if extent.bytes)
        assert all(extent.offset % ALIGNMENT == extent.bytes % ALIGNMENT == 0 for extent in ordered)
        assert all(left.stop <= right.offset for left, right in pairwise(ordered))
        assert all(extent.stop <= extents.size for extent in ordered)
        assert extents.allocated == sum(extent.bytes for extent in held)


@given(st.lists(SIZES, min_size=1), st.randoms(use_true_random=False))
def test_all_free_extents_merge_into_one(sizes: list[int], random: object) -> None:
    extents = Extents()
    held = [allocated(extents, size) for size in sizes]
    random.shuffle(held)  # pyright: ignore[reportAttributeAccessIssue]  hypothesis' random
    for extent in held:
        extents.free(extent)
    size = extents.size
    assert allocated(extents, size).bytes == extents.size == size


def test_the_first_free_extent_that_is_large_enough_is_allocated() -> None:
    extents = Extents()
    held = [allocated(extents, pages * ALIGNMENT) for pages in (1, 1, 3, 1, 2, 1)]
    for index in (0, 2, 4):
        extents.free(held[index])
    assert allocated(extents, 2 * ALIGNMENT) == Extent(2 * ALIGNMENT, 2 * ALIGNMENT)


def test_a_free_extent_at_the_end_is_extended() -> None:
    extents = Extents()
    extents.free(allocated(extents, ALIGNMENT))
    assert extents.shortage(3 * ALIGNMENT) == 2 * ALIGNMENT
    assert allocated(extents, 3 * ALIGNMENT) == Extent(0, 3 * ALIGNMENT)


def test_freeing_an_extent_twice_is_an_assertion_error() -> None:
    extents = Extents()
    held = allocated(extents, ALIGNMENT)
    extents.free(held)
    with pytest.raises(AssertionError, match="free already"):
        extents.free(held)
