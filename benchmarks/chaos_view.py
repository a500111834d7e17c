"""The view of a training under chaos: its ranks, its faults, its goodput, and its losses beside those of an undisturbed one.

On a terminal it is drawn anew four times a second; elsewhere each fault is a line. At the end the losses are an SVG.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from shoal.recording.page import Reading

__all__ = ["Losses", "View"]

PERIOD = 0.25
"""Seconds between two drawings."""
LATEST = 8
"""Faults that are shown."""
LEVELS = "▁▂▃▄▅▆▇█"


@dataclass(slots=True)
class Losses:
    """The losses that a training has noted: lines `seconds step loss`, of which a step taken again has the last."""

    path: Path
    by_step: dict[int, float] = field(default_factory=dict[int, float])
    moments: dict[int, float] = field(default_factory=dict[int, float])
    """When each step was taken first."""
    values: dict[int, set[float]] = field(default_factory=dict[int, set[float]])
    """Every loss that a step has had."""
    begun: float | None = None
    latest: float = 0.0
    pause: float = 0.0
    """Seconds that the other training sleeps after each step, and this one does not."""
    _read: int = 0

    def read(self) -> None:
        """Read what was added."""
        if not self.path.exists():
            return
        with self.path.open("rb") as file:
            file.seek(self._read)
            text = file.read()
        whole = text[:text.rfind(b"\n") + 1]
        self._read += len(whole)
        for line in whole.decode().splitlines():
            moment, step, loss = line.split()
            self.begun = float(moment) if self.begun is None else self.begun
            self.latest = float(moment)
            self.moments.setdefault(int(step), float(moment))
            self.by_step[int(step)] = float(loss)
            self.values.setdefault(int(step), set()).add(float(loss))

    def unlike(self, expected: Losses) -> list[int]:
        """Return the steps that had, at any time that they were taken, another loss than `expected` has, in any bit."""
        return sorted(step for step, values in self.values.items() if values != expected.values.get(step))

    @property
    def step_seconds(self) -> float:
        """The seconds of a step, over all, with the pause after it."""
        return (self.latest - (self.begun or 0.0)) / max(1, len(self.by_step) - 1) + self.pause


class View:
    """What is seen of a job while it runs, as a context manager; `expected` are the losses of an undisturbed one."""

    def __init__(self, title: str, expected: Losses, losses: Losses, *, console: Console | None = None) -> None:
        self._title = title
        self._expected = expected
        self._losses = losses
        self._faults: list[str] = []
        self._at: list[int] = []
        self._drawn = 0.0
        console = console or Console()
        self._live = Live(console=console, auto_refresh=False, transient=True) if console.is_terminal else None

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._live is not None:
            self._live.stop()

    @property
    def goodput(self) -> float:
        """The share of the time since the first step that was spent on steps which count."""
        if self._losses.begun is None or self._losses.latest <= self._losses.begun:
            return 0.0
        useful = (max(self._losses.by_step) - min(self._losses.by_step)) * self._expected.step_seconds
        return useful / (self._losses.latest - self._losses.begun)

    def fault(self, line: str, step: int) -> None:
        """Show a fault that the job has survived, which came at `step`."""
        self._faults.append(line)
        self._at.append(step)
        if self._live is None:
            print(line, flush=True)

    def update(self, pages: Sequence[Reading | None]) -> None:
        """Draw, if it is time to."""
        if self._live is None or time.monotonic() - self._drawn < PERIOD:
            return
        self._drawn = time.monotonic()
        self._losses.read()
        ranks = Table("rank", "process", "call", "for", "steps", "waits for", title=self._title, title_justify="left")
        for rank, page in enumerate(pages):
            if page is None:
                ranks.add_row(str(rank), "", "starts")
            else:
                ranks.add_row(str(rank), str(page.pid), page.phase.name.lower(), f"{self._drawn - page.since:.1f} s",
                              str(page.steps), page.waits_for if page.waits else "")
        lines = (Text(line) for line in (*self._faults[-LATEST:], f"goodput {self.goodput:.0%}"))
        self._live.update(Group(ranks, *lines, self._curves()), refresh=True)

    def _curves(self) -> Text:
        """Return both curves in blocks, one above the other, at the same scale."""
        width = min(100, max(20, (self._live.console.width if self._live is not None else 80) - 16))
        steps = max(self._expected.by_step, default=1)
        low, high = min(self._expected.by_step.values(), default=0.0), max(self._expected.by_step.values(), default=1.0)
        text = Text()
        for name, losses, style in (("undisturbed", self._expected, "dim"), ("disturbed", self._losses, "cyan")):
            text.append(f"{name:>12}  ", "dim")
            for column in range(width):
                step = 1 + column * (steps - 1) // max(1, width - 1)
                loss = losses.by_step.get(step)
                share = 0.0 if loss is None else min(1.0, max(0.0, (loss - low) / max(1e-9, high - low)))
                text.append(" " if loss is None else LEVELS[round(share * (len(LEVELS) - 1))], style)
            text.append("\n")
        return text

    def picture(self, path: Path) -> None:
        """Draw both curves and the faults into the SVG `path`."""
        from matplotlib.backends.backend_svg import FigureCanvasSVG
        from matplotlib.figure import Figure

        self._losses.read()
        figure = Figure(figsize=(9, 4), layout="constrained")
        FigureCanvasSVG(figure)
        axes = figure.add_subplot()
        axes.plot(list(self._expected.by_step), list(self._expected.by_step.values()), color="#ced4da", linewidth=4,
                  label="undisturbed")
        steps = sorted(self._losses.by_step)
        axes.plot(steps, [self._losses.by_step[step] for step in steps], color="#0b7285", linewidth=1, label="disturbed")
        for step in self._at:
            axes.axvline(step, color="#d9480f", linewidth=0.8, alpha=0.6)
        axes.set(xlabel="step; each line is a fault", ylabel="loss")
        axes.set_title(f"{self._title}: goodput {self.goodput:.0%}", loc="left")
        axes.legend(frameon=False)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, metadata={"Date": None})
