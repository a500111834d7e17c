"""The simulation is exact where one can count by hand; what cannot be carried out is drawn, and not waited for."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.errors import ScheduleError, ShoalError, UsageError
from shoal.pipeline.check import check, simulate
from shoal.pipeline.instruction import Instruction, Op
from shoal.pipeline.schedules import SCHEDULES, PipelineSchedule, forward_only, make_schedule
from shoal.pipeline.simulation import Durations, Simulation


def written(owner: tuple[int, ...], *rows: str, microbatches: int) -> PipelineSchedule:
    """Return a schedule of rows as text."""
    return PipelineSchedule(name="mine", ranks=len(rows), microbatches=microbatches, owner=owner,
                    rows=tuple(tuple(map(Instruction.parse, row.split())) for row in rows))


def times(simulation: Simulation) -> list[list[tuple[str, float, float]]]:
    return [[(str(cell.instruction), cell.start, cell.end) for cell in row] for row in simulation.rows]


TWO = make_schedule("1f1b", ranks=2, microbatches=2)


def test_a_rank_starts_as_soon_as_it_is_free_and_what_it_needs_is_there() -> None:
    assert times(simulate(TWO)) == [
        [("0F0", 0, 1), ("0F1", 1, 2), ("0B0", 4, 6), ("0B1", 7, 9)],
        [("1F0", 1, 2), ("1B0", 2, 4), ("1F1", 4, 5), ("1B1", 5, 7)]]


def test_what_travels_arrives_later_and_keeps_nobody_from_computing() -> None:
    simulation = simulate(TWO, Durations(forward=1, input=2, weight=1, travel=0.5))
    first, second = times(simulation)
    assert second == [("1F0", 1.5, 2.5), ("1B0", 2.5, 5.5), ("1F1", 5.5, 6.5), ("1B1", 6.5, 9.5)]
    assert first == [("0F0", 0, 1), ("0F1", 1, 2), ("0B0", 6, 9), ("0B1", 10, 13)]


def test_the_gradient_of_the_input_travels_before_that_of_the_weights() -> None:
    split = written((0, 1), "0F0 0I0 0W0", "1F0 1I0 1W0", microbatches=1)
    assert times(simulate(split, Durations(travel=1))) == [
        [("0F0", 0, 1), ("0I0", 5, 6), ("0W0", 6, 7)], [("1F0", 2, 3), ("1I0", 3, 4), ("1W0", 4, 5)]]


def test_nothing_travels_between_the_stages_of_one_rank() -> None:
    schedule = make_schedule("zbv", ranks=1, microbatches=3)
    assert simulate(schedule, Durations(travel=7)).bubble == 0


def test_the_numbers_of_a_simulation_follow_from_its_times() -> None:
    simulation = simulate(TWO)
    assert simulation.makespan == 9
    assert simulation.busy == (6, 6) and simulation.idle == (3, 3)
    assert simulation.bubble == pytest.approx(1 / 3)
    assert simulation.peak_activations == (2, 1)


def test_an_activation_is_held_until_its_last_use() -> None:
    """B and W free it at their end, I frees nothing."""
    def peak(row: str) -> tuple[int, ...]:
        return written((0,), row, microbatches=2).peak_activations

    assert peak("0F0 0B0 0F1 0B1") == (1,)
    assert peak("0F0 0I0 0F1 0I1 0W0 0W1") == (2,)
    assert peak("0F0 0I0 0W0 0F1 0I1 0W1") == (1,)


@pytest.mark.parametrize(("name", "value", "allowed"), [
    ("forward", 0.0, "a number above 0"), ("input", -1.0, "a number above 0"), ("weight", float("nan"), "a number above 0"),
    ("travel", -0.1, "0 or more"), ("travel", float("inf"), "0 or more")])
def test_durations_that_cannot_be_are_refused(name: str, value: float, allowed: str) -> None:
    with pytest.raises(UsageError) as refused:
        Durations(**{name: value})
    assert str(refused.value) == f"durations: {name}: got {value}; give {allowed}"


# What cannot be carried out


def test_ranks_that_wait_for_each_other_are_drawn_with_arrows() -> None:
    schedule = written((0, 1), "0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1", microbatches=2)
    with pytest.raises(ScheduleError) as failed:
        simulate(schedule)
    assert str(failed.value).splitlines() == [
        "pipeline schedule mine, 2 ranks, 2 microbatches: it cannot go on: rank 0 waits at 0B0 for 1I0 of rank 1; "
        "rank 1 waits at 1F1 for 0F1 of rank 0",
        "time    0",
        "rank 0  F0",
        "           ^ 0B0 cannot start",
        "rank 1     F0",
        "              ^ 1F1 cannot start"]


def test_what_no_rank_does_is_named() -> None:
    schedule = written((0, 1), "0F0", "1F1", microbatches=2)
    with pytest.raises(ScheduleError, match="rank 1 waits at 1F1 for 0F1, which no rank does"):
        simulate(schedule)


@given(st.sampled_from(sorted(SCHEDULES)), st.integers(1, 4), st.integers(1, 6), st.randoms(use_true_random=False))
def test_a_schedule_in_disorder_is_found_and_never_waited_for(name: str, ranks: int, microbatches: int, random) -> None:
    schedule = make_schedule(name, ranks=ranks, microbatches=microbatches)
    rows = [list(row) for row in schedule.rows]
    row = random.choice(rows)
    random.shuffle(row)
    shuffled = replace(schedule, rows=tuple(map(tuple, rows)))
    try:
        check(shuffled)
    except ScheduleError as error:
        assert f"pipeline schedule {name}, {ranks} ranks, {microbatches} microbatches: " in str(error)
    else:
        assert not simulate(shuffled).stuck


# What is not whole

HALVES = "0F0 0I0 0W0 0F1 0I1 0W1"


@pytest.mark.parametrize(("rows", "fault"), [
    (["0F0 0B0"], "rank 0 never does 0F1"),
    (["0F0 0F1 0B0"], "rank 0 never does 0I1, nor 0B1"),
    ([HALVES.replace(" 0W1", "")], "rank 0 never does 0W1, nor 0B1"),
    (["0F0 0F1 0B0 0B1 0F1"], "rank 0 does 0F1 when 0F1 is done already; give it one B, or one I and one W"),
    ([HALVES + " 0B1"], "rank 0 does 0B1 when 0I1 is done already; give it one B, or one I and one W"),
    ([HALVES.replace("0I1 0W1", "0B1 0W1")], "rank 0 does 0W1 when 0W1 is done already; give it one B, or one I and one W"),
    (["0F0 0B1 0F1 0B0"], "rank 0 does 0B1 before 0F1"),
    ([HALVES.replace("0I1 0W1", "0W1 0I1")], "rank 0 does 0W1 before 0I1"),
    (["0F0 0F1 0F2"], "rank 0 does 0F2; stages are 0 to 0, microbatches 0 to 1"),
    (["0F0 0F1 1F0"], "rank 0 does 1F0; stages are 0 to 0, microbatches 0 to 1"),
    (["0F0 0F1", "0B0 0B1"], "rank 1 does 0B0, but stage 0 is owned by rank 0"),
])  # fmt: skip
def test_what_is_missing_too_many_or_out_of_place_is_named(rows: list[str], fault: str) -> None:
    with pytest.raises(ScheduleError) as failed:
        check(written((0,), *rows, microbatches=2))
    assert str(failed.value) == f"pipeline schedule mine, {len(rows)} ranks, 2 microbatches: {fault}"


def test_rows_and_owners_are_those_of_the_ranks() -> None:
    with pytest.raises(ScheduleError, match="it has 2 rows; give one to each rank"):
        check(replace(TWO, ranks=3))
    with pytest.raises(ScheduleError, match="stage 1 is owned by rank 2; ranks are 0 to 1"):
        check(replace(TWO, owner=(0, 2)))


def test_an_evaluation_is_whole_without_backwards_and_training_is_not() -> None:
    evaluation = forward_only(ranks=2, microbatches=3, owner=(0, 1))
    check(evaluation)
    row = (*evaluation.rows[0], Instruction(0, Op.BACKWARD, 0))
    with pytest.raises(ScheduleError, match="rank 0 never does 0I1, nor 0B1"):
        check(replace(evaluation, rows=(row, evaluation.rows[1])))


def test_errors_of_schedules_are_errors_of_use() -> None:
    assert issubclass(ScheduleError, UsageError) and issubclass(ScheduleError, ShoalError)
