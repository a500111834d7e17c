"""Draw the pictures of the README and of these pages: `python docs/draw.py` writes docs/images/*.svg.

The bytes come from `shoal.zero.placement`, the table that the engine itself obeys; the timeline follows the rules of
`zero/window.py` and `zero/reducer.py` with made-up durations; pipelines are what `shoal pipeline show --svg` draws, layouts
of attention what `shoal attention show --svg` does. The same code gives the same files, and a test compares.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from html import escape
from pathlib import Path

import torch

from shoal.attention import SparsityConfig, drawing, structures
from shoal.pipeline.check import simulate
from shoal.pipeline.schedules import SCHEDULES, make_schedule
from shoal.pipeline.simulation import Durations
from shoal.pipeline.svg_grid import svg
from shoal.zero.placement import PARTIAL, STAGES, Placement, state_bytes

IMAGES = Path(__file__).parent / "images"
RANKS = 4
WEIGHT, GRADIENT, MASTER, MOMENTS = "#0b7285", "#f08c00", "#862e9c", "#364fc7"
INK, MUTED, FAINT = "#1f2933", "#868e96", "#e9ecef"
FONT = "font-family='system-ui, -apple-system, Segoe UI, Helvetica, Arial, DejaVu Sans, sans-serif'"


def main() -> None:
    IMAGES.mkdir(exist_ok=True)
    for name, text in pictures().items():
        (IMAGES / name).write_text(text)


def pictures() -> dict[str, str]:
    """Return the text of each picture by file name."""
    return {"stages.svg": page(960, 400, *stages()), "step.svg": page(960, 420, *step()),
            "life.svg": page(960, 330, *life()), "recovery.svg": page(960, 270, *recovery())} | {
        f"pipeline-{name}.svg": pipeline(name) for name in SCHEDULES} | {
        f"attention-{name}.svg": attention(name) for name in STRUCTURES}


def pipeline(name: str) -> str:
    """Draw 8 microbatches through 4 ranks: `shoal pipeline show --schedule NAME --ranks 4 --microbatches 8 --svg FILE`."""
    schedule = make_schedule(name, ranks=RANKS, microbatches=8)
    each = 1 / schedule.stages_per_rank
    return svg(simulate(schedule, Durations(forward=each, input=each, weight=each)))


STRUCTURES: dict[str, tuple[str, dict[str, SparsityConfig]]] = {
    "fixed": ("Fixed: windows, and the last block of each", {
        "bidirectional": structures.FixedSparsityConfig(4),
        "horizontal_global_attention": structures.FixedSparsityConfig(4, horizontal_global_attention=True),
        "unidirectional": structures.FixedSparsityConfig(4, attention="unidirectional")}),
    "variable": ("Variable: windows of 2, 4 and 6 blocks, global blocks 0 and 12, a random one", {
        kind: structures.VariableSparsityConfig(4, num_random_blocks=1, local_window_blocks=[2, 4, 6],
                                                global_block_indices=[0, 12], attention=kind)
        for kind in ("bidirectional", "unidirectional")}),
    "bigbird": ("BigBird: a window of 3, a random and a global block", {
        kind: structures.BigBirdSparsityConfig(4, attention=kind) for kind in ("bidirectional", "unidirectional")}),
    "bslongformer": ("Longformer: a window of 3, global blocks 0 and 12 to 13", {
        kind: structures.BSLongformerSparsityConfig(4, global_block_indices=[0, 12], global_block_end_indices=[1, 14],
                                                    attention=kind) for kind in ("bidirectional", "unidirectional")}),
    "local_sliding_window": ("A sliding window of 3 blocks", {
        kind: structures.LocalSlidingWindowSparsityConfig(4, attention=kind)
        for kind in ("bidirectional", "unidirectional")}),
}


def attention(name: str) -> str:
    """Draw a structure of 24 blocks, as `shoal attention show CONFIG --length 384 --svg FILE` does."""
    heading, structures = STRUCTURES[name]
    return drawing.svg(heading, [drawing.Panel(kind, structure.make_layout(24 * structure.block)[0])
                                 for kind, structure in structures.items()])


def page(width: int, height: int, *parts: str) -> str:
    head = f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {width} {height}' {FONT}>"
    return "\n".join([head, box(0, 0, width, height, "#ffffff", radius=8), *parts, "</svg>", ""])


def box(x: float, y: float, width: float, height: float, fill: str, *, radius: float = 2, extra: str = "") -> str:
    return (f"<rect x='{x:.1f}' y='{y:.1f}' width='{width:.1f}' height='{height:.1f}' rx='{radius:g}' fill='{fill}'"
            f"{extra and ' ' + extra}/>")


def text(x: float, y: float, words: str, *, size: float = 13, fill: str = INK, anchor: str = "start",
         weight: int = 400) -> str:
    return (f"<text x='{x:.1f}' y='{y:.1f}' font-size='{size:g}' fill='{fill}' text-anchor='{anchor}' "
            f"font-weight='{weight}'>{escape(words)}</text>")


# The four stages, as bars per rank


def stages() -> Iterator[str]:
    """Draw what rests on each of four ranks, in bytes per parameter, for 16-bit training with Adam."""
    left, bottom, scale, pitch, bar = 30, 330, 14.0, 228, 34
    yield ("<defs><pattern id='addend' width='7' height='7' patternUnits='userSpaceOnUse' patternTransform='rotate(45)'>"
           f"<rect width='7' height='7' fill='{GRADIENT}'/><rect width='2.5' height='7' fill='#ffffff' opacity='0.55'/>"
           "</pattern></defs>")
    yield text(left, 36, f"Model state of each of {RANKS} ranks, in bytes per parameter (16-bit weights, Adam)", size=16,
               weight=600)
    for stage, row in enumerate(STAGES):
        x = left + stage * pitch
        held = state_bytes(stage, 1000, RANKS, compute=torch.bfloat16)
        parts = [(held.weight, WEIGHT, row.weight), (held.gradient, GRADIENT, row.gradient),
                 (held.master, MASTER, row.master), (held.moments, MOMENTS, row.master)]
        for rank in range(RANKS):
            top = float(bottom)
            for size, colour, placement in parts:
                top -= size / 1000 * scale
                yield box(x + rank * (bar + 10), top, bar, size / 1000 * scale - 1, fill(colour, placement))
            yield text(x + rank * (bar + 10) + bar / 2, bottom + 15, str(rank), size=11, fill=MUTED, anchor="middle")
        yield text(x, bottom - 16.6 * scale - 12, f"stage {stage}", weight=600, size=14)
        yield text(x + RANKS * (bar + 10) - 10, bottom - 16.6 * scale - 12, f"{held.total / 1000:g} bytes", anchor="end",
                   fill=MUTED)
    legend = [(WEIGHT, "weight"), (GRADIENT, "gradient"), ("url(#addend)", "gradient, one addend of it"),
              (MASTER, "fp32 master"), (MOMENTS, "Adam's two moments")]
    x = float(left)
    for colour, words in legend:
        yield box(x, 368, 14, 14, colour)
        yield text(x + 20, 380, words, size=12, fill="#495057")
        x += 52 + 7.0 * len(words)


def fill(colour: str, placement: Placement) -> str:
    return "url(#addend)" if placement is PARTIAL else colour


# One step of stage 3, as one rank lives it


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Something that one rank does, from `start` to `stop`."""

    lane: str
    words: str
    start: float
    stop: float
    colour: str


