"""What a run came to: how large, under which cap, how fast, and how much of the disk's work was hidden behind computing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from rich.box import SIMPLE_HEAD
from rich.table import Table

import shoal
from display import size
from timeline import COMPUTING, MOVING
from view import Reading

SETTLING = 2
"""Steps that no median counts: in the first the moments are zeros, and nobody knows the order of the units yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """The facts of one rank: bytes, and the steps that its medians are taken over."""

    parameters: int
    state: int
    ranks: int
    cap: int
    way: str
    peak: int
    disk: int
    readings: Sequence[Reading]

    @classmethod
    def of(cls, engine: shoal.Engine, readings: Sequence[Reading], *, cap: int, way: str, peak: int) -> Facts:
        """Collect them from an engine after its last step."""
        return cls(parameters=sum(parameter.numel() for parameter in engine.module.parameters()),
                   state=engine.model_state_bytes().total, ranks=engine.world_size, cap=cap, way=way, peak=peak,
                   disk=readings[-1].places.disk, readings=readings)

    @property
    def title(self) -> str:
        each = "" if self.ranks == 1 else f" on each of {self.ranks} ranks"
        return (f"One step of a GPT of {self.parameters / 1e6:.0f} M parameters: {size(self.state)} of state under a cap of "
                f"{size(self.cap)}{each}")

    def table(self) -> Table:
        """Lay the facts one below the other."""
        table = Table(box=SIMPLE_HEAD, show_header=False)
        for name, value in self.rows().items():
            table.add_row(name, value)
        return table

    def rows(self) -> dict[str, str]:
        """Name the facts; those of a step are medians over the settled ones."""
        settled = [reading.timeline for reading in self.readings[SETTLING:] or self.readings[-1:]]
        seconds = median(found.seconds for found in settled)
        read, written = median(found.read for found in settled), median(found.written for found in settled)
        working, computing = (median(found.share(*lanes) for found in settled) for lanes in (MOVING, COMPUTING))
        return {
            "parameters": f"{self.parameters:,}",
            "model state": f"{size(self.state)} a rank, {self.state / self.parameters * self.ranks:.1f} bytes a parameter",
            "cap": f"{size(self.cap)}, by {self.way}",
            "state / cap": f"{self.state / self.cap:.2f}",
            "peak of memory": f"{size(self.peak)}, as {self.way} counts it",
            "on the disk": size(self.disk),
            "steps": f"{len(self.readings)}, loss {self.readings[0].loss:.3f} to {self.readings[-1].loss:.3f}",
            "seconds a step": f"{seconds:.2f}",
            "read a step": f"{size(read)}, {size(read / seconds)}/s",
            "written a step": f"{size(written)}, {size(written / seconds)}/s",
            "the disk works": f"{working:.0%} of the time",
            "something computes": f"{computing:.0%} of the time",
            "both at once": f"{median(found.overlap for found in settled):.0%} of the time, "
                            f"{median(found.hidden for found in settled):.0%} of the disk's",
        }
