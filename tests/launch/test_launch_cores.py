"""Each rank's share of the cores."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.launch.cores import CoreShare, physical_cores, read_list, shares


@pytest.mark.parametrize(("text", "cores"), [("0-3,8", [0, 1, 2, 3, 8]), ("5", [5]), ("", []), ("\n", [])])
def test_the_kernels_lists_are_read(text, cores):
    assert read_list(text) == cores


def test_cores_come_in_numa_order_with_hardware_threads_together(tmp_path):
    siblings = {0: "0,4", 4: "0,4", 1: "1,5", 5: "1,5", 2: "2,6", 6: "2,6", 3: "3,7", 7: "3,7"}
    for core, text in siblings.items():
        (tmp_path / f"cpu/cpu{core}/topology").mkdir(parents=True)
        (tmp_path / f"cpu/cpu{core}/topology/thread_siblings_list").write_text(text)
    for node, text in enumerate(["0,2,4,6", "1,3,5,7"]):
        (tmp_path / f"node/node{node}").mkdir(parents=True)
        (tmp_path / f"node/node{node}/cpulist").write_text(text)
    assert physical_cores(range(8), tmp_path) == [(0, 4), (2, 6), (1, 5), (3, 7)]
    assert physical_cores([1, 4, 5], tmp_path) == [(4,), (1, 5)]


def test_without_topology_each_core_is_its_own(tmp_path):
    assert physical_cores([3, 1], tmp_path) == [(1,), (3,)]


def test_hardware_threads_do_not_count_as_threads_to_compute_on():
    assert shares(2, [(0, 4), (1, 5)]) == [CoreShare(cores=(0, 4), threads=1), CoreShare(cores=(1, 5), threads=1)]


def test_more_ranks_than_cores_are_not_bound_and_compute_on_one_thread():
    assert shares(3, [(0,), (1,)]) == [CoreShare(cores=(), threads=1)] * 3


@given(st.integers(1, 40), st.integers(1, 200))
def test_shares_are_disjoint_cover_all_cores_and_differ_by_at_most_one(ranks, count):
    cut = shares(ranks, [(core,) for core in range(count)])
    assert len(cut) == ranks
    if ranks <= count:
        assert [core for share in cut for core in share.cores] == list(range(count))
        assert max(share.threads for share in cut) - min(share.threads for share in cut) <= 1
