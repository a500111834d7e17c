"""The parts of the final report, as things that rich can print."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.panel import Panel
from rich.syntax import Syntax
from rich.table import Table
from rich.text import Text

from curve import Mark
from display import size
from shoal.zero.placement import StateBytes

BAR = 40


def quality(model: Mark, marks: Sequence[Mark], held_out: str) -> Table:
    """Lay the model's bits per byte beside those of `marks`, longest first, with a bar each."""
    table = Table(title=f"Bits per byte of {held_out}", title_justify="left", box=None, padding=(0, 2, 0, 0),
                  show_header=False)
    longest = max(mark.bits for mark in (model, *marks))
    for mark in sorted((model, *marks), key=lambda mark: -mark.bits):
        style = "bold cyan" if mark is model else "dim"
        table.add_row(Text(mark.name, style), Text(f"{mark.bits:.3f}", style),
                      Text("█" * max(1, round(BAR * mark.bits / longest)), style))
    return table


def state(formula: StateBytes, measured: StateBytes, heading: str) -> Table:
    """Lay the model-state bytes of one rank that the stage's formula gives beside those that were measured."""
    table = Table(title=heading, title_justify="left", header_style="bold", border_style="dim")
    for name in ("", "formula", "measured", "measured / formula"):
        table.add_column(name, justify="right" if name else "left")
    rows = {"weight": (formula.weight, measured.weight), "gradient": (formula.gradient, measured.gradient),
            "master": (formula.master, measured.master), "moments": (formula.moments, measured.moments),
            "total": (formula.total, measured.total)}
    for name, (expected, found) in rows.items():
        table.add_row(name, size(expected), size(found), _ratio(found, expected), end_section=name == "moments")
    return table


def sample(prompt: bytes, written: bytes) -> Panel:
    """Show what the model wrote after `prompt` as coloured Python; bytes that are no text become dots."""
    text = (prompt + written).replace(b"\0", b"\n# --- a new file ---\n").decode("utf-8", errors="replace").strip("\n")
    code = "".join(letter if letter.isprintable() or letter == "\n" else "·" for letter in text)
    return Panel(Syntax(code, "python", theme="ansi_dark", word_wrap=True), title="Written by the model",
                 title_align="left", border_style="dim")


def show(console: Console, *parts: Table | Panel | Text, places: Mapping[str, str]) -> None:
    """Print `parts` one below the other, then named `places`, each on one unbroken line that can be copied."""
    for part in parts:
        console.print()
        console.print(part)
    console.print()
    for name, place in places.items():
        console.print(Text(name, "dim"))
        console.print(Text(f"  {place}", "bold"), soft_wrap=True)


def _ratio(measured: float, expected: float) -> str:
    if expected == 0:
        return "-" if measured == 0 else "not expected"
    return f"{measured / expected:.3f}"
