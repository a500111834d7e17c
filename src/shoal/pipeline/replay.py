"""When each rank does what, if instructions take a given time: a rank does its row in order, each as soon as what it needs
is there. Sends are asynchronous: a rank that has computed goes on, and what it sends arrives `travel` later.
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
    """How long one microbatch takes at one stage, and from a rank to another, in any one unit."""

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
        """Of both halves."""
        return self.input + self.weight

    def of(self, kind: Op) -> float:
        """Return how long an instruction of `kind` takes."""
        return {Op.FORWARD: self.forward, Op.BACKWARD: self.backward, Op.INPUT: self.input,
                Op.WEIGHT: self.weight}[kind]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """An instruction, from `start` to `end`."""

    instruction: Instruction
    start: float
    end: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulation:
    """A schedule in time; not the whole of it where ranks wait for what never comes."""

    schedule: PipelineSchedule
    durations: Durations
    rows: tuple[tuple[Cell, ...], ...]
    """rank -> what it has done, in order"""

    @property
    def makespan(self) -> float:
        """From the start of the first instruction to the end of the last."""
        return max((row[-1].end for row in self.rows if row), default=0.0)

    @property
    def busy(self) -> tuple[float, ...]:
        """The time that each rank computes."""
        return tuple(sum(cell.end - cell.start for cell in row) for row in self.rows)

    @property
    def idle(self) -> tuple[float, ...]:
        """The time that each rank does not compute before all have ended: the bubble, in units of time."""
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
        """What each rank that has not ended waits to do."""
        return {rank: row[len(done)] for rank, (row, done) in enumerate(zip(self.schedule.rows, self.rows, strict=True))
                if len(done) < len(row)}


def replay(schedule: PipelineSchedule, durations: Durations) -> Simulation:
    """Let every rank do what it can."""
    rows: list[list[Cell]] = [[] for _ in schedule.rows]
    ends: dict[Instruction, float] = {}
    waiting = set(range(len(rows)))
    while waiting:
        moved = {rank for rank in sorted(waiting) if _advance(schedule, rank, rows[rank], ends, durations)}
        waiting = {rank for rank in waiting if len(rows[rank]) < len(schedule.rows[rank])} if moved else set()
    return Simulation(schedule=schedule, durations=durations, rows=tuple(map(tuple, rows)))


def _advance(schedule: PipelineSchedule, rank: int, done: list[Cell], ends: dict[Instruction, float],
             durations: Durations) -> bool:
    """Let a rank go on until it waits for what is not there; return whether it did anything."""
    row, before = schedule.rows[rank], len(done)
    while len(done) < len(row):
        instruction = row[len(done)]
        arrivals = [done[-1].end if done else 0.0]
        for needed in instruction.needs(schedule.stages):
            if needed not in ends:
                return len(done) > before
            away = schedule.owner[needed.stage] != rank
            arrivals.append(ends[needed] + (durations.travel if away else 0.0))
        start = max(arrivals)
        done.append(Cell(instruction=instruction, start=start, end=start + durations.of(instruction.kind)))
        ends.update(dict.fromkeys(instruction.halves(), done[-1].end))
    return len(done) > before
