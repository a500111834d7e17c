"""Every schedule is valid and free of deadlocks; its bubble and its memory follow its formulas."""

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
    limits = [limit for limit in (None, *range(1, 20)) if SCHEDULES[name].allows_in_flight(limit, ranks)]
    return make_schedule(name, ranks=ranks, microbatches=draw(microbatches_of), stages_per_rank=each,
                         in_flight=draw(st.sampled_from(limits)))


def waits(name: str, ranks: int, microbatches: int, stages_per_rank: int | None = None) -> float:
    """Return how long each rank waits, in forwards through all its layers, when F = I = W."""
    simulation = simulate(make_schedule(name, ranks=ranks, microbatches=microbatches, stages_per_rank=stages_per_rank))
    assert len(set(simulation.idle)) == 1
    return simulation.idle[0] / simulation.schedule.stages_per_rank


@given(schedules())
def test_every_schedule_is_valid(schedule: PipelineSchedule) -> None:
    check(schedule)


@given(schedules(), times, times, times, st.floats(0, 10))
def test_no_durations_make_ranks_deadlock(schedule: PipelineSchedule, forward: float, input: float, weight: float,
                                               travel: float) -> None:
    simulation = simulate(schedule, Durations(forward=forward, input=input, weight=weight, travel=travel))
    assert simulation.makespan >= max(simulation.busy)


@given(schedules())
def test_only_zero_bubble_schedules_split_backward(schedule: PipelineSchedule) -> None:
    kinds = {instruction.kind for row in schedule.rows for instruction in row}
    split = {Op.FORWARD, Op.INPUT, Op.WEIGHT}
    assert kinds == (split if schedule.name in ("zb-h1", "zb-h2", "zbv") else {Op.FORWARD, Op.BACKWARD})


@given(schedules())
def test_each_stage_runs_the_microbatches_in_order(schedule: PipelineSchedule) -> None:
    for row in schedule.rows:
        for stage in range(schedule.stages):
            for kind in Op:
                turns = [each.microbatch for each in row if (each.stage, each.kind) == (stage, kind)]
                assert turns == sorted(turns)


# Bubbles


@given(st.sampled_from(["gpipe", "1f1b"]), ranks_of, microbatches_of)
def test_gpipe_and_1f1b_have_the_textbook_bubble(name: str, ranks: int, microbatches: int) -> None:
    simulation = simulate(make_schedule(name, ranks=ranks, microbatches=microbatches),
                          Durations(forward=1, input=1, weight=1))
    assert simulation.makespan == 3 * (microbatches + ranks - 1)
    assert set(simulation.idle) == {3 * (ranks - 1)}
    assert simulation.bubble == pytest.approx((ranks - 1) / (microbatches + ranks - 1), rel=1e-12, abs=0)


@pytest.mark.parametrize("ranks", ALL_RANKS)
def test_zb_h1_waits_a_third_of_1f1b_from_p_microbatches_on(ranks: int) -> None:
    for microbatches in range(1, 33):
        expected = ranks - 1 if microbatches >= ranks else 2 * ranks - 1 - microbatches
        assert waits("zb-h1", ranks, microbatches) == expected
        assert 3 * expected <= waits("1f1b", ranks, microbatches) or microbatches < ranks


@pytest.mark.parametrize("ranks", ALL_RANKS)
def test_zbv_waits_a_sixth_of_1f1b_from_p_microbatches_on(ranks: int) -> None:
    for microbatches in range(ranks, 33):
        assert waits("zbv", ranks, microbatches) == (ranks - 1) / 2


@given(ranks_of, st.integers(0, 20), st.floats(0, 0.5))
def test_zb_h2_waits_only_for_the_first_message(ranks: int, more: int, travel: float) -> None:
    microbatches = 2 * ranks - 1 + more
    simulation = simulate(make_schedule("zb-h2", ranks=ranks, microbatches=microbatches), Durations(travel=travel))
    bound = 3 * microbatches + (ranks - 1) * (1 + travel)  # the start of the last rank, and its compute time
    assert simulation.makespan == pytest.approx(bound, rel=1e-12)


