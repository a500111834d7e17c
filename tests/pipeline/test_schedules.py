"""Every schedule is whole and never waits for ever; its bubble and its memory are those of its formula."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.errors import UsageError
from shoal.pipeline.check import check, simulate
from shoal.pipeline.instruction import Op
from shoal.pipeline.schedules import SCHEDULES, PipelineSchedule, forward_only, make_schedule
from shoal.pipeline.simulation import Durations

ALL_RANKS = range(1, 9)
ranks_of = st.integers(1, 8)
microbatches_of = st.integers(1, 20)
times = st.floats(0.1, 10)


@st.composite
def schedules(draw: st.DrawFn) -> PipelineSchedule:
    name = draw(st.sampled_from(sorted(SCHEDULES)))
    each = draw(st.integers(2, 4)) if name == "interleaved" else None
    ranks = draw(ranks_of)
    limits = [limit for limit in (None, *range(1, 20)) if SCHEDULES[name].holds(limit, ranks)]
    return make_schedule(name, ranks=ranks, microbatches=draw(microbatches_of), stages_per_rank=each,
                         in_flight=draw(st.sampled_from(limits)))


def waits(name: str, ranks: int, microbatches: int, stages_per_rank: int | None = None) -> float:
    """Return how long each rank waits, in forwards through all its layers, when F = I = W."""
    simulation = simulate(make_schedule(name, ranks=ranks, microbatches=microbatches, stages_per_rank=stages_per_rank))
    assert len(set(simulation.idle)) == 1
    return simulation.idle[0] / simulation.schedule.stages_per_rank


@given(schedules())
def test_every_stage_does_to_every_microbatch_what_it_must(schedule: PipelineSchedule) -> None:
    check(schedule)


@given(schedules(), times, times, times, st.floats(0, 10))
def test_no_durations_make_ranks_wait_for_ever(schedule: PipelineSchedule, forward: float, input: float, weight: float,
                                               travel: float) -> None:
    simulation = simulate(schedule, Durations(forward=forward, input=input, weight=weight, travel=travel))
    assert simulation.makespan >= max(simulation.busy)


@given(schedules())
def test_backward_is_split_under_zero_bubble_alone(schedule: PipelineSchedule) -> None:
    kinds = {instruction.kind for row in schedule.rows for instruction in row}
    split = {Op.FORWARD, Op.INPUT, Op.WEIGHT}
    assert kinds == (split if schedule.name in ("zb-h1", "zb-h2", "zbv") else {Op.FORWARD, Op.BACKWARD})


@given(schedules())
def test_every_microbatch_takes_its_turn(schedule: PipelineSchedule) -> None:
    for row in schedule.rows:
        for stage in range(schedule.stages):
            for kind in Op:
                turns = [each.microbatch for each in row if (each.stage, each.kind) == (stage, kind)]
                assert turns == sorted(turns)


# Bubbles


@given(st.sampled_from(["gpipe", "1f1b"]), ranks_of, microbatches_of)
def test_the_bubble_of_gpipe_and_1f1b_is_that_of_the_textbook(name: str, ranks: int, microbatches: int) -> None:
    simulation = simulate(make_schedule(name, ranks=ranks, microbatches=microbatches),
                          Durations(forward=1, input=1, weight=1))
    assert simulation.makespan == 3 * (microbatches + ranks - 1)
    assert set(simulation.idle) == {3 * (ranks - 1)}
    assert simulation.bubble == pytest.approx((ranks - 1) / (microbatches + ranks - 1), rel=1e-12, abs=0)


@pytest.mark.parametrize("ranks", ALL_RANKS)
def test_zb_h1_waits_a_third_of_1f1b_from_as_many_microbatches_as_ranks(ranks: int) -> None:
    for microbatches in range(1, 33):
        expected = ranks - 1 if microbatches >= ranks else 2 * ranks - 1 - microbatches
        assert waits("zb-h1", ranks, microbatches) == expected
        assert 3 * expected <= waits("1f1b", ranks, microbatches) or microbatches < ranks


@pytest.mark.parametrize("ranks", ALL_RANKS)
def test_zbv_waits_a_sixth_of_1f1b_from_as_many_microbatches_as_ranks(ranks: int) -> None:
    for microbatches in range(ranks, 33):
        assert waits("zbv", ranks, microbatches) == (ranks - 1) / 2


@given(ranks_of, st.integers(0, 20), st.floats(0, 0.5))
def test_zb_h2_waits_for_the_first_message_alone(ranks: int, more: int, travel: float) -> None:
    microbatches = 2 * ranks - 1 + more
    simulation = simulate(make_schedule("zb-h2", ranks=ranks, microbatches=microbatches), Durations(travel=travel))
    bound = 3 * microbatches + (ranks - 1) * (1 + travel)  # the last rank begins so late, and has so much to do
    assert simulation.makespan == pytest.approx(bound, rel=1e-12)


@given(st.integers(2, 8), microbatches_of, times, times, times, st.floats(0, 3))
def test_1f1b_with_more_in_flight_is_never_slower(ranks: int, microbatches: int, forward: float, input: float, weight: float,
                                                  travel: float) -> None:
    usual, eager = (simulate(make_schedule("1f1b", ranks=ranks, microbatches=microbatches, in_flight=room),
                             Durations(forward=forward, input=input, weight=weight, travel=travel)).makespan
                    for room in (None, 2 * ranks - 1))
    assert eager <= usual * (1 + 1e-12)


@pytest.mark.parametrize("stages_per_rank", [2, 3, 4])
@pytest.mark.parametrize("ranks", ALL_RANKS)
def test_interleaving_divides_the_bubble_by_the_stages_per_rank(ranks: int, stages_per_rank: int) -> None:
    for microbatches in range(ranks, 25):
        assert waits("interleaved", ranks, microbatches, stages_per_rank) == 3 * (ranks - 1) / stages_per_rank


# Memory


@given(ranks_of, microbatches_of)
def test_gpipe_holds_every_microbatch(ranks: int, microbatches: int) -> None:
    peaks = make_schedule("gpipe", ranks=ranks, microbatches=microbatches).peak_activations
    assert peaks == (microbatches,) * ranks


@given(ranks_of, microbatches_of)
def test_1f1b_holds_as_many_as_there_are_ranks_to_come(ranks: int, microbatches: int) -> None:
    peaks = make_schedule("1f1b", ranks=ranks, microbatches=microbatches).peak_activations
    assert peaks == tuple(min(microbatches, ranks - rank) for rank in range(ranks))


@given(st.sampled_from(["zb-h1", "zbv"]), ranks_of, microbatches_of)
def test_zero_bubble_holds_no_more_than_the_first_rank_of_1f1b(name: str, ranks: int, microbatches: int) -> None:
    schedule = make_schedule(name, ranks=ranks, microbatches=microbatches)
    usual = make_schedule("1f1b", ranks=ranks, microbatches=microbatches)
    assert max(schedule.peak_microbatches) <= max(usual.peak_microbatches) == min(ranks, microbatches)


@given(ranks_of, st.integers(1, 6), st.integers(2, 4))
def test_interleaving_holds_a_little_more_than_1f1b(ranks: int, rounds: int, stages_per_rank: int) -> None:
    microbatches = ranks * rounds
    peaks = make_schedule("interleaved", ranks=ranks, microbatches=microbatches,
                          stages_per_rank=stages_per_rank).peak_activations
    assert peaks == tuple(min(microbatches * stages_per_rank, ranks * stages_per_rank + ranks - 1 - 2 * rank)
                          for rank in range(ranks))


@pytest.mark.parametrize("name", sorted({*SCHEDULES} - {"gpipe"}))
def test_memory_is_bounded_by_ranks_and_not_by_microbatches(name: str) -> None:
    for ranks in ALL_RANKS:
        for microbatches in range(1, 40):
            peaks = make_schedule(name, ranks=ranks, microbatches=microbatches).peak_microbatches
            assert max(peaks) <= {"interleaved": 2 * ranks, "zb-h2": 2 * ranks - 1}.get(name, ranks)


@given(schedules(), st.integers(1, 20))
def test_no_rank_holds_more_than_it_is_told_to(schedule: PipelineSchedule, limit: int) -> None:
    if SCHEDULES[schedule.name].room is not None and SCHEDULES[schedule.name].holds(limit, schedule.ranks):
        limited = make_schedule(schedule.name, ranks=schedule.ranks, microbatches=schedule.microbatches, in_flight=limit)
        assert max(limited.peak_microbatches) <= limit


@pytest.mark.parametrize(("name", "limit", "wrong"), [
    ("gpipe", 3, "gpipe: in_flight: got 3; its order says what a rank holds, so leave it out; or choose 1f1b, zb-h1, zb-h2"),
    ("interleaved", 8, "interleaved: in_flight: got 8; its order"),
    ("zbv", 3, "zbv: in_flight: got 3; on 4 ranks give 4 or more; or choose 1f1b, zb-h1, zb-h2"),
    ("1f1b", 0, "1f1b: in_flight: got 0; on 4 ranks give 1 or more"),
])  # fmt: skip
def test_a_limit_that_a_schedule_cannot_keep_is_named(name: str, limit: int, wrong: str) -> None:
    with pytest.raises(UsageError, match=wrong):
        make_schedule(name, ranks=4, microbatches=8, in_flight=limit)


# Where stages lie, and how schedules are asked for


def test_stages_go_round_or_there_and_back() -> None:
    assert make_schedule("interleaved", ranks=3, microbatches=3, stages_per_rank=2).owner == (0, 1, 2, 0, 1, 2)
    assert make_schedule("zbv", ranks=3, microbatches=3).owner == (0, 1, 2, 2, 1, 0)
    assert make_schedule("zbv", ranks=1, microbatches=3).owner == (0, 0)


@pytest.mark.parametrize(("asked", "name"), [
    ("1F1B", "1f1b"), ("GPipe", "gpipe"), ("ZB-H1", "zb-h1"), ("Interleaved1F1B", "interleaved"),
    ("ScheduleGPipe", "gpipe"), ("Schedule1F1B", "1f1b"), ("ScheduleZBVZeroBubble", "zbv"),
])  # fmt: skip
def test_names_are_known_in_any_case_and_as_torch_has_them(asked: str, name: str) -> None:
    schedule = make_schedule(asked, ranks=2, microbatches=3)
    assert schedule == make_schedule(name, ranks=2, microbatches=3) and schedule.name == name


@pytest.mark.parametrize(("name", "numbers", "message"), [
    ("zbb", {},
     "pipeline schedule: got 'zbb'; did you mean 'zbv'? It is one of gpipe, 1f1b, interleaved, zb-h1, zb-h2, zbv"),
    ("dual", {}, "pipeline schedule: got 'dual'; choose one of gpipe, 1f1b, interleaved, zb-h1, zb-h2, zbv"),
    ("1f1b", {"ranks": 0}, "pipeline schedule: ranks: got 0; give 1 or more"),
    ("1f1b", {"microbatches": -1}, "pipeline schedule: microbatches: got -1; give 1 or more"),
    ("1f1b", {"stages_per_rank": 2},
     "pipeline schedule 1f1b: stages_per_rank: got 2; 1f1b takes 1; with 2 choose interleaved or zbv"),
    ("zbv", {"stages_per_rank": 3}, "pipeline schedule zbv: stages_per_rank: got 3; zbv takes 2; with 3 choose interleaved"),
    ("interleaved", {"stages_per_rank": 1},
     "pipeline schedule interleaved: stages_per_rank: got 1; interleaved takes 2 or more; with 1 choose gpipe or 1f1b or "
     "zb-h1 or zb-h2"),
    ("interleaved", {"stages_per_rank": 0},
     "pipeline schedule interleaved: stages_per_rank: got 0; interleaved takes 2 or more"),
])  # fmt: skip
def test_what_cannot_be_made_is_refused_with_numbers_and_fix(name: str, numbers: dict[str, int], message: str) -> None:
    with pytest.raises(UsageError) as refused:
        make_schedule(name, **{"ranks": 4, "microbatches": 8, **numbers})
    assert str(refused.value) == message


# Evaluation


@given(ranks_of, microbatches_of, st.integers(1, 3), st.booleans())
def test_an_evaluation_is_forwards_alone(ranks: int, microbatches: int, loops: int, back: bool) -> None:
    there = tuple(range(ranks))
    owner = there + there[::-1] if back else there * loops
    schedule = forward_only(ranks=ranks, microbatches=microbatches, owner=owner)
    check(schedule)
    assert {instruction.kind for row in schedule.rows for instruction in row} == {Op.FORWARD}
    simulation = simulate(schedule)
    if loops == 1 and not back:
        assert simulation.makespan == microbatches + ranks - 1
    assert simulation.makespan <= (microbatches + ranks) * len(owner) // ranks + ranks


def test_an_evaluation_takes_microbatches_as_far_as_they_go() -> None:
    schedule = forward_only(ranks=2, microbatches=2, owner=(0, 1, 1, 0))
    assert [" ".join(map(str, row)) for row in schedule.rows] == ["0F0 0F1 3F0 3F1", "1F0 2F0 1F1 2F1"]


@pytest.mark.parametrize("owner", [(0, 0), (0, 1, 2), ()])
def test_an_evaluation_needs_a_stage_on_every_rank(owner: tuple[int, ...]) -> None:
    with pytest.raises(UsageError, match="each of the ranks 0 to 1 owns a stage, and no other rank does"):
        forward_only(ranks=2, microbatches=2, owner=owner)


def test_a_schedule_is_the_same_wherever_it_is_made() -> None:
    assert make_schedule("zbv", ranks=4, microbatches=9) == make_schedule("zbv", ranks=4, microbatches=9)
    row = make_schedule("zb-h1", ranks=2, microbatches=3).rows[1]
    assert " ".join(map(str, row)) == "1F0 1I0 1F1 1I1 1W0 1F2 1I2 1W1 1W2"
