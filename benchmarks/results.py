"""Results of a benchmark in one format: tables, targets with a verdict, and all measurements as JSON."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

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
    """A promise: `measured` must lie within [low, high]."""

    what: str
    measured: float
    high: float
    low: float = float("-inf")
    unit: str = ""
    spread: tuple[float, float] | None = None
    """The quartiles of the rounds of which `measured` is the median."""

    @property
    def met(self) -> bool:
        return self.low <= self.measured <= self.high

    def row(self) -> tuple[str, ...]:
        """Return what, the limits, the measurement and the verdict as text."""
        bounds = {(False, False): "", (False, True): f"at most {self.high:g}", (True, False): f"at least {self.low:g}",
                  (True, True): f"{self.low:g} to {self.high:g}"}
        limits = bounds[self.low != float("-inf"), self.high != float("inf")]
        spread = f" ({self.spread[0]:.3g} to {self.spread[1]:.3g})" if self.spread else ""
        return (self.what, f"{limits}{self.unit}", f"{self.measured:.3g}{self.unit}{spread}",
                "met" if self.met else "**missed**")


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