@given(st.integers(2, 8), microbatches_of, times, times, times, st.floats(0, 3))
def test_1f1b_with_more_in_flight_is_never_slower(ranks: int, microbatches: int, forward: float, input: float, weight: float,
                                                  travel: float) -> None:
    usual, eager = (simulate(make_schedule("1f1b", ranks=ranks, microbatches=microbatches, in_flight=limit),
                             Durations(forward=forward, input=input, weight=weight, travel=travel)).makespan
                    for limit in (None, 2 * ranks - 1))
    assert eager <= usual * (1 + 1e-12)


@pytest.mark.parametrize("stages_per_rank", [2, 3, 4])
@pytest.mark.parametrize("ranks", ALL_RANKS)
def test_interleaving_divides_the_bubble_by_the_stages_per_rank(ranks: int, stages_per_rank: int) -> None:
    for microbatches in range(ranks, 25):
        assert waits("interleaved", ranks, microbatches, stages_per_rank) == 3 * (ranks - 1) / stages_per_rank


# Memory


@given(ranks_of, microbatches_of)
def test_gpipe_holds_all_microbatches(ranks: int, microbatches: int) -> None:
    peaks = make_schedule("gpipe", ranks=ranks, microbatches=microbatches).peak_activations
    assert peaks == (microbatches,) * ranks


@given(ranks_of, microbatches_of)
def test_1f1b_holds_one_microbatch_per_rank_from_this_one_on(ranks: int, microbatches: int) -> None:
    peaks = make_schedule("1f1b", ranks=ranks, microbatches=microbatches).peak_activations
    assert peaks == tuple(min(microbatches, ranks - rank) for rank in range(ranks))


@given(st.sampled_from(["zb-h1", "zbv"]), ranks_of, microbatches_of)
def test_zero_bubble_holds_no_more_than_the_first_rank_of_1f1b(name: str, ranks: int, microbatches: int) -> None:
    schedule = make_schedule(name, ranks=ranks, microbatches=microbatches)
    usual = make_schedule("1f1b", ranks=ranks, microbatches=microbatches)
    assert max(schedule.peak_microbatches) <= max(usual.peak_microbatches) == min(ranks, microbatches)


@given(ranks_of, st.integers(1, 6), st.integers(2, 4))
def test_interleaving_holds_slightly_more_than_1f1b(ranks: int, groups: int, stages_per_rank: int) -> None:
    microbatches = ranks * groups
    peaks = make_schedule("interleaved", ranks=ranks, microbatches=microbatches,
                          stages_per_rank=stages_per_rank).peak_activations
    assert peaks == tuple(min(microbatches * stages_per_rank, ranks * stages_per_rank + ranks - 1 - 2 * rank)
                          for rank in range(ranks))


@pytest.mark.parametrize("name", sorted({*SCHEDULES} - {"gpipe"}))
def test_memory_is_bounded_by_ranks_not_by_microbatches(name: str) -> None:
    for ranks in ALL_RANKS:
        for microbatches in range(1, 40):
            peaks = make_schedule(name, ranks=ranks, microbatches=microbatches).peak_microbatches
            assert max(peaks) <= {"interleaved": 2 * ranks, "zb-h2": 2 * ranks - 1}.get(name, ranks)


@given(schedules(), st.integers(1, 20))
def test_in_flight_limits_what_every_rank_holds(schedule: PipelineSchedule, limit: int) -> None:
    recipe = SCHEDULES[schedule.name]
    if recipe.default_in_flight is not None and recipe.allows_in_flight(limit, schedule.ranks):
        limited = make_schedule(schedule.name, ranks=schedule.ranks, microbatches=schedule.microbatches, in_flight=limit)
        assert max(limited.peak_microbatches) <= limit


