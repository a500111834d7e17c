"""A loss curve beside its yardsticks, drawn twice: as a picture and as a block of text."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from rich.text import Text

LEVELS = " ▁▂▃▄▅▆▇█"
INK, ACCENT, MUTED, WARM = "#1f2933", "#0b7285", "#868e96", "#d9480f"


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """A horizontal line to compare a curve with."""

    name: str
    bits: float


class History:
    """The loss of every step, in bits per byte, in a CSV file; a resumed run goes on from the rows `until` its step."""

    def __init__(self, path: Path, until: int) -> None:
        rows = csv.DictReader(path.read_text().splitlines()) if until and path.exists() else []
        self.bits = {int(row["step"]): float(row["bits_per_byte"]) for row in rows if int(row["step"]) <= until}
        self.path = path

    def add(self, step: int, bits: float) -> None:
        self.bits[step] = bits

    def save(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(("step", "bits_per_byte"))
            writer.writerows((step, f"{bits:.6f}") for step, bits in self.bits.items())


def smooth(values: Sequence[float], reach: int) -> list[float]:
    """Return the mean of each value and of up to `reach` on either side; as many before as after where the curve starts."""
    result: list[float] = []
    for index in range(len(values)):
        near = min(reach, index)
        result.append(_mean(values[index - near:index + near + 1]))
    return result


def picture(path: Path, bits: dict[int, float], model: Mark, marks: Sequence[Mark], title: str) -> None:
    """Draw the training loss over steps into the PNG file `path`, with `model` at its end and a line at each of `marks`."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    steps = list(bits)
    figure = Figure(figsize=(9, 5), dpi=160, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.plot(steps, list(bits.values()), color=ACCENT, alpha=0.22, linewidth=0.8)
    axes.plot(steps, smooth(list(bits.values()), reach=max(3, len(steps) // 50)), color=ACCENT, linewidth=2.2)
    for mark in marks:
        axes.axhline(mark.bits, color=MUTED, linewidth=1, linestyle=(0, (5, 4)), zorder=0)
    axes.plot(steps[-1], model.bits, "o", color=WARM, markersize=7, clip_on=False, zorder=5)
    top = max(mark.bits for mark in marks) * 1.25
    for mark, height in zip((model, *marks), apart([mark.bits for mark in (model, *marks)], 0.045 * top), strict=True):
        axes.annotate(f"{mark.name}  {mark.bits:.2f}", (1, height), xycoords=("axes fraction", "data"), xytext=(10, 0),
                      textcoords="offset points", va="center", fontsize=9.5, annotation_clip=False,
                      color=WARM if mark is model else MUTED, fontweight="bold" if mark is model else "normal")
    axes.set(xlabel="step", ylabel="bits per byte", xlim=(0, steps[-1]), ylim=(0, top))
    axes.set_title(title, loc="left", color=INK, fontsize=12, fontweight="bold", pad=12)
    axes.grid(axis="y", color="#e9ecef", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=MUTED, length=0)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color("#ced4da")
    figure.savefig(path)


def text_picture(bits: dict[int, float], marks: Sequence[Mark], width: int = 52, height: int = 8) -> Text:
    """Draw the curve in `height` lines of block characters, with a dotted row at each mark."""
    values = list(bits.values())
    columns = [_mean(values[len(values) * i // width:max(len(values) * (i + 1) // width, len(values) * i // width + 1)])
               for i in range(min(width, len(values)))] if len(values) >= width else values
    top = max(mark.bits for mark in marks) * 1.15
    text = Text()
    for row in reversed(range(height)):
        low, high = top * row / height, top * (row + 1) / height
        mark = next((mark for mark in marks if low <= mark.bits < high), None)
        text.append(f"{high:4.1f} ", "dim")
        for value in columns:
            share = min(max((value - low) / (high - low), 0), 1)
            full = LEVELS[round(share * (len(LEVELS) - 1))]
            text.append(full if full != " " else "┄" if mark else " ", "cyan" if full != " " else "dim")
        text.append(f" {mark.name} {mark.bits:.2f}\n" if mark else "\n", "dim")
    text.append(f"     step 1{max(bits):>{max(len(columns) - 6, 0)}}", "dim")
    return text


def apart(heights: Sequence[float], distance: float) -> list[float]:
    """Move labels at `heights` up until any two are `distance` apart, keeping their order."""
    result = list(heights)
    order = sorted(range(len(heights)), key=lambda index: heights[index])
    for below, above in pairwise(order):
        result[above] = max(result[above], result[below] + distance)
    return result


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
