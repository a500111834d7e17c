"""Runs side by side: the table, and AUC over samples and over seconds as a picture and as text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from display import clock
from record import Record, mean_and_spread

COLOURS = (("white", "#868e96"), ("cyan", "#0b7285"), ("yellow", "#f08c00"), ("magenta", "#862e9c"))
"""Of one system after the other, in a terminal and in a picture."""

MARKERS = "1ox+"
"""Of the same systems, in text without colours."""

WIDTH, HEIGHT = 64, 10
LOW, HIGH = 0.5, 1.0
"""The AUC of chance, and of what never errs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class System:
    """The runs of one name, one for each seed."""

    name: str
    records: list[Record]

    def value(self, numbers: Sequence[float], form: str) -> str:
        """Write the mean over seeds, and the spread where there are several."""
        mean, spread = mean_and_spread(numbers)
        return f"{mean:{form}}" + (f" ±{spread:{form}}" if len(numbers) > 1 else "")

    def time_to(self, target: float) -> str:
        """Write when the AUC was `target`, or in how many seeds it was."""
        reached = [seconds for record in self.records if (seconds := record.seconds_to(target)) is not None]
        if len(reached) < len(self.records):
            return f"{len(reached)} of {len(self.records)} seeds" if reached else "never"
        mean, spread = mean_and_spread(reached)
        return clock(mean) + (f" ±{spread:.0f} s" if len(reached) > 1 else "")


def table(systems: Sequence[System], target: float, title: str) -> Table:
    """Lay pace, AUC for samples, and time to the target side by side."""
    samples = [systems[0].records[0].points[-1].samples * part // 4 for part in (1, 4)]
    seeds = len(systems[0].records)
    result = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False,
                   header_style="bold", caption_justify="left",
                   caption=f"mean of {seeds} seeds ± half the range" if seeds > 1 else "one seed")
    result.add_column("", no_wrap=True)
    heads = ("samples/s", "MB sent\na step", *(f"AUC after\n{count:,}" for count in samples), f"time to\nAUC {target:g}")
    for head in heads:
        result.add_column(head, justify="right", no_wrap=True, vertical="bottom")
    for system in systems:
        records = system.records
        result.add_row(system.name, system.value([record.samples_per_second for record in records], ",.0f"),
                       f"{mean_and_spread([record.bytes_per_step for record in records])[0] / 1e6:.1f}",
                       *(system.value([record.auc_at(count) for record in records], ".3f") for count in samples),
                       system.time_to(target))
    return result


def text_picture(systems: Sequence[System], target: float) -> Text:
    """Draw the AUC of each system's first seed over its training seconds, with a dotted row at `target`."""
    last = max(system.records[0].points[-1].seconds for system in systems)
    grid = [[" "] * WIDTH for _ in range(HEIGHT)]
    at = _row(target)
    grid[at] = ["┄"] * WIDTH
    for number, system in enumerate(systems):
        for point in system.records[0].points:
            grid[_row(point.auc)][min(WIDTH - 1, int(point.seconds / last * WIDTH))] = MARKERS[number % len(MARKERS)]
    colours = {marker: COLOURS[number][0] for number, marker in enumerate(MARKERS)}
    text = Text()
    for row in reversed(range(HEIGHT)):
        text.append(f"{LOW + (HIGH - LOW) * row / HEIGHT:4.2f} ", "dim")
        for marker in grid[row]:
            text.append(marker, colours.get(marker, "dim"))
        text.append(f" AUC {target:g}\n" if row == at else "\n", "dim")
    text.append(f"     0{last:>{WIDTH - 3}.0f} s", "dim")
    for number, system in enumerate(systems):
        text.append(f"\n     {MARKERS[number % len(MARKERS)]} {system.name}", COLOURS[number % len(COLOURS)][0])
    return text


def picture(files: Sequence[Path], systems: Sequence[System], target: float, title: str) -> None:
    """Draw AUC over samples and over seconds into `files`, each seed as a thin line, all of a system in one colour."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.6), dpi=160, layout="constrained")
    FigureCanvasAgg(figure)
    over = {"samples": lambda point: point.samples, "seconds": lambda point: point.seconds}
    for axes, (what, place) in zip(figure.subplots(1, 2, sharey=True), over.items(), strict=True):
        for number, system in enumerate(systems):
            for seed, record in enumerate(system.records):
                axes.plot([place(point) for point in record.points], [point.auc for point in record.points],
                          color=COLOURS[number % len(COLOURS)][1], linewidth=1.8 if seed == 0 else 1.0,
                          alpha=1.0 if seed == 0 else 0.5, label=system.name if seed == 0 else None)
        axes.axhline(target, color="#868e96", linewidth=1, linestyle=(0, (5, 4)), zorder=0)
        axes.set(xlabel=f"{what} of training", xlim=(0, None))
        axes.grid(axis="y", color="#e9ecef", linewidth=0.8)
        axes.set_axisbelow(True)
        axes.tick_params(colors="#868e96", length=0)
        for side in ("top", "right", "left"):
            axes.spines[side].set_visible(False)
    figure.axes[0].set_ylabel("AUC on held-out modules")
    figure.axes[1].legend(frameon=False, loc="lower right")
    figure.suptitle(title, x=0.01, ha="left", fontsize=12, fontweight="bold")
    for file in files:
        file.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(file)


def _row(auc: float) -> int:
    """Return the row of text in which an AUC is drawn."""
    return min(HEIGHT - 1, max(0, int((auc - LOW) / (HIGH - LOW) * HEIGHT + 1e-9)))
