"""Results of a benchmark in one format: tables, targets with a verdict, and all measurements as JSON."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from machine import ROOT, facts
from rich.console import Console
from rich.table import Table

FOLDER = ROOT / "out" / "benchmarks"


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """Return the lower quartile, the median and the upper one; not-a-number where there is no value."""
    if len(values) < 2:
        only = values[0] if values else math.nan
        return only, only, only
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high


STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
"""Quantiles of Student's t at 0.975, by degrees of freedom from 1."""


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the bounds within which the mean lies with 95 % confidence (Student's t); all numbers where there is one value.

    Of paired values, which are differences within a seed, what the seed does to both sides is not in it.
    """
    if len(values) < 2:
        return -math.inf, math.inf
    half = STUDENT[min(len(values) - 1, len(STUDENT)) - 1] * statistics.stdev(values) / math.sqrt(len(values))
    return statistics.fmean(values) - half, statistics.fmean(values) + half


def spread_ratio(values: Sequence[float]) -> str:
    """Return the median of some ratios with their quartiles, as text."""
    low, middle, high = quartiles(values)
    return f"{middle:.2f} ({low:.2f} to {high:.2f})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sheet:
    """A table of text."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def markdown(self) -> str:
        """Return the table in Markdown, numbers to the right."""
        lines = [self.columns, ("---", *["---:"] * (len(self.columns) - 1)), *self.rows]
        return "\n".join("| " + " | ".join(line) + " |" for line in lines)

    def rich(self) -> Table:
        """Return the table for a terminal."""
        table = Table(title=self.title, title_justify="left")
        for number, column in enumerate(self.columns):
            table.add_column(column, justify="left" if number == 0 else "right")
        for row in self.rows:
            table.add_row(*row)
        return table


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A promise: `measured`, and where it has a spread all of that, must lie within [low, high].

    Where only a part of the spread does, it is not resolved whether the promise holds.
    """

    what: str
    measured: float
    high: float
    low: float = float("-inf")
    unit: str = ""
    spread: tuple[float, float] | None = None
    """The quartiles of the rounds of which `measured` is the median, or the interval of a mean over seeds."""

    @classmethod
    def over(cls, rounds: Sequence[float], *, what: str, low: float = -math.inf, high: float = math.inf) -> Self:
        """Return the promise about the median of ratios by round, with their quartiles."""
        first, middle, third = quartiles(rounds)
        return cls(what=what, measured=middle, low=low, high=high, spread=(first, third) if len(rounds) > 1 else None)

    @property
    def met(self) -> bool:
        return all(map(self._allows, (self.measured, *(self.spread or ()))))

    @property
    def verdict(self) -> str:
        if self.met:
            return "met"
        return "**not resolved**" if self._allows(self.measured) else "**missed**"

    def _allows(self, value: float) -> bool:
        return self.low <= value <= self.high

    def _text(self, value: float) -> str:
        """Return `value` in three digits, or in as many as it takes to be on the same side of the limits."""
        texts = (f"{value:.{digits}g}" for digits in range(3, 17))
        return next((text for text in texts if self._allows(float(text)) == self._allows(value)), str(value))

    def row(self) -> tuple[str, ...]:
        """Return what, the limits, the measurement and the verdict as text."""
        bounds = {(False, False): "", (False, True): f"at most {self.high:g}", (True, False): f"at least {self.low:g}",
                  (True, True): f"{self.low:g} to {self.high:g}"}
        limits = bounds[self.low != float("-inf"), self.high != float("inf")]
        spread = f" ({self._text(self.spread[0])} to {self._text(self.spread[1])})" if self.spread else ""
        return self.what, f"{limits}{self.unit}", f"{self._text(self.measured)}{self.unit}{spread}", self.verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Everything that one benchmark found."""

    benchmark: str
    command: str
    note: str
    sheets: tuple[Sheet, ...]
    targets: tuple[Target, ...]
    raw: Any
    pictures: tuple[str, ...] = ()
    """Files that were drawn, of docs/images."""

    def publish(self, out: Path | None) -> None:
        """Print the tables and write the JSON to `out` (default: out/benchmarks/<benchmark>.json)."""
        out = out or FOLDER / f"{self.benchmark}.json"
        out.parent.mkdir(parents=True, exist_ok=True)
        verdicts = [{**asdict(target), "met": target.met, "row": target.row()} for target in self.targets]
        document = {"benchmark": self.benchmark, "command": self.command, "note": self.note, "machine": facts(),
                    "sheets": [asdict(sheet) for sheet in self.sheets], "targets": verdicts, "pictures": self.pictures,
                    "raw": self.raw}
        out.write_text(json.dumps(document, indent=1, default=str) + "\n")
        console = Console()
        console.width = max(console.width, 130)
        for sheet in (*self.sheets, *_verdicts(self.targets)):
            console.print(sheet.rich())
        console.print(self.note)
        console.print(f"written to {out}")


def _verdicts(targets: Sequence[Target]) -> list[Sheet]:
    return [targets_sheet([target.row() for target in targets])] if targets else []


def targets_sheet(rows: Sequence[Sequence[str]]) -> Sheet:
    """Return the table of targets, a row for each."""
    return Sheet(title="Targets", columns=("target", "allowed", "measured", ""), rows=tuple(tuple(row) for row in rows))
