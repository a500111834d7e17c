"""The live view: bars of usage and lanes of the last step in a terminal; one line a step elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from display import size
from timeline import LANES, Timeline, row
from usage import Usage

COLOURS = {"read": "blue", "forward": "cyan", "backward": "yellow", "step": "magenta", "wait": "red", "write": "green"}
BAR, NAME = 48, 9


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """A finished step, with the usage at its end."""

    step: int
    steps: int
    loss: float
    usage: Usage
    timeline: Timeline


class View:
    """Shows each step on `console`. In a terminal the bars are updated between steps from `probe`."""

    def __init__(self, console: Console, cap: int, probe: Callable[[], Usage]) -> None:
        self.console = console
        self.cap = cap
        self.probe = probe
        self.last: list[Text] = []
        self.live: Live | None = None

    def __enter__(self) -> View:
        if self.console.is_terminal and not self.console.quiet:
            self.live = Live(console=self.console, refresh_per_second=4, get_renderable=self._render)
            self.live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
                 ) -> None:
        if self.live is not None:
            self.live.stop()

    def show(self, record: StepRecord) -> None:
        if self.live is None:
            self.console.print(line(record, self.cap), highlight=False, soft_wrap=True)
        else:
            width = max(20, min(100, self.console.width - NAME - 8))
            self.last = [Text(), Text(line(record, self.cap)), Text(), chart(record.timeline, width)]

    def _render(self) -> Group:
        return Group(bars(self.probe(), self.cap), *self.last)


def line(record: StepRecord, cap: int) -> str:
    """Format a step as one line."""
    timeline, seconds = record.timeline, record.timeline.seconds
    return "  ".join((
        f"step {record.step:>{len(str(record.steps))}}/{record.steps}",
        f"loss {record.loss:.3f}",
        f"{seconds:.2f} s",
        f"read {size(timeline.read)} ({size(timeline.read / seconds)}/s)",
        f"wrote {size(timeline.written)} ({size(timeline.written / seconds)}/s)",
        f"overlap {timeline.overlap:.0%}",
        f"host {size(record.usage.host)} of {size(cap)}",
        f"disk {size(record.usage.disk)}",
    ))


def bars(usage: Usage, cap: int) -> Text:
    """Draw bars of the usage on one scale, with the cap in the bar of the host."""
    longest = max(usage.disk, usage.device or 0, usage.host, cap)
    text = Text()
    for name, count, limit in (("device", usage.device, 0), ("host", usage.host, cap), ("disk", usage.disk, 0)):
        if count is None:
            continue
        cells, room = round(BAR * count / longest), round(BAR * limit / longest)
        text.append(f"{name:<{NAME}}")
        text.append("█" * cells, "red" if limit and count > limit else "cyan" if name != "disk" else "blue")
        text.append("░" * (room - cells), "dim")
        text.append(f" {size(count)}" + (f" of {size(limit)}" if limit else "") + "\n")
    text.rstrip()
    return text


def chart(timeline: Timeline, width: int) -> Text:
    """Draw the lanes of a step, each with the fraction of the step in which it is busy."""
    text = Text()
    for lane in LANES:
        text.append(f"{lane:<{NAME}}")
        text.append(row(timeline.lanes[lane], timeline.start, timeline.stop, width), COLOURS[lane])
        text.append(f" {timeline.share(lane):>4.0%}\n", "dim")
    seconds = f"{timeline.seconds:.2f} s"
    text.append(f"{'':<{NAME}}0{seconds:>{width - 1}}", "dim")
    return text
