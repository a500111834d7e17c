"""Where the bytes of this rank are, and the most that there were."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import torch

import shoal
from group import Group


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """Bytes now: tensors on the device (None: that is the host), the process, the swap files."""

    device: int | None
    host: int
    disk: int


class Look:
    """Looks at one engine and its process, in any thread."""

    def __init__(self, engine: shoal.Engine, group: Group | None) -> None:
        assert engine.sharded is not None
        self.device = engine.device
        self.swaps = engine.sharded.residence.swaps
        self.group = group

    def now(self) -> Places:
        device = torch.cuda.memory_allocated(self.device) if self.device.type == "cuda" else None
        return Places(device=device, host=own(), disk=sum(swap.disk_bytes for swap in self.swaps))

    def peak(self) -> int:
        """Return the most bytes of memory at once: as the control group counts them, or of the process."""
        return (self.group.peak if self.group is not None else 0) or own_peak()


def own() -> int:
    """Return the bytes of this process that are in memory, without the files that it maps: the system can drop those."""
    resident, shared = map(int, Path("/proc/self/statm").read_text().split()[1:3])
    return (resident - shared) * os.sysconf("SC_PAGESIZE")


def own_peak() -> int:
    """Return the most that `own` was, which is exact if the files it maps are not fewer now."""
    fields = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    peak, files = (int(fields[name].split()[0]) * 1024 for name in ("VmHWM", "RssFile"))
    return max(own(), peak - files)
