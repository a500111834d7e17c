"""A schedule is whole if every stage does to every microbatch one F, and then either one B or one I and after it one W;
each on the row of the stage's owner; in orders that never wait for each other.
"""

from __future__ import annotations

from collections.abc import Iterable

from shoal.errors import ScheduleError
from shoal.pipeline.instruction import Instruction, Op
from shoal.pipeline.schedules import PipelineSchedule
from shoal.pipeline.simulate import simulate

__all__ = ["check"]

_HALVES = (Op.INPUT, Op.WEIGHT)


def check(schedule: PipelineSchedule) -> None:
    """Return if a schedule can be carried out; one that has forwards alone, for evaluation, needs no backwards.

    Raises `ScheduleError` naming the instruction that is missing, too many, out of place or out of order, and, with the
    grid as far as it goes, ranks that would wait for each other.
    """
    for fault in _faults(schedule):
        raise ScheduleError(f"pipeline schedule {schedule.name}, {schedule.ranks} ranks, {schedule.microbatches} "
                            f"microbatches: {fault}")
    simulate(schedule)


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
            seen.update((instruction, *instruction.halves()))
    yield from _missing(schedule, seen)


def _misplaced(schedule: PipelineSchedule, rank: int, instruction: Instruction, seen: set[Instruction]) -> Iterable[str]:
    """Yield what is wrong with an instruction of `rank`, after those that are `seen` already."""
    if not (0 <= instruction.stage < schedule.stages and 0 <= instruction.microbatch < schedule.microbatches):
        yield (f"rank {rank} does {instruction}; stages are 0 to {schedule.stages - 1}, microbatches 0 to "
               f"{schedule.microbatches - 1}")
        return
    owner = schedule.owner[instruction.stage]
    if owner != rank:
        yield f"rank {rank} does {instruction}, but stage {instruction.stage} is owned by rank {owner}"
    for half in instruction.halves():
        if half in seen:
            yield f"rank {rank} does {instruction} when {half} is done already; give it one B, or one I and one W"
    for needed in instruction.needs(schedule.stages):
        if needed.stage == instruction.stage and needed not in seen:
            yield f"rank {rank} does {instruction} before {needed}"


def _missing(schedule: PipelineSchedule, seen: set[Instruction]) -> Iterable[str]:
    backwards = any(instruction.kind is not Op.FORWARD for instruction in seen)
    for stage, rank in enumerate(schedule.owner):
        for microbatch in range(schedule.microbatches):
            for kind in (Op.FORWARD, *(_HALVES if backwards else ())):
                if Instruction(stage, kind, microbatch) not in seen:
                    other = "" if kind is Op.FORWARD else f", nor {Instruction(stage, Op.BACKWARD, microbatch)}"
                    yield f"rank {rank} never does {Instruction(stage, kind, microbatch)}{other}"
