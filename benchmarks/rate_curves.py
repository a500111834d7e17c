"""Curves over the rate of a link: where two of them cross, and their picture."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import link

COLOURS = ("#495057", "#adb5bd", "#364fc7", "#0b7285", "#f08c00", "#862e9c", "#c2255c")
BEYOND = 3.0  # times the highest rate, where "unlimited" is drawn


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """Samples a second at a rate: the median over rounds, and the lowest and highest."""

    rate: str
    middle: float
    low: float
    high: float


Curves = Mapping[str, Sequence[Point]]


def crossover(one: Sequence[Point], other: Sequence[Point]) -> float | None:
    """Return the bits a second from which `other` is at least as fast as `one`; None where they do not cross.

    Between two rates that were measured, the logarithm of the ratio is taken as linear in that of the rate. Without a
    limit there is no rate to interpolate towards: a crossing there is None, and so is one outside of what was measured.
    """
    ratios = [(bits, math.log(theirs.middle / mine.middle)) for mine, theirs in zip(one, other, strict=True)
              if (bits := link.rate(mine.rate)) is not None]
    for (bits, ratio), (more, next_ratio) in pairwise(ratios):
        if ratio < 0 <= next_ratio:
            return bits * (more / bits) ** (ratio / (ratio - next_ratio))
    return None


def where(one: Sequence[Point], other: Sequence[Point]) -> str:
    """Say from which rate on `other` is at least as fast as `one`."""
    if at := crossover(one, other):
        return words(at)
    wins = [point.rate for point, theirs in zip(one, other, strict=True) if theirs.middle >= point.middle]
    if not wins:
        return "nowhere"
    return "everywhere" if len(wins) == len(one) else " and ".join(wins)


def picture(curves: Curves, files: Sequence[Path], *, title: str, crossing: float | None = None, over: str = "") -> None:
    """Draw the curves, both axes logarithmic, into `files`, whose endings say of which kind (PNG, SVG).

    With `over`, the name of a curve, how many times as fast as that one each is stands beside it.
    """
    import matplotlib as mpl
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 5) if over else (9, 5), dpi=160, layout="constrained")
    FigureCanvasAgg(figure)
    axes, *beside = figure.subplots(1, 2 if over else 1, squeeze=False)[0]
    places = _places([point.rate for points in curves.values() for point in points])
    _panel(axes, curves, places, "samples a second")
    if crossing is not None:
        axes.axvline(crossing, color="#adb5bd", linestyle="--", linewidth=1)
        axes.annotate(f"as fast at {words(crossing)}", (crossing, 0), xycoords=axes.get_xaxis_transform(), xytext=(4, 6),
                      textcoords="offset points", fontsize=9, color="#495057")
    axes.set_title(title, loc="left", fontsize=11, pad=12)
    axes.legend(frameon=False, fontsize=9)
    for panel in beside:
        _panel(panel, {name: ratios(points, curves[over]) for name, points in curves.items()}, places,
               f"times as fast as {over}")
    with mpl.rc_context({"svg.hashsalt": "shoal", "svg.fonttype": "none"}):  # the same curves give the same file
        for file in files:
            file.parent.mkdir(parents=True, exist_ok=True)
            figure.savefig(file, metadata={"Date": None} if file.suffix == ".svg" else None)


def ratios(points: Sequence[Point], over: Sequence[Point]) -> list[Point]:
    """Return the points in units of the other curve's at the same rate, which are taken as they stand in the middle."""
    units = {point.rate: point.middle for point in over}
    return [Point(rate=point.rate, middle=point.middle / unit, low=point.low / unit, high=point.high / unit)
            for point in points if (unit := units.get(point.rate))]


def _panel(axes: Any, curves: Curves, places: Mapping[str, float], what: str) -> None:
    """Draw the curves over the rates at their places."""
    for (name, points), colour in zip(curves.items(), itertools.cycle(COLOURS)):
        x = [places[point.rate] for point in points]
        middle = [point.middle for point in points]
        spread = [[point.middle - point.low for point in points], [point.high - point.middle for point in points]]
        axes.errorbar(x, middle, yerr=spread, color=colour, marker="o", markersize=4, linewidth=1.6, capsize=2, label=name)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xticks(list(places.values()), [_label(rate) for rate in places])
    axes.set_xticks([], minor=True)
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter("{x:g}")
    axes.set_xlabel("rate of the link between the hosts, each way")
    axes.set_ylabel(what)
    axes.grid(color="#e9ecef", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(which="both", length=0, colors="#495057", labelsize=9)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)


def words(bits: float) -> str:
    """Return a rate as people say it: `740 Mbit/s`, `1.3 Gbit/s`."""
    return f"{bits / 1e9:.3g} Gbit/s" if bits >= 1e9 else f"{bits / 1e6:.3g} Mbit/s"


def _label(rate: str) -> str:
    bits = link.rate(rate)
    return words(bits).replace(" ", "\n") if bits else "no\nlimit"


def _places(rates: Sequence[str]) -> dict[str, float]:
    """Return where each rate is drawn, from low to high; the one without a limit stands apart."""
    limited = {rate: bits for rate in rates if (bits := link.rate(rate)) is not None}
    places = dict(sorted(limited.items(), key=lambda item: item[1]))
    if len(places) < len(set(rates)):
        places[link.UNLIMITED] = BEYOND * max(places.values(), default=1e9)
    return places
