"""A plot of the lanes of one step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from shoal.tier import Event
from timeline import LANES, WAITING, Interval, Timeline, difference, short, union

COLOURS = {"read": "#1971c2", "forward": "#0b7285", "backward": "#f08c00", "step": "#862e9c", "wait": "#c92a2a",
           "write": "#2f9e44"}
INK, MUTED, GRID = "#1f2933", "#868e96", "#e9ecef"
LETTER = 0.0075
"""Width of a letter as a fraction of the axis."""

PIXELS = 1000
"""Gaps shorter than the step divided by this are invisible, and merged."""


def plot(path: Path, timeline: Timeline, events: Sequence[Event], title: str) -> None:
    """Draw `timeline`, made of `events`, to the PNG or SVG file `path`."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4), dpi=160, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for height, lane in enumerate(reversed(LANES)):
        numbers: dict[str, int] = {}
        for name, intervals in unit_intervals(timeline, events, lane):
            merged = union(intervals, gap=timeline.seconds / PIXELS)
            even = numbers.setdefault(name, len(numbers)) % 2 == 0
            axes.broken_barh([(start - timeline.start, stop - start) for start, stop in merged], (height - 0.36, 0.72),
                             facecolors=COLOURS[lane], alpha=1.0 if even else 0.72, linewidth=0)
            start, stop = max(merged, key=lambda time: time[1] - time[0])
            if label := fitting_label(name, (stop - start) / timeline.seconds):
                axes.text((start + stop) / 2 - timeline.start, height, label, ha="center", va="center", fontsize=7,
                          color="white")
        axes.annotate(f"{timeline.share(lane):.0%}", (1, height), xycoords=("axes fraction", "data"), xytext=(8, 0),
                      textcoords="offset points", va="center", fontsize=9.5, color=COLOURS[lane])
    axes.set_yticks(range(len(LANES)), list(reversed(LANES)), fontsize=10.5, color=INK)
    axes.set(xlabel="seconds", xlim=(0, timeline.seconds), ylim=(-0.6, len(LANES) - 0.4))
    axes.set_title(title, loc="left", color=INK, fontsize=12, fontweight="bold", pad=12)
    axes.grid(axis="x", color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(length=0, labelcolor=INK)
    axes.tick_params(axis="x", labelcolor=MUTED)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color("#ced4da")
    figure.savefig(path)


def unit_intervals(timeline: Timeline, events: Sequence[Event], lane: str) -> Iterator[tuple[str, list[Interval]]]:
    """Yield the intervals of a lane unit by unit; where two units overlap, the time belongs to the first."""
    runs: list[tuple[str, list[Interval]]] = []
    for event in sorted((event for event in events if event.lane == lane), key=lambda event: event.start):
        if not runs or runs[-1][0] != short(event.name):
            runs.append((short(event.name), []))
        runs[-1][1].append((event.start, event.stop))
    taken = timeline.lanes["wait"] if lane in WAITING else []
    for name, times in runs:
        if own := difference(union(times), taken):
            yield name, own
            taken = union([*taken, *own])


def fitting_label(name: str, share: float) -> str:
    """Return the longest form of a unit's name that fits `share` of the axis: `blocks.12`, `12` or nothing."""
    return next((label for label in (name, name.rpartition(".")[2]) if len(label) * LETTER < share), "")
