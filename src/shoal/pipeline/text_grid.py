"""Draws a simulation as text: time runs to the right, one row per rank, one cell per instruction, as wide as its duration.

    time    0     2     4     6     8
    rank 0  F0 F1       B0---    B1---
    rank 1     F0 B0--- F1 B1---

A cell shows kind and microbatch, preceded by the stage if a rank owns several. A grid wider than the terminal is cut into
blocks of columns; a cell that continues in the next block shows only dashes there.
"""

from __future__ import annotations

import math
import textwrap
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shoal.pipeline.instruction import Instruction, Op
from shoal.pipeline.schedules import PipelineSchedule
from shoal.pipeline.simulation import Cell, Durations, Simulation, replay

if TYPE_CHECKING:
    from rich.text import Text

__all__ = ["NOT_DRAWN", "fault", "grid", "mostly_idle", "painted", "per_unit", "stuck"]

_STYLES = {Op.FORWARD: "white on blue", Op.BACKWARD: "black on green", Op.INPUT: "black on cyan",
           Op.WEIGHT: "black on yellow"}
_MAX_STRETCH = 8
"""The largest ratio of the widths of two instructions; beyond it the shortest are drawn too narrow for their label."""
_RULER_STEP = 6
"""The least number of columns between two numbers of the ruler."""
_ERROR_WIDTH = 110
_MAX_IDLE_RATIO = 50
"""The largest ratio of makespan to compute time that is still drawn."""
NOT_DRAWN = "(not drawn: ranks wait for travel nearly all of the time; give --travel in the unit of --forward)"


@dataclass(frozen=True, slots=True)
class _Segment:
    """Some columns of a line; `kind` is None outside of instructions."""

    text: str
    kind: Op | None = None


def grid(simulation: Simulation, *, width: int = 80) -> str:
    """Draw a simulation as plain text, in blocks of at most `width` columns."""
    return _plain(_Canvas(simulation).blocks(width))


def painted(simulation: Simulation, *, width: int = 80) -> Text:
    """Draw a simulation for `rich`, one colour per kind; without colours it reads like `grid`."""
    from rich.text import Text

    lines = [Text.assemble(*((part.text, _STYLES[part.kind] if part.kind else "") for part in line))
             for line in _Canvas(simulation).blocks(width)]
    for line in lines:
        line.rstrip()
    return Text("\n").join(lines)


def fault(schedule: PipelineSchedule, rank: int, position: int) -> str:
    """Draw the part of a schedule around instruction `position` of `rank`, with an arrow at it."""
    simulation = replay(schedule, Durations())
    instruction, done = schedule.rows[rank][position], simulation.rows[rank]
    time = done[position].start if position < len(done) else done[-1].end if done else 0.0
    return _plain(_Canvas(simulation).around(time, _ERROR_WIDTH, {rank: (time, str(instruction))}))


def stuck(simulation: Simulation) -> str:
    """Draw a deadlocked simulation up to the deadlock, with an arrow at the next instruction of each rank that waits."""
    marks = {rank: (simulation.rows[rank][-1].end if simulation.rows[rank] else 0.0, f"{instruction} cannot start")
             for rank, instruction in simulation.stuck.items()}
    last = max((time for time, _ in marks.values()), default=0.0)
    return _plain(_Canvas(simulation).around(last, _ERROR_WIDTH, marks))


def mostly_idle(rows: Sequence[Sequence[Cell]]) -> bool:
    """Return whether a drawing would show almost nothing but idle time."""
    busy = max((sum(cell.end - cell.start for cell in row) for row in rows), default=0.0)
    return max((row[-1].end for row in rows if row), default=0.0) > _MAX_IDLE_RATIO * busy > 0


def per_unit(simulation: Simulation, size: float) -> float:
    """Return the drawn length of a unit of time for which the shortest instruction is `size` long.

    It is less where the longest instruction is more than `_MAX_STRETCH` times as long as the shortest.
    """
    kinds = {instruction.kind for row in simulation.schedule.rows for instruction in row}
    taken = [simulation.durations.of(kind) for kind in kinds] or [1.0]
    return size / max(min(taken), max(taken) / _MAX_STRETCH)


