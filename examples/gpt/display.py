"""Rank 0 says where the run is: one live line in a terminal, a plain line every few steps anywhere else."""

from __future__ import annotations

import math
from types import TracebackType

from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from meter import Reading

BAR = 24
"""Columns of the progress bar, which gives way first when the terminal is narrow."""


class Display:
    """Shows one `Reading` per step on `console`: each of them in a terminal, one in `every` elsewhere."""

    def __init__(self, console: Console, every: int) -> None:
        self.console = console
        self.every = every
        self.live: Live | None = None

    def __enter__(self) -> Display:
        if self.console.is_terminal and not self.console.quiet:
            self.live = Live(console=self.console, refresh_per_second=4)
            self.live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
                 ) -> None:
        if self.live is not None:
            self.live.stop()

    def show(self, reading: Reading) -> None:
        if self.live is not None:
            self.live.update(with_bar(reading, self.live.console.width))
        elif reading.step % self.every == 0 or reading.step in (1, reading.steps):
            self.console.print(line(reading), highlight=False, soft_wrap=True)


def line(reading: Reading) -> str:
    """Say a reading in one line whose columns keep their places from step to step."""
    digits = len(str(reading.steps))
    return "  ".join((
        f"step {reading.step:>{digits}}/{reading.steps}",
        f"loss {reading.loss:.3f} ({reading.bits:.2f} bits)",
        f"grad {'n/a' if reading.gradient_norm is None else f'{reading.gradient_norm:.2f}':>5}",
        f"lr {reading.learning_rate:.1e}",
        f"scale {reading.loss_scale:g}",
        f"{reading.tokens_per_second:>6,.0f} tok/s",
        f"MFU {'n/a' if reading.utilisation is None else f'{reading.utilisation:.0%}':>3}",
        f"{size(reading.memory)}/rank",
        f"{clock(reading.seconds_left)} left",
    ))


def with_bar(reading: Reading, width: int) -> Table | Text:
    """Put a progress bar before the line where `width` columns leave room for both."""
    text = Text(line(reading))
    text.highlight_words(("step", "loss", "grad", "lr", "scale", "tok/s", "MFU", "/rank", "left"), "dim")
    if len(text) + BAR + 2 > width:
        return text
    grid = Table.grid(padding=(0, 2))
    grid.add_row(ProgressBar(total=reading.steps, completed=reading.step, width=BAR), text)
    return grid


def size(count: float) -> str:
    """Write a number of bytes with three digits and a decimal unit."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 999.5:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


def clock(seconds: float) -> str:
    """Write a duration as 0:42, 12:05 or 3:07:00."""
    if not math.isfinite(seconds):
        return "?:??"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
