"""The memory and disk usage of this rank, now and at its peak."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import torch

import shoal
from cgroup import ControlGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Bytes of tensors on the device (None: the device is the host), of the process, and of the swap files."""

    device: int | None
    host: int
    disk: int


class UsageProbe:
    """Measures the usage of one engine and its process, in any thread."""

    def __init__(self, engine: shoal.Engine, group: ControlGroup | None) -> None:
        assert engine.sharded is not None
        self.device = engine.device
        self.swaps = engine.sharded.storage.swaps
        self.group = group

    def now(self) -> Usage:
        device = torch.cuda.memory_allocated(self.device) if self.device.type == "cuda" else None
        return Usage(device=device, host=private_bytes(), disk=sum(swap.disk_bytes for swap in self.swaps))

    def peak(self) -> int:
        """Return the peak memory: as the control group counts it, or else of the process."""
        return (self.group.peak if self.group is not None else 0) or peak_private_bytes()


def private_bytes() -> int:
    """Return the resident bytes of this process, without mapped files, whose pages the kernel can drop."""
    resident, shared = map(int, Path("/proc/self/statm").read_text().split()[1:3])
    return (resident - shared) * os.sysconf("SC_PAGESIZE")


def peak_private_bytes() -> int:
    """Return the peak of `private_bytes`; exact unless mapped files have been unmapped since."""
    fields = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    peak, files = (int(fields[name].split()[0]) * 1024 for name in ("VmHWM", "RssFile"))
    return max(private_bytes(), peak - files)