class _Canvas:
    """Maps the times of a simulation to columns of characters."""

    def __init__(self, simulation: Simulation):
        schedule = simulation.schedule
        self._rows = simulation.rows
        self._several = schedule.stages > schedule.ranks
        digits = len(str(schedule.microbatches - 1)) + (len(str(schedule.stages - 1)) if self._several else 0)
        self._cell = digits + 2  # kind and numbers, and the blank after the cell
        self._scale = per_unit(simulation, self._cell)
        self._end = self._column(simulation.makespan)
        self._names = ["time", *(f"rank {rank}" for rank in range(len(self._rows)))]
        self._margin = max(map(len, self._names)) + 2

    def blocks(self, width: int) -> Iterator[list[_Segment]]:
        """Yield the lines of all blocks, separated by empty lines; or `NOT_DRAWN` where ranks are almost always idle."""
        if mostly_idle(self._rows):
            yield from ([_Segment(line)] for line in textwrap.wrap(NOT_DRAWN, width))
            return
        blocks = math.ceil(self._end / self._columns(width))
        columns = self._cell * math.ceil(self._end / self._cell / max(blocks, 1))  # blocks of equal width
        for start in range(0, self._end, max(columns, 1)):
            if start:
                yield []
            yield from self._block(range(start, min(start + columns, self._end)), {})

    def around(self, time: float, width: int, marks: Mapping[int, tuple[float, str]]) -> Iterator[list[_Segment]]:
        """Yield the lines of one block around `time`.

        `marks` are rank -> (time, text): an arrow at that time with its text, on a line below the rank.
        """
        columns = self._columns(width)
        start = max(0, min(self._column(time) - columns // 2, self._end - columns))
        start -= start % self._cell
        yield from self._block(range(start, min(start + columns, max(self._end, start + 1))), marks)

    def _columns(self, width: int) -> int:
        columns = max(width - self._margin, self._cell)
        return columns - columns % self._cell

    def _column(self, time: float) -> int:
        return round(time * self._scale)

    def _block(self, window: range, marks: Mapping[int, tuple[float, str]]) -> Iterator[list[_Segment]]:
        name, *names = [name.ljust(self._margin) for name in self._names]
        yield [_Segment(name), *self._ruler(window)]
        for rank, row in enumerate(self._rows):
            yield [_Segment(names[rank]), *self._line(row, window)]
            if rank in marks:
                time, text = marks[rank]
                column = self._column(time)
                arrow = f"{'<' if column < window.start else '^'} {text}"  # '<': to the left of the block
                yield [_Segment(" " * (self._margin + max(0, column - window.start)) + arrow)]

    def _ruler(self, window: range) -> Iterator[_Segment]:
        least = _RULER_STEP / self._scale
        power = 10.0 ** math.floor(math.log10(least))
        step = next(power * digit for digit in (1, 2, 5, 10) if power * digit >= least)
        line = ""
        for number in range(math.ceil(window.start / self._scale / step), math.ceil(window.stop / self._scale / step)):
            column, label = self._column(number * step) - window.start, f"{number * step:g}"
            if (not line or len(line) < column) and column + len(label) <= len(window):
                line = line.ljust(column) + label
        yield _Segment(line)

    def _line(self, row: tuple[Cell, ...], window: range) -> Iterator[_Segment]:
        column = window.start
        for cell in row[bisect_right(row, window.start, key=lambda cell: self._column(cell.end)):]:
            start, stop = self._column(cell.start), self._column(cell.end)
            first, last = max(start, window.start), min(stop, window.stop)
            if first >= window.stop:
                break
            label = self._label(cell.instruction) if first == start else ""
            room = max(last - first - (last == stop), min(last - first, 1))  # a blank after it, unless it continues
            yield _Segment(" " * (first - column))
            yield _Segment((label if len(label) <= room else str(cell.instruction.kind)[:room]).ljust(room, "-"),
                           cell.instruction.kind)
            yield _Segment(" " * (last - first - room))
            column = last

    def _label(self, instruction: Instruction) -> str:
        return str(instruction) if self._several else f"{instruction.kind}{instruction.microbatch}"


def _plain(lines: Iterable[list[_Segment]]) -> str:
    return "\n".join("".join(part.text for part in line).rstrip() for line in lines)