UNITS = ("root", "block 0", "block 1", "block 2")
FORWARD = (("embed", "root", 1.2), ("block 0", "block 0", 1.7), ("block 1", "block 1", 1.7), ("block 2", "block 2", 1.7),
           ("head", "root", 1.1))
BACKWARD = (("head", "root", 1.2), ("block 2", "block 2", 3.0), ("block 1", "block 1", 3.0), ("block 0", "block 0", 3.0),
            ("embed", "root", 1.3))
TRAVEL = {"root": 1.0, "block 0": 1.2, "block 1": 1.2, "block 2": 1.2}


class Timeline:
    """One rank's step: what computes, what travels, and which units are whole. The wire carries one thing at a time."""

    def __init__(self) -> None:
        self.works: list[Work] = []
        self.now = 0.0
        self.wire = 0.0
        self.whole: dict[str, float] = {}  # unit -> since when its memory is taken
        self.ready: dict[str, float] = {}  # unit -> when its gather arrives

    def gather(self, unit: str) -> None:
        if unit not in self.whole:
            start = max(self.now, self.wire)
            self.whole[unit], self.ready[unit] = start, start + TRAVEL[unit]
            self.send(unit, WEIGHT, TRAVEL[unit])

    def send(self, words: str, colour: str, seconds: float) -> None:
        start = max(self.now, self.wire)
        self.wire = start + seconds
        self.works.append(Work(lane="wire", words=words, start=start, stop=self.wire, colour=colour))

    def release(self, unit: str) -> None:
        self.works.append(Work(lane=unit, words="", start=self.whole.pop(unit), stop=self.now, colour=WEIGHT))

    def compute(self, words: str, seconds: float, colour: str) -> None:
        self.works.append(Work(lane="compute", words=words, start=self.now, stop=self.now + seconds, colour=colour))
        self.now += seconds

    def run(self, passes: tuple[tuple[str, str, float], ...], colour: str, *, backward: bool) -> None:
        for position, (words, unit, seconds) in enumerate(passes):
            self.gather(unit)
            if position + 1 < len(passes):
                self.gather(passes[position + 1][1])  # run ahead: it travels while this one computes
            self.now = max(self.now, self.ready[unit])
            self.compute(words, seconds, colour)
            if unit not in [later for _, later, _ in passes[position + 1:]]:
                self.release(unit)
                if backward:
                    self.send(unit, GRADIENT, TRAVEL[unit])


