"""Draws layouts: rows are blocks of queries, columns blocks of keys. A large layout is drawn smaller, shaded by its share.

    ██··██··      a visited block is dark; a cell that stands for several blocks is ░, ▒ or ▓ by the share that is visited
    ████····
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

from torch import Tensor
from torch.nn import functional as F

__all__ = ["Panel", "svg", "text"]

_SHADES = ("··", "░░", "▒▒", "▓▓", "██")
_CELLS, _WIDE, _GAP, _LEFT, _TOP = 128, 256, 28, 16, 62
_STYLE = """<style>
text { font-family: system-ui, -apple-system, Segoe UI, Helvetica, Arial, DejaVu Sans, sans-serif; font-size: 12px; }
.page { fill: #ffffff; } .ink { fill: #1f2933; } .muted { fill: #5c6670; }
.empty { fill: #f1f3f5; } .seen { fill: #0b7285; }
@media (prefers-color-scheme: dark) {
  .page { fill: #161b22; } .ink { fill: #e6edf3; } .muted { fill: #9aa4ae; }
  .empty { fill: #21262d; } .seen { fill: #3bc9db; }
}
</style>"""


@dataclass(frozen=True, slots=True)
class Panel:
    """A layout of one head, (row blocks, column blocks) of 0 and 1, and what is written above it."""

    title: str
    layout: Tensor


def text(layout: Tensor, *, width: int = 80) -> str:
    """Draw a layout of one head in lines of at most `width` columns, at least two."""
    shares = _shares(layout, max(1, width // 2))
    return "\n".join("".join(_SHADES[0 if share == 0 else min(4, 1 + math.floor(share * 3)) if share < 1 else 4]
                             for share in row) for row in shares.tolist())


def svg(heading: str, panels: Sequence[Panel]) -> str:
    """Draw layouts beside each other as an SVG file, for light and dark pages."""
    size = _WIDE + _GAP
    width = max(_LEFT + len(panels) * size - _GAP + 16, 16 + 7 * len(heading))
    height = _TOP + _WIDE + 34
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}">'
    drawn = [line for place, panel in enumerate(panels) for line in _panel(panel, _LEFT + place * size)]
    return "\n".join([head, _STYLE, f'<rect class="page" width="{width}" height="{height}" rx="8"/>',
                      _text(_LEFT, 24, heading, "ink", ' font-weight="600"'), *drawn, "</svg>", ""])


def _panel(panel: Panel, left: int) -> Iterator[str]:
    shares = _shares(panel.layout, _CELLS)
    rows, columns = shares.shape
    cell = _WIDE / max(rows, columns)
    yield _text(left, _TOP - 10, panel.title, "ink")
    yield f'<rect class="empty" x="{left}" y="{_TOP}" width="{columns * cell:g}" height="{rows * cell:g}"/>'
    gap = 1 if cell >= 6 else 0
    for row, of_row in enumerate(shares.tolist()):
        for start, end, share in _runs(of_row, joined=not gap):
            opacity = "" if share == 1 else f' opacity="{0.2 + 0.8 * share:.2f}"'
            yield (f'<rect class="seen" x="{left + start * cell:g}" y="{_TOP + row * cell:g}" '
                   f'width="{(end - start) * cell - gap:g}" height="{cell - gap:g}"{opacity}/>')
    blocks = f"{panel.layout.shape[0]} x {panel.layout.shape[1]} blocks, {panel.layout.float().mean():.1%} visited"
    yield _text(left, _TOP + _WIDE + 20, blocks, "muted")


def _runs(row: Sequence[float], *, joined: bool) -> Iterator[tuple[int, int, float]]:
    """Yield start, end and share of the visited cells of a row, `joined` where neighbours are alike."""
    start = 0
    while start < len(row):
        end = start + 1
        while joined and end < len(row) and row[end] == row[start]:
            end += 1
        if row[start]:
            yield start, end, row[start]
        start = end


def _shares(layout: Tensor, at_most: int) -> Tensor:
    """Return the visited share of each cell: (rows, columns), each at most `at_most`."""
    several = -(-max(layout.shape) // at_most)
    return F.avg_pool2d(layout[None].float(), several, ceil_mode=True, count_include_pad=False)[0]


def _text(x: float, y: float, content: str, style: str, extra: str = "") -> str:
    return f'<text class="{style}" x="{x:g}" y="{y:g}"{extra}>{escape(content)}</text>'
