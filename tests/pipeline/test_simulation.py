"""Simulated times match hand counts; `check` finds invalid schedules, and `simulate` draws deadlocks."""

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


def schedule_of(owner: tuple[int, ...], *rows: str, microbatches: int) -> PipelineSchedule:
    """Return a schedule from rows in text form."""
    return PipelineSchedule(name="mine", ranks=len(rows), microbatches=microbatches, owner=owner,
                            rows=tuple(tuple(map(Instruction.parse, row.split())) for row in rows))


def times(simulation: Simulation) -> list[list[tuple[str, float, float]]]:
    return [[(str(cell.instruction), cell.start, cell.end) for cell in row] for row in simulation.rows]


TWO = make_schedule("1f1b", ranks=2, microbatches=2)


def test_an_instruction_starts_when_the_rank_and_its_inputs_are_ready() -> None:
    assert times(simulate(TWO)) == [
        [("0F0", 0, 1), ("0F1", 1, 2), ("0B0", 4, 6), ("0B1", 7, 9)],
        [("1F0", 1, 2), ("1B0", 2, 4), ("1F1", 4, 5), ("1B1", 5, 7)]]


def test_messages_arrive_later_and_do_not_block_the_sender() -> None:
    simulation = simulate(TWO, Durations(forward=1, input=2, weight=1, travel=0.5))
    first, second = times(simulation)
    assert second == [("1F0", 1.5, 2.5), ("1B0", 2.5, 5.5), ("1F1", 5.5, 6.5), ("1B1", 6.5, 9.5)]
    assert first == [("0F0", 0, 1), ("0F1", 1, 2), ("0B0", 6, 9), ("0B1", 10, 13)]


def test_the_input_gradient_is_sent_before_w_runs() -> None:
    split = schedule_of((0, 1), "0F0 0I0 0W0", "1F0 1I0 1W0", microbatches=1)
    assert times(simulate(split, Durations(travel=1))) == [
        [("0F0", 0, 1), ("0I0", 5, 6), ("0W0", 6, 7)], [("1F0", 2, 3), ("1I0", 3, 4), ("1W0", 4, 5)]]


def test_stages_of_one_rank_exchange_no_messages() -> None:
    schedule = make_schedule("zbv", ranks=1, microbatches=3)
    assert simulate(schedule, Durations(travel=7)).bubble == 0


def test_makespan_busy_idle_and_bubble_follow_from_the_times() -> None:
    simulation = simulate(TWO)
    assert simulation.makespan == 9
    assert simulation.busy == (6, 6) and simulation.idle == (3, 3)
    assert simulation.bubble == pytest.approx(1 / 3)
    assert simulation.peak_activations == (2, 1)


def test_an_activation_is_held_until_b_or_w_ends() -> None:
    """I frees nothing."""
    def peak(row: str) -> tuple[int, ...]:
        return schedule_of((0,), row, microbatches=2).peak_activations

    assert peak("0F0 0B0 0F1 0B1") == (1,)
    assert peak("0F0 0I0 0F1 0I1 0W0 0W1") == (2,)
    assert peak("0F0 0I0 0W0 0F1 0I1 0W1") == (1,)


@pytest.mark.parametrize(("name", "value", "allowed"), [
    ("forward", 0.0, "a number above 0"), ("input", -1.0, "a number above 0"), ("weight", float("nan"), "a number above 0"),
    ("travel", -0.1, "0 or more"), ("travel", float("inf"), "0 or more")])
def test_invalid_durations_are_refused(name: str, value: float, allowed: str) -> None:
    with pytest.raises(UsageError) as refused:
        Durations(**{name: value})
    assert str(refused.value) == f"durations: {name}: got {value}; give {allowed}"


# Deadlocks


def test_ranks_that_wait_for_each_other_are_marked_by_arrows() -> None:
    schedule = schedule_of((0, 1), "0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1", microbatches=2)
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


def test_a_dependency_that_no_rank_runs_is_named() -> None:
    schedule = schedule_of((0, 1), "0F0", "1F1", microbatches=2)
    with pytest.raises(ScheduleError, match="rank 1 waits at 1F1 for 0F1, which no rank does"):
        simulate(schedule)


@given(st.sampled_from(sorted(SCHEDULES)), st.integers(1, 4), st.integers(1, 6), st.randoms(use_true_random=False))
def test_a_shuffled_row_is_refused_or_runs_without_deadlock(name: str, ranks: int, microbatches: int, random) -> None:
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


# Invalid schedules

SPLIT = "0F0 0I0 0W0 0F1 0I1 0W1"


@pytest.mark.parametrize(("rows", "fault"), [
    (["0F0 0B0"], "rank 0 never does 0F1"),
    (["0F0 0F1 0B0"], "rank 0 never does 0I1, nor 0B1"),
    ([SPLIT.replace(" 0W1", "")], "rank 0 never does 0W1, nor 0B1"),
    (["0F0 0F1 0B0 0B1 0F1"], "rank 0 does 0F1 when 0F1 is done already; give it one B, or one I and one W"),
    ([SPLIT + " 0B1"], "rank 0 does 0B1 when 0I1 is done already; give it one B, or one I and one W"),
    ([SPLIT.replace("0I1 0W1", "0B1 0W1")], "rank 0 does 0W1 when 0W1 is done already; give it one B, or one I and one W"),
    (["0F0 0B1 0F1 0B0"], "rank 0 does 0B1 before 0F1"),
    ([SPLIT.replace("0I1 0W1", "0W1 0I1")], "rank 0 does 0W1 before 0I1"),
    (["0F0 0F1 0I0 0B1 0W0"], "stage 0 does 0B1 and 0I0; give it B for all microbatches, or I and W"),
    (["0F1 0F0 0B0 0B1"], "rank 0 does 0F1 before 0F0; messages arrive in the order of microbatches"),
    (["0F0 0F1 0B1 0B0"], "rank 0 does 0B1 before 0I0; messages arrive in the order of microbatches"),
    (["0F0 0F1 0F2"], "rank 0 does 0F2; stages are 0 to 0, microbatches 0 to 1"),
    (["0F0 0F1 1F0"], "rank 0 does 1F0; stages are 0 to 0, microbatches 0 to 1"),
    (["0F0 0F1", "0B0 0B1"], "rank 1 does 0B0, but stage 0 is owned by rank 0"),
])  # fmt: skip
def test_missing_duplicate_and_misplaced_instructions_are_named(rows: list[str], fault: str) -> None:
    with pytest.raises(ScheduleError) as failed:
        check(schedule_of((0,), *rows, microbatches=2))
    assert str(failed.value) == f"pipeline schedule mine, {len(rows)} ranks, 2 microbatches: {fault}"


def test_rows_and_owners_must_match_the_ranks() -> None:
    with pytest.raises(ScheduleError, match="it has 2 rows; give one to each rank"):
        check(replace(TWO, ranks=3))
    with pytest.raises(ScheduleError, match="stage 1 is owned by rank 2; ranks are 0 to 1"):
        check(replace(TWO, owner=(0, 2)))


def test_an_evaluation_needs_no_backwards_and_training_does() -> None:
    evaluation = forward_only(ranks=2, microbatches=3, owner=(0, 1))
    check(evaluation)
    row = (*evaluation.rows[0], Instruction(0, Op.BACKWARD, 0))
    with pytest.raises(ScheduleError, match="rank 0 never does 0I1, nor 0B1"):
        check(replace(evaluation, rows=(row, evaluation.rows[1])))


def test_schedule_errors_are_usage_errors() -> None:
    assert issubclass(ScheduleError, UsageError) and issubclass(ScheduleError, ShoalError)
