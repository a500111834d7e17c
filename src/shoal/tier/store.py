"""The tiers: whoever needs memory for state that rests asks one of these for a span.

    Memory   of the compute device, or of its host: spans are always there
    Disk     spans are brought into the host's memory while they are used
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from shoal.tier.disk_span import CHUNK, DiskSpan
from shoal.tier.memory import zeros
from shoal.tier.span import Names, PlacedSpan, ResidentSpan, unnamed
from shoal.tier.swap import Swap

__all__ = ["Disk", "Memory", "Store"]


class Store(Protocol):
    """Where state rests."""

    @property
    def device(self) -> torch.device:
        """Where a span's tensor is while it is used."""
        ...

    @property
    def granule(self) -> int | None:
        """Elements that are brought at once; None where everything is always there."""
        ...

    def place(self, size: int, dtype: torch.dtype, name: str, *, part: range | None = None,
              names: Names = unnamed) -> PlacedSpan:
        """Return a span of `size` zeros, of which `part` (default: all) rests; errors call it `name`, and add `names`."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """The memory of a device; of the host page-locked if `pinned`."""

    device: torch.device
    pinned: bool = False
    granule: None = None

    def place(self, size: int, dtype: torch.dtype, name: str, *, part: range | None = None,
              names: Names = unnamed) -> PlacedSpan:
        if self.pinned:
            return ResidentSpan(torch.zeros(size, dtype=dtype, pin_memory=True))
        return ResidentSpan(zeros(size, dtype, self.device))


@dataclass(frozen=True, slots=True, kw_only=True)
class Disk:
    """A swap file."""

    swap: Swap
    granule: int = CHUNK

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    def place(self, size: int, dtype: torch.dtype, name: str, *, part: range | None = None,
              names: Names = unnamed) -> PlacedSpan:
        return DiskSpan(self.swap, size, dtype, name, part=part, chunk=self.granule, names=names)