def one_step() -> Timeline:
    line = Timeline()
    line.gather("root")
    line.gather("block 0")
    line.run(FORWARD, "#5c7cfa", backward=False)
    line.run(BACKWARD, "#364fc7", backward=True)
    line.now = line.wire
    line.compute("norm", 1.1, MUTED)
    line.compute("step", 1.5, MASTER)
    line.gather("root")
    line.gather("block 0")
    line.now = line.wire
    return line


def step() -> Iterator[str]:
    """Draw one step of stage 3: compute, wire, and the memory that gathered units take."""
    line = one_step()
    left, scale, lanes = 92, 840 / line.now, {"compute": 84, "wire": 132}
    lanes |= {unit: 226 + 30 * index for index, unit in enumerate(UNITS)}
    heading = "One step of stage 3, on one rank (three blocks, run-ahead of one unit, not to scale)"
    yield text(30, 36, heading, size=16, weight=600)
    yield text(30, 206, "Whole on this rank; the rest of the time only the rank's own slice of a unit rests", fill=MUTED)
    for lane, y in lanes.items():
        high = 36 if lane in ("compute", "wire") else 20
        yield text(30, y + high / 2 + 4, lane, size=12, fill="#495057")
        yield box(left, y, 840, high, "#f8f9fa", radius=3)
    for unit in list(line.whole):
        line.release(unit)
    for work in line.works:
        high = 36 if work.lane in ("compute", "wire") else 20
        x, width = left + work.start * scale, (work.stop - work.start) * scale
        yield box(x + 0.5, lanes[work.lane], width - 1, high, work.colour,
                  extra="" if work.lane in ("compute", "wire") else "opacity='0.55'")
        for index, word in enumerate(words := work.words.split(" ", 1) if width < 60 else [work.words]):
            y = lanes[work.lane] + 22 - 6.5 * (len(words) - 1) + 13 * index
            yield text(x + width / 2, y, word, size=10.5, fill="#ffffff", anchor="middle")
    yield from marks(line, left, scale)


def marks(line: Timeline, left: float, scale: float) -> Iterator[str]:
    """Name the phases along the bottom."""
    computed = [work for work in line.works if work.lane == "compute"]
    ends = [computed[len(FORWARD) - 1].stop, computed[len(FORWARD) + len(BACKWARD) - 1].stop, computed[-1].stop]
    start = 0.0
    for words, end in zip(("forward", "backward", "step", "next"), [*ends, line.now], strict=True):
        for top, bottom in ((74, 178), (216, 352)):
            yield (f"<line x1='{left + end * scale:.1f}' x2='{left + end * scale:.1f}' y1='{top}' y2='{bottom}' "
                   f"stroke='#ced4da'/>")
        yield text(left + (start + end) / 2 * scale, 370, words, size=12, fill="#495057", anchor="middle", weight=600)
        start = end
    legend = [("#5c7cfa", "forward"), ("#364fc7", "backward"), (WEIGHT, "weights travel, and rest whole"),
              (GRADIENT, "gradients travel"), (MUTED, "all ranks decide"), (MASTER, "own slices step")]
    x = 30.0
    for colour, words in legend:
        yield box(x, 391, 14, 14, colour)
        yield text(x + 20, 403, words, size=12, fill="#495057")
        x += 44 + 6.8 * len(words)


