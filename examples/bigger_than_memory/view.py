"""Where the bytes are and what overlaps: bars and lanes that follow the training in a terminal, a line a step elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from display import size
from places import Places
from timeline import LANES, Timeline, row

COLOURS = {"read": "blue", "forward": "cyan", "backward": "yellow", "step": "magenta", "wait": "red", "write": "green"}
BAR, NAME = 48, 9


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """One finished step, with where the bytes were at its end."""

    step: int
    steps: int
    loss: float
    places: Places
    timeline: Timeline


class View:
    """Shows each step on `console`. In a terminal the bars move on between them, as `look` says where the bytes are."""

    def __init__(self, console: Console, cap: int, look: Callable[[], Places]) -> None:
        self.console = console
        self.cap = cap
        self.look = look
        self.last: list[Text] = []
        self.live: Live | None = None

    def __enter__(self) -> View:
        if self.console.is_terminal and not self.console.quiet:
            self.live = Live(console=self.console, refresh_per_second=4, get_renderable=self._picture)
            self.live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
                 ) -> None:
        if self.live is not None:
            self.live.stop()

    def show(self, reading: Reading) -> None:
        if self.live is None:
            self.console.print(line(reading, self.cap), highlight=False, soft_wrap=True)
        else:
            width = max(20, min(100, self.console.width - NAME - 8))
            self.last = [Text(), Text(line(reading, self.cap)), Text(), chart(reading.timeline, width)]

    def _picture(self) -> Group:
        return Group(bars(self.look(), self.cap), *self.last)


def line(reading: Reading, cap: int) -> str:
    """Say a step in one line."""
    found, seconds = reading.timeline, reading.timeline.seconds
    return "  ".join((
        f"step {reading.step:>{len(str(reading.steps))}}/{reading.steps}",
        f"loss {reading.loss:.3f}",
        f"{seconds:.2f} s",
        f"read {size(found.read)} ({size(found.read / seconds)}/s)",
        f"wrote {size(found.written)} ({size(found.written / seconds)}/s)",
        f"overlap {found.overlap:.0%}",
        f"host {size(reading.places.host)} of {size(cap)}",
        f"disk {size(reading.places.disk)}",
    ))


def bars(places: Places, cap: int) -> Text:
    """Draw the bytes of each place to one scale, up to which the cap is marked in the host's."""
    longest = max(places.disk, places.device or 0, places.host, cap)
    text = Text()
    for name, count, limit in (("device", places.device, 0), ("host", places.host, cap), ("disk", places.disk, 0)):
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
    """Draw the lanes of a step, one below the other, with the share of the step that each of them takes."""
    text = Text()
    for lane in LANES:
        text.append(f"{lane:<{NAME}}")
        text.append(row(timeline.lanes[lane], timeline.start, timeline.stop, width), COLOURS[lane])
        text.append(f" {timeline.share(lane):>4.0%}\n", "dim")
    seconds = f"{timeline.seconds:.2f} s"
    text.append(f"{'':<{NAME}}0{seconds:>{width - 1}}", "dim")
    return text
