"""Simulate a schedule: when each rank does what, how long all takes, and how much of it is bubble.

Ranks that wait for each other, or for what no rank does, are found here, and drawn, before any of them hangs.
"""

from __future__ import annotations

from shoal.errors import ScheduleError
from shoal.pipeline.instruction import Instruction
from shoal.pipeline.replay import Cell, Durations, Simulation, replay
from shoal.pipeline.schedules import PipelineSchedule
from shoal.pipeline.text_grid import stuck

__all__ = ["Cell", "Durations", "Simulation", "simulate"]


def simulate(schedule: PipelineSchedule, durations: Durations | None = None) -> Simulation:
    """Carry a schedule out in time, as `replay` does; by default F, I and W take 1 each, and travel nothing.

    Raises `ScheduleError`, with the grid as far as it went, if ranks wait for each other or for what never comes.
    """
    simulation = replay(schedule, durations or Durations())
    if simulation.stuck:
        there = {half for row in simulation.rows for cell in row for half in cell.instruction.halves()}
        waits = "; ".join(f"rank {rank} waits at {instruction} for {_missing(instruction, there, schedule)}"
                          for rank, instruction in simulation.stuck.items())
        raise ScheduleError(f"pipeline schedule {schedule.name}, {schedule.ranks} ranks, {schedule.microbatches} "
                            f"microbatches: it cannot go on: {waits}\n{stuck(simulation)}")
    return simulation


def _missing(instruction: Instruction, there: set[Instruction], schedule: PipelineSchedule) -> str:
    needed = next(needed for needed in instruction.needs(schedule.stages) if needed not in there)
    todo = {half for row in schedule.rows for coming in row for half in coming.halves()}
    return f"{needed} of rank {schedule.owner[needed.stage]}" if needed in todo else f"{needed}, which no rank does"
