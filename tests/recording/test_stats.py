"""Statistics of a record: bandwidths, lateness, and offsets of clocks."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.recording.call import Key, Stamps, operation
from shoal.recording.settings import CommsLoggerSettings
from shoal.recording.stats import CallStats, lateness, offsets


def key(op: str = "all_gather", *, size: int = 1000, ranks: int = 4) -> Key:
    return Key(kind="gather", op=op, size=size, ranks=tuple(range(ranks)))


@pytest.mark.parametrize(("op", "factor"), [
    ("all_reduce", 2 * 3 / 4), ("all_gather", 3 / 4), ("reduce_scatter", 3 / 4), ("all_to_all", 3 / 4), ("broadcast", 1),
    ("send", 1),
])  # fmt: skip
def test_bus_bandwidth_is_algorithm_bandwidth_times_the_bus_factor(op: str, factor: float) -> None:
    row = CallStats(key=key(op), calls=5, timed=4, seconds=2.0)
    assert row.latency == 0.5
    assert row.algorithm_bandwidth == 2000
    assert row.bus_bandwidth == pytest.approx(2000 * factor)


def test_calls_without_time_have_no_bandwidth() -> None:
    row = CallStats(key=key(), calls=3)
    assert (row.latency, row.algorithm_bandwidth, row.bus_bandwidth) == (0, 0, 0)


@pytest.mark.parametrize(("name", "does"), [
    ("all_gather_into_tensor", "all_gather"), ("reduce_scatter_tensor", "reduce_scatter"),
    ("all_to_all_single", "all_to_all"), ("inference_all_reduce", "all_reduce"),
    ("broadcast_object_list", "broadcast"), ("all_reduce_coalesced", "all_reduce"),
])  # fmt: skip
def test_operations_are_recognised_by_torchs_longer_names(name: str, does: str) -> None:
    assert operation(name) == does
    assert CommsLoggerSettings(prof_ops=[name]).prof_ops == (does,)  # type: ignore[arg-type]  as JSON has it


# Lateness


def test_the_last_rank_to_launch_delays_the_ranks_that_wait() -> None:
    name = key(ranks=3), "unit"
    waits = {name: [(0, Stamps(0.0, 1.0, 6.0))]}  # stands from 1 until 6
    works = {name: [(0, Stamps(0.0, 5.0, 6.0))]}  # works until the last has come, at 4
    late = {name: [(0, Stamps(4.0, 4.0, 6.5))]}
    ranks, lost = lateness([waits, works, late])
    assert [(each.calls, each.last, each.delay_caused, each.waited) for each in ranks] == [
        (1, 0, 0, 3), (1, 0, 0, 0), (1, 1, 3, 0)]
    assert [lost[name[0], rank].waited for rank in range(3)] == [3, 0, 0]
    assert lost[name[0], 0].transfer == 2.5  # the shortest call: the late one's


def test_a_rank_that_went_on_early_waited_only_until_then() -> None:
    name = key("broadcast", ranks=2), ""
    ranks, _ = lateness([{name: [(0, Stamps(0.0, 0.0, 1.0))]}, {name: [(0, Stamps(9.0, 9.0, 9.5))]}])
    assert (ranks[1].delay_caused, ranks[0].waited) == (1, 1)


def test_only_calls_that_all_ranks_of_the_group_kept_are_compared() -> None:
    name, alone = (key(ranks=2), "unit"), (Key(kind="send", op="send", size=1, ranks=()), "")
    calls = [(number, Stamps(float(number), float(number), number + 0.5)) for number in range(4)]
    ranks, _ = lateness([{name: calls[1:], alone: calls}, {name: calls[:3]}, {}])
    assert [each.calls for each in ranks] == [2, 2, 0]


@given(st.lists(st.lists(st.tuples(st.floats(0, 9), st.floats(0, 9), st.floats(0, 9)), min_size=3, max_size=3), min_size=1))
def test_waits_and_caused_delays_have_one_sum(calls: list[list[tuple[float, float, float]]]) -> None:
    name = key(ranks=3), "unit"
    said = [{name: [(number, Stamps(began, began + work, began + work + wait))
                    for number, (began, work, wait) in enumerate(each[rank] for each in calls)]} for rank in range(3)]
    ranks, _ = lateness(said)
    assert sum(each.last for each in ranks) == len(calls)
    assert sum(each.delay_caused for each in ranks) == pytest.approx(sum(each.waited for each in ranks))
    assert all(each.waited >= 0 for each in ranks)


# Clocks


@given(st.floats(-1e6, 1e6), st.lists(st.tuples(st.floats(0, 1), st.floats(1e-6, 1)), min_size=1, max_size=5))
def test_clock_offsets_are_within_half_the_shortest_round(ahead: float,
                                                                        rounds: list[tuple[float, float]]) -> None:
    """Rank 1's clock is `ahead`; it starts each round `late`, and each round ends after `travel`."""
    said = []
    for number, (late, travel) in enumerate(rounds):
        start, heard = 10.0 * number, 10.0 * number + late + travel
        said.append([(start, heard), (start + late + ahead, heard + ahead)])
    first, found = offsets(said)
    longest = min(late + travel for late, travel in rounds) + 1e-6
    assert first == 0
    assert abs(found - ahead) <= longest
    assert found == 0 or abs(ahead) > 0


def test_ranks_of_one_clock_have_no_offset() -> None:
    assert offsets([[(0.0, 1.0), (0.4, 0.9)], [(5.0, 5.2), (5.15, 5.3)]]) == [0, 0]
