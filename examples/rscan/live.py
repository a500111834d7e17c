"""Rank 0 says where a run is: one live line in a terminal, a plain line at each evaluation anywhere else."""

from __future__ import annotations

from types import TracebackType

from rich.console import Console
from rich.live import Live as Lines
from rich.progress_bar import ProgressBar
from rich.table import Table

import shoal
from record import Point

BAR = 24


class Live:
    """Shows the last evaluation on `console`, with a bar that moves at every step where the console is a terminal."""

    def __init__(self, console: Console, steps: int) -> None:
        self.console = console
        self.steps = steps
        self.said = ""
        self.lines: Lines | None = None

    def __enter__(self) -> Live:
        if self.console.is_terminal and not self.console.quiet:
            self.lines = Lines(console=self.console, refresh_per_second=4)
            self.lines.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self.lines is not None:
            self.lines.stop()

    def show(self, point: Point, engine: shoal.Engine) -> None:
        """Say an evaluation."""
        momentum = engine.get_mom()[0]
        first = momentum[0] if isinstance(momentum, tuple | list) else momentum
        self.said = line(point, self.steps, engine.get_lr()[0], first)
        if self.lines is None:
            self.console.print(self.said, highlight=False, soft_wrap=True)
        self.step(point.step)

    def step(self, step: int) -> None:
        """Move the bar."""
        if self.lines is not None:
            grid = Table.grid(padding=(0, 2))
            grid.add_row(ProgressBar(total=self.steps, completed=step, width=BAR), self.said)
            self.lines.update(grid)


def line(point: Point, steps: int, learning_rate: float, momentum: float) -> str:
    """Say an evaluation in one line whose columns keep their places."""
    pace = point.samples / point.seconds if point.seconds else 0.0
    return "  ".join((
        f"step {point.step:>{len(str(steps))}}/{steps}",
        f"loss {'  n/a' if point.loss != point.loss else f'{point.loss:5.3f}'}",
        f"AUC {point.auc:.4f}",
        f"lr {learning_rate:.1e}",
        f"momentum {momentum:.3f}",
        f"{pace:>7,.0f} samples/s",
        f"{point.seconds:6.1f} s",
    ))
