"""A simulation as text: time runs to the right, a row per rank, a cell per instruction, as long as it takes.

    time    0     2     4     6     8
    rank 0  F0 F1       B0---    B1---
    rank 1     F0 B0--- F1 B1---

A cell says kind and microbatch, and the stage in front where a rank owns several. What is wider than the terminal is cut
into blocks of columns; a cell that goes on in the next block is only dashes there.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shoal.pipeline.instruction import Instruction, Op
from shoal.pipeline.replay import Cell, Durations, Simulation, replay
from shoal.pipeline.schedules import PipelineSchedule

if TYPE_CHECKING:
    from rich.text import Text

__all__ = ["VOID", "fault", "grid", "is_void", "painted", "per_unit", "stuck"]

_STYLES = {Op.FORWARD: "white on blue", Op.BACKWARD: "black on green", Op.INPUT: "black on cyan",
           Op.WEIGHT: "black on yellow"}
_RANGE = 8
"""How much longer the longest instruction is drawn than the shortest, at most."""
_NUMBERS = 6
"""Columns from one number of the ruler to the next, at least."""
_ERROR_WIDTH = 110
_SPARSE = 50
"""How much longer than its ranks compute a simulation is drawn, at most."""
VOID = "(not drawn: ranks wait for travel nearly all of the time; give --travel in the unit of --forward)"


@dataclass(frozen=True, slots=True)
class _Cell:
    """Some columns of a line; `kind` is None where no instruction is."""

    text: str
    kind: Op | None = None


def grid(simulation: Simulation, *, width: int = 80) -> str:
    """Draw a simulation as plain text, in blocks of at most `width` columns."""
    return _plain(_Canvas(simulation).blocks(width))


def painted(simulation: Simulation, *, width: int = 80) -> Text:
    """Draw it for `rich`, with a colour for each kind; on a terminal that has none it reads as `grid` does."""
    from rich.text import Text

    lines = [Text.assemble(*((piece.text, _STYLES[piece.kind] if piece.kind else "") for piece in line))
             for line in _Canvas(simulation).blocks(width)]
    for line in lines:
        line.rstrip()
    return Text("\n").join(lines)


def fault(schedule: PipelineSchedule, rank: int, position: int) -> str:
    """Draw the part of a schedule where instruction `position` of `rank` is, with an arrow at it."""
    simulation = replay(schedule, Durations())
    instruction, done = schedule.rows[rank][position], simulation.rows[rank]
    time = done[position].start if position < len(done) else done[-1].end if done else 0.0
    return _plain(_Canvas(simulation).around(time, _ERROR_WIDTH, {rank: (time, str(instruction))}))


def stuck(simulation: Simulation) -> str:
    """Draw a simulation that came to nothing as far as it went, with an arrow at what each rank waits to do."""
    marks = {rank: (simulation.rows[rank][-1].end if simulation.rows[rank] else 0.0, f"{instruction} cannot start")
             for rank, instruction in simulation.stuck.items()}
    last = max((time for time, _ in marks.values()), default=0.0)
    return _plain(_Canvas(simulation).around(last, _ERROR_WIDTH, marks))


def is_void(rows: Sequence[Sequence[Cell]]) -> bool:
    """Whether a drawing would be of waiting alone."""
    busy = max((sum(cell.end - cell.start for cell in row) for row in rows), default=0.0)
    return max((row[-1].end for row in rows if row), default=0.0) > _SPARSE * busy > 0


def per_unit(simulation: Simulation, size: float) -> float:
    """Return how long a unit of time is drawn if the shortest instruction is to be `size` long.

    It is shorter than that where others take so much longer that the drawing would be of them alone.
    """
    kinds = {instruction.kind for row in simulation.schedule.rows for instruction in row}
    taken = [simulation.durations.of(kind) for kind in kinds] or [1.0]
    return size / max(min(taken), max(taken) / _RANGE)


class _Canvas:
    """A simulation on columns of characters."""

    def __init__(self, simulation: Simulation):
        schedule = simulation.schedule
        self._rows = simulation.rows
        self._several = schedule.stages > schedule.ranks
        digits = len(str(schedule.microbatches - 1)) + (len(str(schedule.stages - 1)) if self._several else 0)
        self._cell = digits + 2  # kind and numbers, and the blank between cells
        self._scale = per_unit(simulation, self._cell)
        self._end = self._column(simulation.makespan)
        self._names = ["time", *(f"rank {rank}" for rank in range(len(self._rows)))]
        self._margin = max(map(len, self._names)) + 2

    def blocks(self, width: int) -> Iterator[list[_Cell]]:
        """Yield the lines of all blocks, with an empty one between two; where next to nothing is drawn, say so instead."""
        if is_void(self._rows):
            yield [_Cell(VOID)]
            return
        blocks = math.ceil(self._end / self._columns(width))
        columns = self._cell * math.ceil(self._end / self._cell / max(blocks, 1))  # as wide as each other
        for start in range(0, self._end, max(columns, 1)):
            if start:
                yield []
            yield from self._block(range(start, min(start + columns, self._end)), {})

    def around(self, time: float, width: int, marks: Mapping[int, tuple[float, str]]) -> Iterator[list[_Cell]]:
        """Yield the lines of one block around `time`, and beneath the rank of each of `marks` an arrow with its words."""
        columns = self._columns(width)
        start = max(0, min(self._column(time) - columns // 2, self._end - columns))
        start -= start % self._cell
        yield from self._block(range(start, min(start + columns, max(self._end, start + 1))), marks)

    def _columns(self, width: int) -> int:
        columns = max(width - self._margin, self._cell)
        return columns - columns % self._cell

    def _column(self, time: float) -> int:
        return round(time * self._scale)

    def _block(self, window: range, marks: Mapping[int, tuple[float, str]]) -> Iterator[list[_Cell]]:
        name, *names = [name.ljust(self._margin) for name in self._names]
        yield [_Cell(name), *self._ruler(window)]
        for rank, row in enumerate(self._rows):
            yield [_Cell(names[rank]), *self._line(row, window)]
            if rank in marks:
                time, words = marks[rank]
                column = self._column(time)
                arrow = f"{'<' if column < window.start else '^'} {words}"  # '<': further to the left than the block
                yield [_Cell(" " * (self._margin + max(0, column - window.start)) + arrow)]

    def _ruler(self, window: range) -> Iterator[_Cell]:
        least = _NUMBERS / self._scale
        power = 10.0 ** math.floor(math.log10(least))
        step = next(power * digit for digit in (1, 2, 5, 10) if power * digit >= least)
        line = ""
        for number in range(math.ceil(window.start / self._scale / step), math.ceil(window.stop / self._scale / step)):
            column, words = self._column(number * step) - window.start, f"{number * step:g}"
            if (not line or len(line) < column) and column + len(words) <= len(window):
                line = line.ljust(column) + words
        yield _Cell(line)

    def _line(self, row: tuple[Cell, ...], window: range) -> Iterator[_Cell]:
        column = window.start
        for cell in row[bisect_right(row, window.start, key=lambda cell: self._column(cell.end)):]:
            start, stop = self._column(cell.start), self._column(cell.end)
            first, last = max(start, window.start), min(stop, window.stop)
            if first >= window.stop:
                break
            label = self._label(cell.instruction) if first == start else ""
            room = max(last - first - (last == stop), min(last - first, 1))  # a blank after it, unless it goes on
            yield _Cell(" " * (first - column))
            yield _Cell((label if len(label) <= room else str(cell.instruction.kind)[:room]).ljust(room, "-"),
                         cell.instruction.kind)
            yield _Cell(" " * (last - first - room))
            column = last

    def _label(self, instruction: Instruction) -> str:
        return str(instruction) if self._several else f"{instruction.kind}{instruction.microbatch}"


def _plain(lines: Iterable[list[_Cell]]) -> str:
    return "\n".join("".join(piece.text for piece in line).rstrip() for line in lines)
