"""`replay` simulates a schedule: each rank runs its row in order, each instruction as soon as its dependencies are done.

Sends are asynchronous: the sender computes on, and a result of another rank is available `travel` after its end.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from shoal.errors import UsageError
from shoal.pipeline.instruction import Instruction, Op
from shoal.pipeline.schedules import PipelineSchedule

__all__ = ["Cell", "Durations", "Simulation", "replay"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Durations:
    """The times of one microbatch at one stage, and of one message between two ranks, all in one arbitrary unit."""

    forward: float = 1.0
    input: float = 1.0
    weight: float = 1.0
    travel: float = 0.0

    def __post_init__(self) -> None:
        for field in fields(self):
            got, least = getattr(self, field.name), "0 or more" if field.name == "travel" else "a number above 0"
            if not (math.isfinite(got) and (got > 0 or (got == 0 and field.name == "travel"))):
                raise UsageError(f"durations: {field.name}: got {got}; give {least}")

    @property
    def backward(self) -> float:
        """The whole backward: input gradient and weight gradients."""
        return self.input + self.weight

    def of(self, kind: Op) -> float:
        """Return the duration of an instruction of `kind`."""
        return {Op.FORWARD: self.forward, Op.BACKWARD: self.backward, Op.INPUT: self.input,
                Op.WEIGHT: self.weight}[kind]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """An instruction and its start and end times."""

    instruction: Instruction
    start: float
    end: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulation:
    """A schedule in time; incomplete if ranks deadlock."""

    schedule: PipelineSchedule
    durations: Durations
    rows: tuple[tuple[Cell, ...], ...]
    """rank -> the instructions that it completed, in order"""

    @property
    def makespan(self) -> float:
        """The time from the start of the first instruction to the end of the last."""
        return max((row[-1].end for row in self.rows if row), default=0.0)

    @property
    def busy(self) -> tuple[float, ...]:
        """The time that each rank computes."""
        return tuple(sum(cell.end - cell.start for cell in row) for row in self.rows)

    @property
    def idle(self) -> tuple[float, ...]:
        """The time that each rank does not compute within the makespan: the bubble, in units of time."""
        return tuple(self.makespan - busy for busy in self.busy)

    @property
    def bubble(self) -> float:
        """The bubble as a fraction: idle / makespan, averaged over the ranks."""
        return sum(self.idle) / (self.makespan * len(self.rows)) if self.makespan else 0.0

    @property
    def peak_activations(self) -> tuple[int, ...]:
        """The most activations that each rank holds at once; see `PipelineSchedule.peak_activations`."""
        return self.schedule.peak_activations

    @property
    def stuck(self) -> dict[int, Instruction]:
        """The next instruction of each rank that could not finish its row."""
        return {rank: row[len(done)] for rank, (row, done) in enumerate(zip(self.schedule.rows, self.rows, strict=True))
                if len(done) < len(row)}


def replay(schedule: PipelineSchedule, durations: Durations) -> Simulation:
    """Simulate every rank until all rows are done or no rank can go on (a deadlock, see `Simulation.stuck`)."""
    rows: list[list[Cell]] = [[] for _ in schedule.rows]
    ends: dict[Instruction, float] = {}
    waiting = set(range(len(rows)))
    while waiting:
        moved = {rank for rank in sorted(waiting) if _advance(schedule, rank, rows[rank], ends, durations)}
        waiting = {rank for rank in waiting if len(rows[rank]) < len(schedule.rows[rank])} if moved else set()
    return Simulation(schedule=schedule, durations=durations, rows=tuple(map(tuple, rows)))


def _advance(schedule: PipelineSchedule, rank: int, done: list[Cell], ends: dict[Instruction, float],
             durations: Durations) -> bool:
    """Run a rank until a dependency is missing; return whether it completed any instruction."""
    row, before = schedule.rows[rank], len(done)
    while len(done) < len(row):
        instruction = row[len(done)]
        arrivals = [done[-1].end if done else 0.0]
        for needed in instruction.dependencies(schedule.stages):
            if needed not in ends:
                return len(done) > before
            remote = schedule.owner[needed.stage] != rank
            arrivals.append(ends[needed] + (durations.travel if remote else 0.0))
        start = max(arrivals)
        done.append(Cell(instruction=instruction, start=start, end=start + durations.of(instruction.kind)))
        ends.update(dict.fromkeys(instruction.completes(), done[-1].end))
    return len(done) > before
