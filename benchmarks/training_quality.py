"""Quality of training runs: bits per byte of held-out text in the end, and of the training text on the way there."""

from __future__ import annotations

import csv
import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rate_curves import COLOURS

POINTS = 50  # of a curve: each is the mean of as many steps


@dataclass(frozen=True, slots=True, kw_only=True)
class Learned:
    """One run: `bits` of held-out text, and `training` bits by step."""

    bits: float
    training: dict[int, float]

    @classmethod
    def load(cls, folder: Path) -> Learned:
        """Read what examples/gpt/train.py left in `folder`."""
        rows = csv.DictReader((folder / "curve.csv").read_text().splitlines())
        return cls(bits=json.loads((folder / "quality.json").read_text())["bits_per_byte"],
                   training={int(row["step"]): float(row["bits_per_byte"]) for row in rows})

    def curve(self, points: int = POINTS) -> dict[int, float]:
        """Return the mean of each of `points` equal stretches of training, by its last step."""
        steps = sorted(self.training)
        width = max(1, len(steps) // points)
        stretches = [steps[start:start + width] for start in range(0, len(steps), width)]
        return {stretch[-1]: statistics.fmean(self.training[step] for step in stretch) for stretch in stretches}


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Several runs at one step."""

    step: int
    middle: float
    low: float
    high: float


def band(runs: Sequence[Learned]) -> list[Spread]:
    """Return mean, least and most of the runs' curves at every step that all of them have."""
    curves = [run.curve() for run in runs]
    return [Spread(step=step, middle=statistics.fmean(values), low=min(values), high=max(values))
            for step in sorted(set.intersection(*map(set, curves))) for values in [[curve[step] for curve in curves]]]


def picture(cases: Mapping[str, Sequence[Learned]], files: Sequence[Path], *, title: str) -> None:
    """Draw the training curve of each case with its band, and the held-out bits of its runs, into `files` (PNG, SVG)."""
    import matplotlib as mpl
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 5), dpi=160, layout="constrained")
    FigureCanvasAgg(figure)
    training, held_out = figure.subplots(1, 2, width_ratios=(2, 1))
    for place, ((name, runs), colour) in enumerate(zip(cases.items(), COLOURS, strict=False)):
        curve = band(runs)
        steps, bits = [point.step for point in curve], [run.bits for run in runs]
        training.plot(steps, [point.middle for point in curve], color=colour, linewidth=1.6, label=name)
        training.fill_between(steps, [point.low for point in curve], [point.high for point in curve], color=colour,
                              alpha=0.2, linewidth=0)
        held_out.plot([place] * len(bits), bits, "o", color=colour, markersize=4, alpha=0.6)
        held_out.plot([place - 0.25, place + 0.25], [statistics.fmean(bits)] * 2, color=colour, linewidth=2)
    training.set(xlabel="step", ylabel="bits per byte of the training text")
    training.set_title(title, loc="left", fontsize=11, pad=12)
    training.legend(frameon=False, fontsize=9)
    held_out.set_xticks(range(len(cases)), [name.replace(" (", "\n(") for name in cases], fontsize=9)
    held_out.set(xlim=(-0.6, len(cases) - 0.4), ylabel="bits per byte of held-out text, in the end")
    for axes in (training, held_out):
        axes.grid(axis="y", color="#e9ecef", linewidth=0.8)
        axes.set_axisbelow(True)
        axes.tick_params(which="both", length=0, colors="#495057", labelsize=9)
        for side in ("top", "right", "left"):
            axes.spines[side].set_visible(False)
    with mpl.rc_context({"svg.hashsalt": "shoal", "svg.fonttype": "none"}):  # the same curves give the same file
        for file in files:
            file.parent.mkdir(parents=True, exist_ok=True)
            figure.savefig(file, metadata={"Date": None} if file.suffix == ".svg" else None)
