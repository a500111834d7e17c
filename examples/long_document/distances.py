"""Two readers side by side: the table, and the bits of names by how far back their last use is, as picture and as text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

COLOURS = {"dense": ("white", "#868e96"), "sparse": ("cyan", "#0b7285")}
"""Of each way, in a terminal and in a picture."""

BAR = 40
MEBI = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """What one training pass takes: bytes at the peak, and seconds of processor time."""

    bytes: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What a way read at once, what that took, and the bits of held-out files by part and by distance of names."""

    way: str
    length: int
    memory: Memory
    seconds: float
    parts: dict[str, float]
    names: dict[str, float]
    counts: dict[str, int]

    @staticmethod
    def of(way: str, length: int, memory: Memory, facts: dict[str, Any]) -> Result:
        """Read the JSON of `train.py`."""
        return Result(way=way, length=length, memory=memory, seconds=facts["seconds"],
                      parts={each["name"]: each["bits"] for each in facts["parts"]},
                      names={each["name"]: each["bits"] for each in facts["names"] if each["bytes"]},
                      counts={each["name"]: each["bytes"] for each in facts["names"]})


def table(results: Sequence[Result]) -> Table:
    """Lay length, memory, time and bits per byte side by side."""
    near = results[0].length
    result = Table(title="Held-out files of the standard library, bits per byte", title_justify="left", box=SIMPLE_HEAD,
                   padding=(0, 1, 0, 0), pad_edge=False, header_style="bold")
    result.add_column("", no_wrap=True)
    heads = ("reads\nat once", "memory of\na pass, MiB", "training,\nCPU s", f"first {near:,}\nbytes", "the rest", "all")
    for head in heads:
        result.add_column(head, justify="right", no_wrap=True, vertical="bottom")
    for each in results:
        result.add_row(each.way, f"{each.length:,}", f"{each.memory.bytes / MEBI:,.0f}", f"{each.seconds:,.0f}",
                       *(f"{each.parts[name]:.3f}" for name in ("near", "far", "all")))
    return result


def text_picture(results: Sequence[Result]) -> Text:
    """Draw the bits of names as bars, one for each way and distance."""
    text = Text("Bits per byte of names that only the file itself tells, by bytes since their last use\n", "bold")
    most = max(bits for each in results for bits in each.names.values())
    for name in results[0].names:
        for number, each in enumerate(results):
            label = f"{name} ({each.counts[name]:,} bytes)" if number == 0 else ""
            text.append(f"{label:>30} ", "dim")
            bits = each.names[name]
            text.append("━" * max(1, round(BAR * bits / most)), COLOURS[each.way][0])
            text.append(f" {bits:.2f} {each.way}\n")
    return text


def picture(files: Sequence[Path], results: Sequence[Result]) -> None:
    """Draw bits over the distance of names into `files`."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4.8), dpi=160, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for each in results:
        axes.plot(list(each.names), list(each.names.values()), "o-", color=COLOURS[each.way][1], linewidth=2,
                  label=f"{each.way}, {each.length:,} bytes at once")
    axes.set(xlabel="bytes since the last use of the name", ylabel="bits per byte of the name", ylim=(0, None))
    axes.set_title("Names that only the file itself tells", loc="left", fontsize=12, fontweight="bold")
    axes.grid(axis="y", color="#e9ecef", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors="#868e96", length=0)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.legend(frameon=False, loc="lower left")
    for file in files:
        file.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(file)
