"""Boxes cover an interval exactly once, and any sharding of a tensor converts to any other."""

from itertools import pairwise
from math import prod

import pytest
import torch
from checkpoint_cases import untimed
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.checkpoint.piece import Box, Interval, Piece, boxes, intersect, overlaps

shapes = st.lists(st.integers(1, 5), max_size=4).map(tuple)


@st.composite
def intervals(draw: st.DrawFn) -> tuple[tuple[int, ...], int, int]:
    shape = draw(shapes)
    start, stop = sorted(draw(st.tuples(*[st.integers(0, prod(shape))] * 2)))
    return shape, start, stop


@st.composite
def shardings(draw: st.DrawFn, shape: tuple[int, ...]) -> list[Interval]:
    """Shard a tensor into boxes along one dim, as tensor parallelism does, and each box into flat intervals."""
    dim = draw(st.integers(0, max(0, len(shape) - 1)))
    edges = sorted({0, shape[dim], *draw(st.lists(st.integers(0, shape[dim]), max_size=2))}) if shape else [0, 1]
    result = []
    for low, high in pairwise(edges):
        offset = tuple(low if d == dim else 0 for d in range(len(shape)))
        size = tuple(high - low if d == dim else extent for d, extent in enumerate(shape))
        flat = sorted({0, prod(size), *draw(st.lists(st.integers(0, prod(size)), max_size=4))})
        result += [Interval(Box(offset, size), i, j) for i, j in pairwise(flat)]
    return draw(st.permutations(result))


def slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(i, i + n) for i, n in zip(box.offset, box.size, strict=True))


def data_of(tensor: torch.Tensor, interval: Interval) -> torch.Tensor:
    return tensor[slices(interval.box)].reshape(-1)[interval.start : interval.stop].clone()


@untimed
@given(intervals())
def test_boxes_cover_an_interval_exactly_once_in_order(case: tuple[tuple[int, ...], int, int]) -> None:
    shape, start, stop = case
    elements = torch.arange(prod(shape)).reshape(shape)
    covered = [elements[slices(box)].reshape(-1) for box in boxes(shape, start, stop)]
    assert torch.cat([torch.empty(0, dtype=torch.long), *covered]).tolist() == list(range(start, stop))


@untimed
@given(intervals())
def test_an_interval_of_n_dims_needs_at_most_2n_minus_1_boxes(case: tuple[tuple[int, ...], int, int]) -> None:
    shape, start, stop = case
    assert len(list(boxes(shape, start, stop))) <= max(1, 2 * len(shape) - 1)


def test_the_worst_interval_of_a_cube_is_five_boxes() -> None:
    assert list(boxes((3, 3, 3), 1, 26)) == [
        Box((0, 0, 1), (1, 1, 2)), Box((0, 1, 0), (1, 2, 3)), Box((1, 0, 0), (1, 3, 3)),
        Box((2, 0, 0), (1, 2, 3)), Box((2, 2, 0), (1, 1, 2))]


def test_an_empty_interval_has_no_boxes() -> None:
    assert list(boxes((0, 3), 0, 0)) == []


@untimed
@given(st.data())
def test_box_intersection_contains_the_common_elements(data: st.DataObject) -> None:
    shape = data.draw(shapes)
    one, other = (data.draw(shardings(shape))[0].box for _ in range(2))
    marks = torch.zeros(shape, dtype=torch.int)
    marks[slices(one)] += 1
    marks[slices(other)] += 1
    shared = intersect(one, other)
    assert (0 if shared is None else shared.elements) == int((marks == 2).sum())


@settings(untimed, max_examples=200)
@given(st.data())
def test_any_sharding_converts_to_any_other(data: st.DataObject) -> None:
    shape = data.draw(shapes)
    tensor = torch.arange(prod(shape)).reshape(shape)
    sources = data.draw(shardings(shape))
    for target in data.draw(shardings(shape)):
        filled = torch.full((target.elements,), -1)
        copied = 0
        for source in sources:
            for overlap in overlaps(source, target):
                overlap.copy(data_of(tensor, source), filled)
                copied += overlap.elements
        assert copied == target.elements
        assert torch.equal(filled, data_of(tensor, target))


def piece(**changes: object) -> Piece:
    fields = {"name": "weight/x", "shape": (4, 6), "start": 0, "stop": 3, "data": torch.zeros(3), **changes}
    return Piece(**fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(("changes", "fault"), [
    ({}, None),
    ({"offset": (2, 0), "size": (2, 3)}, None),
    ({"offset": (2,), "size": (2,)}, "the box has 1 dims, the tensor 2"),
    ({"offset": (2, 0), "size": (3, 3)}, r"the box at (2, 0) of size (3, 3) exceeds the tensor's shape (4, 6)"),
    ({"start": 22, "stop": 25}, "[22, 25) is not an interval of a box of 24 elements"),
    ({"stop": 2}, "[0, 2) needs data of shape (2,), got (3,)"),
])
def test_an_invalid_piece_says_why(changes: dict[str, object], fault: str | None) -> None:
    assert piece(**changes).fault() == fault