@pytest.mark.parametrize(("name", "limit", "wrong"), [
    ("gpipe", 3,
     "gpipe: in_flight: got 3; its order fixes what a rank holds, so leave it out; or choose 1f1b, zb-h1, zb-h2"),
    ("interleaved", 8, "interleaved: in_flight: got 8; its order"),
    ("zbv", 3, "zbv: in_flight: got 3; on 4 ranks give 4 or more; or choose 1f1b, zb-h1, zb-h2"),
    ("1f1b", 0, "1f1b: in_flight: got 0; on 4 ranks give 1 or more"),
])  # fmt: skip
def test_an_in_flight_limit_that_is_not_allowed_is_refused(name: str, limit: int, wrong: str) -> None:
    with pytest.raises(UsageError, match=wrong):
        make_schedule(name, ranks=4, microbatches=8, in_flight=limit)


# Placement of stages, and names


def test_stages_are_placed_in_loops_or_in_a_v() -> None:
    assert make_schedule("interleaved", ranks=3, microbatches=3, stages_per_rank=2).owner == (0, 1, 2, 0, 1, 2)
    assert make_schedule("zbv", ranks=3, microbatches=3).owner == (0, 1, 2, 2, 1, 0)
    assert make_schedule("zbv", ranks=1, microbatches=3).owner == (0, 0)


@pytest.mark.parametrize(("asked", "name"), [
    ("1F1B", "1f1b"), ("GPipe", "gpipe"), ("ZB-H1", "zb-h1"), ("Interleaved1F1B", "interleaved"),
    ("ScheduleGPipe", "gpipe"), ("Schedule1F1B", "1f1b"), ("ScheduleZBVZeroBubble", "zbv"),
])  # fmt: skip
def test_names_match_in_any_case_and_by_torchs_class_names(asked: str, name: str) -> None:
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
def test_invalid_arguments_are_refused_with_numbers_and_fix(name: str, numbers: dict[str, int], message: str) -> None:
    with pytest.raises(UsageError) as refused:
        make_schedule(name, **{"ranks": 4, "microbatches": 8, **numbers})
    assert str(refused.value) == message


# Evaluation


@given(ranks_of, microbatches_of, st.integers(1, 3), st.booleans())
def test_an_evaluation_runs_forwards_only(ranks: int, microbatches: int, loops: int, back: bool) -> None:
    there = tuple(range(ranks))
    owner = there + there[::-1] if back else there * loops
    schedule = forward_only(ranks=ranks, microbatches=microbatches, owner=owner)
    check(schedule)
    assert {instruction.kind for row in schedule.rows for instruction in row} == {Op.FORWARD}
    simulation = simulate(schedule)
    if loops == 1 and not back:
        assert simulation.makespan == microbatches + ranks - 1
    assert simulation.makespan <= (microbatches + ranks) * len(owner) // ranks + ranks


def test_an_evaluation_runs_the_latest_ready_stage_first() -> None:
    schedule = forward_only(ranks=2, microbatches=2, owner=(0, 1, 1, 0))
    assert [" ".join(map(str, row)) for row in schedule.rows] == ["0F0 0F1 3F0 3F1", "1F0 2F0 1F1 2F1"]


@pytest.mark.parametrize("owner", [(0, 0), (0, 1, 2), ()])
def test_an_evaluation_needs_a_stage_on_every_rank(owner: tuple[int, ...]) -> None:
    with pytest.raises(UsageError, match="each of the ranks 0 to 1 owns a stage, and no other rank does"):
        forward_only(ranks=2, microbatches=2, owner=owner)


def test_a_schedule_is_a_pure_function_of_its_arguments() -> None:
    assert make_schedule("zbv", ranks=4, microbatches=9) == make_schedule("zbv", ranks=4, microbatches=9)
    row = make_schedule("zb-h1", ranks=2, microbatches=3).rows[1]
    assert " ".join(map(str, row)) == "1F0 1I0 1F1 1I1 1W0 1F2 1I2 1W1 1W2"