# One parameter's life in a step of stage 3, with the files that move it


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One event of a step: the file that acts, and what each tensor of the parameter is on a rank afterwards."""

    words: str
    file: str
    weight: str
    gradient: str
    master: str = "slice"


LIFE = (
    Event(words="rest", file="unit_state.py", weight="slice", gradient=""),
    Event(words="prefetch", file="window.py", weight="all-gather", gradient=""),
    Event(words="forward", file="hooks.py", weight="whole", gradient=""),
    Event(words="release", file="unit.py", weight="slice", gradient=""),
    Event(words="backward", file="backward_hooks.py", weight="whole", gradient="addend"),
    Event(words="reduce", file="reducer.py", weight="slice", gradient="reduce-scatter"),
    Event(words="decide", file="grad_stats.py", weight="slice", gradient="slice"),
    Event(words="step", file="step_scheduler.py", weight="slice", gradient="slice", master="stepped"),
    Event(words="publish", file="trainable_unit.py", weight="slice", gradient=""),
)


def life() -> Iterator[str]:
    """Draw the events of one step from left to right, and a lane for each tensor of the parameter."""
    left, pitch, lanes = 96, 95, {"weight": (150, WEIGHT), "gradient": (200, GRADIENT), "master": (250, MASTER)}
    yield text(30, 36, "One parameter in a step of stage 3, on one rank", size=16, weight=600)
    for lane, (y, _) in lanes.items():
        yield text(30, y + 22, lane, size=12, fill="#495057")
    yield text(30, 306, "An empty cell holds no memory. \"slice\": this rank's span of the unit's flat buffer.", size=12,
               fill=MUTED)
    for column, event in enumerate(LIFE):
        x = left + column * pitch
        yield box(x, 70, pitch - 8, 46, FAINT, radius=6)
        yield text(x + (pitch - 8) / 2, 90, event.words, anchor="middle", weight=600)
        yield text(x + (pitch - 8) / 2, 106, event.file, size=8.5, fill=MUTED, anchor="middle")
        for value, (y, colour) in zip((event.weight, event.gradient, event.master), lanes.values(), strict=True):
            yield box(x, y, pitch - 8, 36, colour if value else "#f8f9fa", radius=3,
                      extra="" if value in ("", "whole", "addend", "stepped") else "opacity='0.6'")
            yield text(x + (pitch - 8) / 2, y + 22, value, size=10.5, fill="#ffffff", anchor="middle")


# A recovery


def recovery() -> Iterator[str]:
    """Draw what the ranks and their agent do between a fault and the next new step."""
    left, lanes = 120, {"rank 0": 76, "rank 1": 116, "agent": 156, "spare": 196}
    yield text(30, 36, "A recovery: rank 1 is killed; the copy of step 90 is loaded, and step 94 is the next new one "
                       "(not to scale)", size=16, weight=600)
    for lane, y in lanes.items():
        yield text(30, y + 20, lane, size=12, fill="#495057")
        yield box(left, y, 810, 30, "#f8f9fa", radius=3)
    for lane, start, stop, colour, words in (
            ("rank 0", 0, 150, WEIGHT, "steps 91 to 93"), ("rank 0", 150, 270, MUTED, "waits for rank 1"),
            ("rank 1", 0, 150, WEIGHT, "steps 91 to 93"), ("agent", 150, 210, GRADIENT, "sees it"),
            ("agent", 210, 330, GRADIENT, "ends the others"), ("agent", 330, 400, GRADIENT, "new store"),
            ("spare", 0, 360, MUTED, "has imported torch, and waits"), ("spare", 360, 400, GRADIENT, "forks"),
            *((lane, *phase) for lane in ("rank 0", "rank 1") for phase in (
                (400, 480, MOMENTS, "join, build"), (480, 580, MASTER, "load the copy"),
                (580, 700, WEIGHT, "91 to 93 again"), (700, 810, WEIGHT, "step 94, ..."))),
            ("spare", 400, 810, MUTED, "waits")):
        yield box(left + start + 0.5, lanes[lane], stop - start - 1, 30, colour)
        yield text(left + (start + stop) / 2, lanes[lane] + 19, words, size=10.5, fill="#ffffff", anchor="middle")
    for at, words in ((150, "fault"), (210, "noticed"), (400, "processes"), (480, "joined"), (700, "new step")):
        yield box(left + at - 0.5, 66, 1, 168, INK)
        yield text(left + at, 250, words, size=11, anchor="middle")


if __name__ == "__main__":
    main()
