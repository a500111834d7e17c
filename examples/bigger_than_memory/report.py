"""The report of a run: model size, cap, speed, and how much of the disk I/O overlapped with compute."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from rich.box import SIMPLE_HEAD
from rich.table import Table

import shoal
from display import size
from timeline import COMPUTE, DISK
from view import StepRecord

WARMUP_STEPS = 2
"""Steps excluded from medians: in the first one moments are zeros, and the order of the units is not known yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The figures of one rank."""

    parameters: int
    state: int
    ranks: int
    cap: int
    method: str
    peak: int
    disk: int
    records: Sequence[StepRecord]

    @classmethod
    def of(cls, engine: shoal.Engine, records: Sequence[StepRecord], *, cap: int, method: str, peak: int) -> Report:
        """Collect the figures from an engine after its last step."""
        return cls(parameters=sum(parameter.numel() for parameter in engine.module.parameters()),
                   state=engine.model_state_bytes().total, ranks=engine.world_size, cap=cap, method=method, peak=peak,
                   disk=records[-1].usage.disk, records=records)

    @property
    def title(self) -> str:
        each = "" if self.ranks == 1 else f" on each of {self.ranks} ranks"
        return (f"One step of a GPT of {self.parameters / 1e6:.0f} M parameters: {size(self.state)} of state under a cap of "
                f"{size(self.cap)}{each}")

    def table(self) -> Table:
        """Return a table with one figure a row."""
        table = Table(box=SIMPLE_HEAD, show_header=False)
        for name, value in self.rows().items():
            table.add_row(name, value)
        return table

    def rows(self) -> dict[str, str]:
        """Return the figures by name; those of a step are medians without the warm-up steps."""
        timelines = [record.timeline for record in self.records[WARMUP_STEPS:] or self.records[-1:]]
        seconds = median(timeline.seconds for timeline in timelines)
        read, written = median(timeline.read for timeline in timelines), median(timeline.written for timeline in timelines)
        disk, compute = (median(timeline.share(*lanes) for timeline in timelines) for lanes in (DISK, COMPUTE))
        return {
            "parameters": f"{self.parameters:,}",
            "model state": f"{size(self.state)} a rank, {self.state / self.parameters * self.ranks:.1f} bytes a parameter",
            "cap": f"{size(self.cap)}, by {self.method}",
            "state / cap": f"{self.state / self.cap:.2f}",
            "peak of memory": f"{size(self.peak)}, as {self.method} counts it",
            "on the disk": size(self.disk),
            "steps": f"{len(self.records)}, loss {self.records[0].loss:.3f} to {self.records[-1].loss:.3f}",
            "seconds a step": f"{seconds:.2f}",
            "read a step": f"{size(read)}, {size(read / seconds)}/s",
            "written a step": f"{size(written)}, {size(written / seconds)}/s",
            "disk busy": f"{disk:.0%} of the time",
            "compute busy": f"{compute:.0%} of the time",
            "both busy": f"{median(timeline.overlap for timeline in timelines):.0%} of the time, "
                         f"{median(timeline.hidden for timeline in timelines):.0%} of the disk time",
        }
