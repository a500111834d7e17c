"""The lab's rows as a table, as bars of text, and as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from display import size
from probe import Finding
from shoal.zero.placement import StateBytes

PARTS = {"weight": ("cyan", "#0b7285"), "gradient": ("yellow", "#f08c00"), "master": ("magenta", "#862e9c"),
         "moments": ("blue", "#364fc7")}
"""The four tensors per parameter, and their colours in a terminal and in a picture."""

REST = "#dee2e6"
WIDTH = 48


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One stage: what its formula says of a rank, after initialisation and in training, and what was found."""

    stage: int
    ranks: int
    microbatch: int
    parameters: int
    formula_at_first: StateBytes
    formula: StateBytes
    found: Finding


def parts(state: StateBytes) -> dict[str, int]:
    """Name the bytes of a state in the order in which they are drawn."""
    return {"weight": state.weight, "gradient": state.gradient, "master": state.master, "moments": state.moments}


def table(rows: Sequence[Row], title: str) -> Table:
    """Lay formula and measurement side by side, in bytes of one rank."""
    result = Table(title=f"MB of one rank: {title}", title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0),
                   pad_edge=False, header_style="bold", caption_justify="left",
                   caption="formula, state: weight, gradient, master, moments; process: all it took for them")
    for name in ("stage", "ranks", "micro-\nbatch", "param-\neters", "at init\nformula", "state", "process",
                 "trained\nformula", "state", "peak of\nprocess"):
        result.add_column(name, justify="right", no_wrap=True, vertical="bottom")
    for row in rows:
        found = row.found
        result.add_row(str(row.stage), str(row.ranks), str(row.microbatch), f"{row.parameters / 1e6:.1f} M",
                       *(f"{count / 1e6:.1f}" for count in (
                           row.formula_at_first.total, found.state_at_first.total, found.memory_at_first,
                           row.formula.total, found.state.total, found.peak)))
    return result


def text_picture(rows: Sequence[Row]) -> Text:
    """Draw one bar a stage: the measured model state by part, then the rest of the process's peak."""
    longest = max(row.found.peak for row in rows)
    text = Text()
    for row in rows:
        text.append(f"stage {row.stage}  ")
        drawn = 0
        for name, count in parts(row.found.state).items():
            cells = round(WIDTH * count / longest)
            text.append("█" * cells, PARTS[name][0])
            drawn += cells
        text.append("░" * max(0, round(WIDTH * row.found.peak / longest) - drawn), "dim")
        text.append(f" {size(row.found.state.total)} of {size(row.found.peak)}\n")
    text.append("         ")
    for name, (colour, _) in PARTS.items():
        text.append("█ ", colour)
        text.append(f"{name}  ")
    text.append("░ ", "dim")
    text.append("everything else")
    return text


def picture(path: Path, rows: Sequence[Row], title: str) -> None:
    """Draw two bars a stage, formula and measurement, into the PNG file `path`."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5), dpi=160, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for place, row in enumerate(rows):
        for side, state in ((-0.2, row.formula), (0.2, row.found.state)):
            bottom = 0.0
            for name, count in parts(state).items():
                axes.bar(place + side, count / 1e6, 0.36, bottom=bottom, color=PARTS[name][1],
                         alpha=0.55 if side < 0 else 1.0, zorder=3, label=name if (place, side > 0) == (0, True) else None)
                bottom += count / 1e6
            axes.annotate(f"{bottom:.0f}", (place + side, bottom), xytext=(0, 3), textcoords="offset points", ha="center",
                          fontsize=9, color="#495057")
        axes.bar(place + 0.2, row.found.peak / 1e6, 0.36, color=REST, zorder=2,
                 label="activations, buffers, the rest" if place == 0 else None)
    axes.set_xticks(range(len(rows)), [f"\nstage {row.stage}" for row in rows], fontsize=11, fontweight="bold")
    axes.set_xticks([place + side for place in range(len(rows)) for side in (-0.2, 0.2)],
                    ["formula", "measured"] * len(rows), minor=True)
    axes.set_ylabel("MB of one rank")
    axes.set_title(title, loc="left", fontsize=12, fontweight="bold", pad=12)
    axes.grid(axis="y", color="#e9ecef", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(which="both", length=0, colors="#495057")
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.legend(frameon=False, loc="upper right")
    figure.savefig(path)
