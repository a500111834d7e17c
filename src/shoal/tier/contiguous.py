"""Spans of one size as parts of one buffer, so that memory is allocated once and never in pieces of other sizes."""

from __future__ import annotations

import torch

from shoal.log import warn_once
from shoal.tier.span import Names, PlacedSpan, ResidentSpan, no_names
from shoal.tier.store import Memory

__all__ = ["ContiguousMemory"]


class ContiguousMemory:
    """Memory that is allocated as one buffer for `number` spans of each size; where that is full, another one like it."""

    granule: None = None

    def __init__(self, memory: Memory, number: int):
        self._memory, self._number = memory, number
        self._free: dict[tuple[int, torch.dtype], list[ResidentSpan]] = {}

    @property
    def device(self) -> torch.device:
        """The device of the memory."""
        return self._memory.device

    def place(self, size: int, dtype: torch.dtype, name: str, *, part: range | None = None,
              names: Names = no_names) -> PlacedSpan:
        """Return a part of the buffer. Warns once where more than `number` parts of one size are used at once."""
        key = size, dtype
        free = self._free.get(key)
        if not free:
            if free is not None:
                warn_once(f"contiguous memory: more than {self._number} tensors of {size:,} elements rest at once; a second "
                          f"buffer of as many is allocated. Give num_checkpoints what rests at once")
            whole = self._memory.place(size * self._number, dtype, name, names=names).tensor
            free = self._free[key] = [ResidentSpan(each) for each in whole.view(self._number, size).unbind(0)]
        return free.pop()
