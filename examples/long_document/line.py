"""Where a run is: one live line in a terminal, a plain line now and then anywhere else."""

from __future__ import annotations

from dataclasses import dataclass
from types import TracebackType

from rich.console import Console
from rich.live import Live as Lines
from rich.progress_bar import ProgressBar
from rich.table import Table

from display import clock

BAR = 24


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """A step: its loss in bits per byte, the bytes read so far, and the seconds that took."""

    step: int
    steps: int
    bits: float
    learning_rate: float
    read: int
    seconds: float

    @property
    def line(self) -> str:
        """This in one line, whose columns keep their places."""
        left = self.seconds / self.step * (self.steps - self.step)
        return "  ".join((
            f"step {self.step:>{len(str(self.steps))}}/{self.steps}", f"{self.bits:.3f} bits/byte",
            f"lr {self.learning_rate:.1e}", f"{self.read / self.seconds:>8,.0f} bytes/s", f"{clock(left)} left"))


class Live:
    """Shows readings of the run `name` on `console`: each in a terminal, one in `every` elsewhere."""

    def __init__(self, console: Console, name: str, every: int) -> None:
        self.console, self.name, self.every = console, name, every
        self.lines: Lines | None = None

    def __enter__(self) -> Live:
        if self.console.is_terminal:
            self.lines = Lines(console=self.console, refresh_per_second=4)
            self.lines.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self.lines is not None:
            self.lines.stop()

    def show(self, reading: Reading) -> None:
        """Say a step of the training."""
        if self.lines is not None:
            grid = Table.grid(padding=(0, 2))
            bar = ProgressBar(total=reading.steps, completed=reading.step, width=BAR)
            grid.add_row(bar, f"{self.name:>6}", reading.line)
            self.lines.update(grid)
        elif reading.step % self.every == 0 or reading.step in (1, reading.steps):
            self.console.print(f"{self.name:>6}  {reading.line}", highlight=False, soft_wrap=True)

    def say(self, text: str) -> None:
        """Say something in the live line; nothing where there is none."""
        if self.lines is not None:
            self.lines.update(text)
