"""No other cut has a lighter heaviest part, nor, of those that have one as light, is any more even."""

from __future__ import annotations

import re
from itertools import combinations, pairwise

import pytest
from hypothesis import given as suppose
from hypothesis import strategies as st

from shoal.errors import UsageError
from shoal.pipeline.split import balanced, given

WEIGHTS = st.lists(st.integers(0, 12), min_size=1, max_size=9)


def cost(weights: list[int], boundaries: tuple[int, ...]) -> tuple[int, int]:
    parts = [sum(weights[start:stop]) for start, stop in pairwise(boundaries)]
    return max(parts), sum(part * part for part in parts)


@suppose(WEIGHTS, st.data())
def test_no_cut_is_better(weights: list[int], data: st.DataObject) -> None:
    parts = data.draw(st.integers(1, len(weights)))
    found = balanced(weights, parts)
    assert given(found, len(weights), parts) == found
    every = [(0, *inner, len(weights)) for inner in combinations(range(1, len(weights)), parts - 1)]
    assert cost(weights, found) == min(cost(weights, other) for other in every)


@suppose(WEIGHTS, st.data())
def test_no_part_weighs_nothing_where_each_could_weigh_something(weights: list[int], data: st.DataObject) -> None:
    heavy = sum(weight > 0 for weight in weights)
    parts = data.draw(st.integers(1, max(1, heavy)))
    found = balanced(weights, parts)
    assert heavy < parts or all(sum(weights[start:stop]) for start, stop in pairwise(found))


@suppose(st.lists(st.floats(0, 1e6), min_size=1, max_size=40), st.data())
def test_any_times_can_be_split(weights: list[float], data: st.DataObject) -> None:
    parts = data.draw(st.integers(1, len(weights)))
    assert given(balanced(weights, parts), len(weights), parts)


@pytest.mark.parametrize(("layers", "parts", "wanted"), [
    (10, 4, (0, 3, 6, 8, 10)), (4, 4, (0, 1, 2, 3, 4)), (7, 1, (0, 7)), (96, 5, (0, 20, 39, 58, 77, 96)),
])  # fmt: skip
def test_equal_layers_are_split_evenly_and_early_parts_are_longer(layers: int, parts: int, wanted: tuple[int, ...]) -> None:
    assert balanced([1] * layers, parts) == wanted


def test_layers_of_no_weight_stay_with_those_before_them() -> None:
    assert balanced([5, 0, 0, 5, 0], 2) == (0, 3, 5)


def test_too_few_layers_are_named() -> None:
    with pytest.raises(UsageError, match="3 layers cannot be split over 4 stages"):
        balanced([1, 1, 1], 4)


@pytest.mark.parametrize("boundaries", [(0, 2), (0, 2, 2, 5), (1, 2, 3, 5), (0, 2, 3, 4), (), (0, 3, 2, 5)])
def test_boundaries_that_are_none_are_named(boundaries: tuple[int, ...]) -> None:
    with pytest.raises(UsageError, match=re.escape(str(list(boundaries))) + ".*5 layers in 3 stages take 4 ascending"):
        given(boundaries, 5, 3)
