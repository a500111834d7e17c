"""`check` validates a schedule before any rank runs it, and `simulate` refuses one that deadlocks.

A schedule is valid if every stage runs, for every microbatch, one F and then either one B, or one I followed by one W; if
a stage takes the microbatches in their order, in which messages arrive; if each instruction is in the row of the stage's
owner; if a stage does B for all microbatches or for none; and if no ranks wait for each other.
"""

from __future__ import annotations

from collections.abc import Iterable

from shoal.errors import ScheduleError
from shoal.pipeline.instruction import Instruction, Op
from shoal.pipeline.schedules import PipelineSchedule
from shoal.pipeline.simulation import Durations, Simulation, replay
from shoal.pipeline.text_grid import stuck

__all__ = ["check", "simulate"]


def check(schedule: PipelineSchedule) -> None:
    """Return if a schedule can be executed; one that has only forwards, for evaluation, needs no backwards.

    Raises `ScheduleError` that names the instruction that is missing, duplicate, misplaced or out of order. For ranks that
    wait for each other it shows the grid up to the deadlock.
    """
    for fault in _faults(schedule):
        raise ScheduleError(f"pipeline schedule {schedule.name}, {schedule.ranks} ranks, {schedule.microbatches} "
                            f"microbatches: {fault}")
    simulate(schedule)


def simulate(schedule: PipelineSchedule, durations: Durations | None = None) -> Simulation:
    """Simulate a schedule in time, as `replay` does; by default F, I and W take 1 each, and messages no time.

    Raises `ScheduleError`, with the grid up to that point, if ranks wait for each other or for an instruction that no rank
    runs.
    """
    simulation = replay(schedule, durations or Durations())
    if simulation.stuck:
        done = {each for row in simulation.rows for cell in row for each in cell.instruction.completes()}
        waits = "; ".join(f"rank {rank} waits at {instruction} for {_unmet(instruction, done, schedule)}"
                          for rank, instruction in simulation.stuck.items())
        raise ScheduleError(f"pipeline schedule {schedule.name}, {schedule.ranks} ranks, {schedule.microbatches} "
                            f"microbatches: it cannot go on: {waits}\n{stuck(simulation)}")
    return simulation


def _unmet(instruction: Instruction, done: set[Instruction], schedule: PipelineSchedule) -> str:
    """Name the first dependency of `instruction` that is not `done`."""
    needed = next(needed for needed in instruction.dependencies(schedule.stages) if needed not in done)
    scheduled = {each for row in schedule.rows for coming in row for each in coming.completes()}
    return f"{needed} of rank {schedule.owner[needed.stage]}" if needed in scheduled else f"{needed}, which no rank does"


def _faults(schedule: PipelineSchedule) -> Iterable[str]:
    if len(schedule.rows) != schedule.ranks:
        yield f"it has {len(schedule.rows)} rows; give one to each rank"
    for stage, rank in enumerate(schedule.owner):
        if not 0 <= rank < schedule.ranks:
            yield f"stage {stage} is owned by rank {rank}; ranks are 0 to {schedule.ranks - 1}"
    seen: set[Instruction] = set()
    for rank, row in enumerate(schedule.rows):
        for instruction in row:
            yield from _misplaced(schedule, rank, instruction, seen)
            seen.update((instruction, *instruction.completes()))
    yield from _missing(schedule, seen)
    yield from _mixed(schedule)


def _misplaced(schedule: PipelineSchedule, rank: int, instruction: Instruction, seen: set[Instruction]) -> Iterable[str]:
    """Yield the faults of one instruction of `rank`, given the instructions already `seen`."""
    if not (0 <= instruction.stage < schedule.stages and 0 <= instruction.microbatch < schedule.microbatches):
        yield (f"rank {rank} does {instruction}; stages are 0 to {schedule.stages - 1}, microbatches 0 to "
               f"{schedule.microbatches - 1}")
        return
    owner = schedule.owner[instruction.stage]
    if owner != rank:
        yield f"rank {rank} does {instruction}, but stage {instruction.stage} is owned by rank {owner}"
    for part in instruction.completes():
        if part in seen:
            yield f"rank {rank} does {instruction} when {part} is done already; give it one B, or one I and one W"
    for needed in instruction.dependencies(schedule.stages):
        if needed.stage == instruction.stage and needed not in seen:
            yield f"rank {rank} does {instruction} before {needed}"
    for part in instruction.completes():
        before = Instruction(part.stage, part.kind, part.microbatch - 1)
        if part.microbatch and part.kind is not Op.WEIGHT and before not in seen:
            yield f"rank {rank} does {instruction} before {before}; messages arrive in the order of microbatches"


def _mixed(schedule: PipelineSchedule) -> Iterable[str]:
    """A stage that splits backward keeps what its W need in every forward, so it splits the backward of each microbatch."""
    for stage in range(schedule.stages):
        found = {each.kind: each for row in schedule.rows for each in row if each.stage == stage}
        if Op.BACKWARD in found and Op.INPUT in found:
            yield (f"stage {stage} does {found[Op.BACKWARD]} and {found[Op.INPUT]}; give it B for all microbatches, or I "
                   f"and W")


def _missing(schedule: PipelineSchedule, seen: set[Instruction]) -> Iterable[str]:
    has_backward = any(instruction.kind is not Op.FORWARD for instruction in seen)
    for stage, rank in enumerate(schedule.owner):
        for microbatch in range(schedule.microbatches):
            for kind in (Op.FORWARD, *((Op.INPUT, Op.WEIGHT) if has_backward else ())):
                if Instruction(stage, kind, microbatch) not in seen:
                    other = "" if kind is Op.FORWARD else f", nor {Instruction(stage, Op.BACKWARD, microbatch)}"
                    yield f"rank {rank} never does {Instruction(stage, kind, microbatch)}{other}"
