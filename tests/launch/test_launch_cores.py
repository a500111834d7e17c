"""Ranks get contiguous shares of the physical cores in NUMA order."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.launch.cores import CoreShare, gpu_nodes, parse_cpu_list, physical_cores, shares


@pytest.mark.parametrize(("text", "cores"), [("0-3,8", [0, 1, 2, 3, 8]), ("5", [5]), ("", []), ("\n", [])])
def test_kernel_cpu_lists_are_parsed(text, cores):
    assert parse_cpu_list(text) == cores


def test_cores_are_in_numa_order_with_hardware_threads_grouped(tmp_path):
    siblings = {0: "0,4", 4: "0,4", 1: "1,5", 5: "1,5", 2: "2,6", 6: "2,6", 3: "3,7", 7: "3,7"}
    for core, text in siblings.items():
        (tmp_path / f"cpu/cpu{core}/topology").mkdir(parents=True)
        (tmp_path / f"cpu/cpu{core}/topology/thread_siblings_list").write_text(text)
    for node, text in enumerate(["0,2,4,6", "1,3,5,7"]):
        (tmp_path / f"node/node{node}").mkdir(parents=True)
        (tmp_path / f"node/node{node}/cpulist").write_text(text)
    assert physical_cores(range(8), tmp_path) == [(0, 4), (2, 6), (1, 5), (3, 7)]
    assert physical_cores([1, 4, 5], tmp_path) == [(4,), (1, 5)]


def test_without_topology_each_core_is_its_own_group(tmp_path):
    assert physical_cores([3, 1], tmp_path) == [(1,), (3,)]


def test_hardware_threads_do_not_count_as_compute_threads():
    assert shares(2, [(0, 4), (1, 5)]) == [CoreShare(cores=(0, 4), threads=1), CoreShare(cores=(1, 5), threads=1)]


def test_more_ranks_than_cores_are_unbound_with_one_thread_each():
    assert shares(3, [(0,), (1,)]) == [CoreShare(cores=(), threads=1)] * 3


def test_ranks_get_cores_in_the_order_of_their_gpus_numa_nodes(tmp_path):
    for address, node in (("0000:17:00.0", 1), ("0000:65:00.0", 0)):
        (tmp_path / "driver" / address).mkdir(parents=True)
        (tmp_path / "bus" / address).mkdir(parents=True)
        (tmp_path / "bus" / address / "numa_node").write_text(f"{node}\n")
    where = {"driver": tmp_path / "driver", "bus": tmp_path / "bus"}
    assert gpu_nodes(2, **where) == [1, 0]
    assert gpu_nodes(2, "1,0", **where) == [0, 1]
    assert gpu_nodes(2, "GPU-8932f937", **where) == gpu_nodes(2, driver=tmp_path / "none") == []
    assert [share.cores for share in shares(2, [(0,), (1,), (2,), (3,)], [1, 0])] == [(2, 3), (0, 1)]


@given(st.integers(1, 40), st.integers(1, 200))
def test_core_shares_are_a_partition_and_differ_by_at_most_one(ranks, count):
    result = shares(ranks, [(core,) for core in range(count)])
    assert len(result) == ranks
    if ranks <= count:
        assert [core for share in result for core in share.cores] == list(range(count))
        assert max(share.threads for share in result) - min(share.threads for share in result) <= 1
