"""A topology numbers the ranks of a grid in row-major order."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.errors import UsageError
from shoal.mesh.topology import PipeDataParallelTopology, PipeModelDataParallelTopology, ProcessTopology

DIMS = st.lists(st.integers(1, 4), min_size=1, max_size=4)


def grid(dims: list[int]) -> ProcessTopology:
    return ProcessTopology(axes=list("abcd"[:len(dims)]), dims=dims)


@given(DIMS)
def test_a_rank_and_its_coordinate_name_each_other(dims: list[int]) -> None:
    topology = grid(dims)
    for rank in range(topology.world_size()):
        assert topology.get_rank(**topology.get_coord(rank)._asdict()) == rank


@given(DIMS)
def test_the_rank_lists_of_an_axis_partition_the_ranks(dims: list[int]) -> None:
    topology = grid(dims)
    for axis in topology.get_axis_names():
        lists = topology.get_axis_comm_lists(axis)
        assert sorted(rank for ranks in lists for rank in ranks) == list(range(topology.world_size()))
        for ranks in lists:
            assert [getattr(topology.get_coord(rank), axis) for rank in ranks] == list(range(topology.get_dim(axis)))
            others = [topology.get_coord(rank)._replace(**{axis: 0}) for rank in ranks]
            assert len(set(others)) == 1
        columns = [topology.get_axis_list(axis, place) for place in range(topology.get_dim(axis))]
        assert columns == [sorted(column) for column in zip(*lists, strict=True)]


def test_the_last_axis_is_the_fastest() -> None:
    topology = PipeDataParallelTopology(num_pp=2, num_dp=3)
    assert topology.get_axis_names() == ["pipe", "data"]
    assert [tuple(topology.get_coord(rank)) for rank in range(6)] == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]
    assert topology.get_axis_comm_lists("pipe") == [[0, 3], [1, 4], [2, 5]]
    assert topology.get_axis_comm_lists("data") == [[0, 1, 2], [3, 4, 5]]
    assert topology.get_axis_comm_lists("model") == []
    assert topology.get_axis_list("pipe", 1) == [3, 4, 5]


def test_tensor_ranks_of_a_replica_are_consecutive() -> None:
    topology = PipeModelDataParallelTopology(num_pp=2, num_mp=2, num_dp=2)
    assert topology.get_axis_names() == ["pipe", "data", "model"]
    assert topology.get_axis_comm_lists("model") == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert topology.get_axis_comm_lists("data") == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert topology.get_axis_comm_lists("pipe") == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert topology.filter_match(pipe=1, model=0) == [4, 6]
    assert topology.get_dim("model") == 2
    assert topology.get_dim("expert") == 0
    assert repr(topology) == "PipeModelDataParallelTopology(pipe=2, data=2, model=2)"


def test_a_coordinate_has_a_string_for_file_names() -> None:
    topology = PipeModelDataParallelTopology(num_pp=2, num_mp=2, num_dp=2)
    assert topology.get_rank_repr(5) == "model_01"
    assert topology.get_rank_repr(5, omit_axes=[]) == "pipe_01-data_00-model_01"
    assert topology.get_rank_repr(5, omit_axes=["data"], inner_sep="", outer_sep=".") == "pipe01.model01"
    assert PipeDataParallelTopology(2, 2).get_rank_repr(3) == ""


@pytest.mark.parametrize(("axes", "dims", "words"), [
    (["pipe"], [1, 2], "one size"), (["a", "a"], [1, 2], "of its own"), (["a b"], [2], "name"), (["a"], [0], "1 or more"),
])  # fmt: skip
def test_an_invalid_grid_is_refused(axes: list[str], dims: list[int], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        ProcessTopology(axes, dims)


def test_coordinates_outside_of_the_grid_are_refused() -> None:
    topology = PipeDataParallelTopology(2, 2)
    for coords in ({"pipe": 0}, {"pipe": 2, "data": 0}, {"pipe": 0, "data": 0, "model": 0}, {}):
        with pytest.raises(UsageError, match=r"get_rank: got .*pipe=2, data=2"):
            topology.get_rank(**coords)
    with pytest.raises(UsageError, match="ranks 0 to 3"):
        topology.get_coord(4)
    with pytest.raises(UsageError, match="no axis model"):
        topology.filter_match(model=0)
