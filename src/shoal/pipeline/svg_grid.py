"""Draws a simulation as SVG: the grid of `text_grid.py`, for light and dark pages.

A cell shows its microbatch; its colour shows the kind, paler for the later stages of a rank; its tooltip shows the
instruction and its times.
"""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from shoal.pipeline.instruction import Op
from shoal.pipeline.simulation import Cell, Simulation
from shoal.pipeline.text_grid import per_unit

__all__ = ["svg"]

_COLOURS = {Op.FORWARD: (54, 79, 199), Op.BACKWARD: (43, 138, 62), Op.INPUT: (12, 133, 153),
            Op.WEIGHT: (201, 108, 0)}
_LEGEND = {Op.FORWARD: "forward", Op.BACKWARD: "backward", Op.INPUT: "backward for the input",
           Op.WEIGHT: "backward for the weights"}
_PALEST = 0.5
"""The part of white that is mixed into the colour of a rank's last stage."""
_STYLE = """<style>
text { font-family: system-ui, -apple-system, Segoe UI, Helvetica, Arial, DejaVu Sans, sans-serif; font-size: 12px; }
.page { fill: #ffffff; } .ink { fill: #1f2933; } .muted { fill: #5c6670; } .idle { fill: #f1f3f5; }
.on { fill: #ffffff; text-anchor: middle; } .pale { fill: #111820; text-anchor: middle; }
@media (prefers-color-scheme: dark) {
  .page { fill: #161b22; } .ink { fill: #e6edf3; } .muted { fill: #9aa4ae; } .idle { fill: #21262d; }
}
</style>"""
_LEFT, _TOP, _HIGH, _PITCH, _LEAST_WIDTH = 64, 52, 22, 26, 560


def svg(simulation: Simulation) -> str:
    """Draw a simulation as an SVG file."""
    schedule = simulation.schedule
    scale = per_unit(simulation, max(20, 7 * len(str(schedule.microbatches - 1)) + 8))
    width = max(_LEFT + simulation.makespan * scale + 16, _LEAST_WIDTH)
    height = _TOP + _PITCH * schedule.ranks + 44
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:g}" height="{height}" viewBox="0 0 {width:g} {height}">'
    return "\n".join([head, _STYLE, f'<rect class="page" width="{width:g}" height="{height}" rx="8"/>',
                      *_heading(simulation), *_grid(simulation, scale), *_legend(simulation, height - 16), "</svg>", ""])


def _heading(simulation: Simulation) -> Iterator[str]:
    schedule = simulation.schedule
    yield _text(16, 24, f"{schedule.name}: {schedule.ranks} ranks, {schedule.microbatches} microbatches", "ink",
                'font-weight="600"')
    yield _text(16, 42, f"bubble {simulation.bubble:.1%} of {simulation.makespan:g}; a rank holds the activations of at "
                        f"most {max(schedule.peak_microbatches):g} microbatches", "muted")


def _grid(simulation: Simulation, scale: float) -> Iterator[str]:
    schedule = simulation.schedule
    for rank, row in enumerate(simulation.rows):
        top = _TOP + _PITCH * rank
        yield _text(16, top + 15, f"rank {rank}", "ink")
        yield f'<rect class="idle" x="{_LEFT}" y="{top}" width="{simulation.makespan * scale:g}" height="{_HIGH}" rx="2"/>'
        order = [stage for stage, owner in enumerate(schedule.owner) if owner == rank]
        for cell in row:
            paleness = _PALEST * order.index(cell.instruction.stage) / max(len(order) - 1, 1)
            yield from _cell(cell, top, scale, paleness)


def _cell(cell: Cell, top: float, scale: float, paleness: float) -> Iterator[str]:
    left, wide = _LEFT + cell.start * scale, (cell.end - cell.start) * scale
    instruction = cell.instruction
    yield (f'<rect x="{left:g}" y="{top:g}" width="{max(wide - 1, 0.5):g}" height="{_HIGH}" rx="2" '
           f'fill="{_colour(instruction.kind, paleness)}">'
           f'<title>{instruction}: {cell.start:g} to {cell.end:g}</title></rect>')
    label = str(instruction.microbatch)
    if wide >= 7 * len(label) + 1:
        yield _text(left + wide / 2, top + 15, label, "pale" if paleness > _PALEST / 2 else "on",
                    'pointer-events="none"')


def _legend(simulation: Simulation, bottom: float) -> Iterator[str]:
    kinds = {instruction.kind for row in simulation.schedule.rows for instruction in row}
    left = 16.0
    for kind in (kind for kind in Op if kind in kinds):
        yield f'<rect x="{left:g}" y="{bottom - 11:g}" width="12" height="12" rx="2" fill="{_colour(kind, 0)}"/>'
        yield _text(left + 18, bottom, _LEGEND[kind], "ink")
        left += 44 + 6.4 * len(_LEGEND[kind])
    if simulation.schedule.stages_per_rank > 1:
        yield _text(left, bottom, "paler: a rank's later stages", "muted")


def _colour(kind: Op, paleness: float) -> str:
    return "#" + "".join(f"{round(part + (255 - part) * paleness):02x}" for part in _COLOURS[kind])


def _text(x: float, y: float, content: str, style: str, extra: str = "") -> str:
    return f'<text class="{style}" x="{x:g}" y="{y:g}"{extra and " " + extra}>{escape(content)}</text>'
