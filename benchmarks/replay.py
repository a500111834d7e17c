"""The bytes of an iteration with everything on disk, in the same order and the same window, without its arithmetic."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

import torch

from shoal.tier import DiskSpan, Swap, Transfer
from shoal.tier.store import PAGE_POOL, WRITE_AHEAD

CHUNK = 1 << 20
PIECES = 4
REQUESTS = 16  # as an engine has by default: 8 each way


class Replay:
    """Spans of weights, gradients and two moments in fp32 for units of so many elements, stepped after or in backward."""

    def __init__(self, folder: str, units: list[int], *, buffers: int, in_backward: bool = False):
        self._swap = Swap(folder, requests=REQUESTS, write_ahead=WRITE_AHEAD, page_pool=PAGE_POOL)
        self._units = [[DiskSpan(self._swap, size, torch.float32, "replay") for _ in range(4)] for size in units]
        self._buffers = buffers
        self._in_backward = in_backward
        self._begun = in_backward  # before its first step nothing is kept for backward
        self._leaving: deque[list[Transfer]] = deque()

    def iteration(self) -> None:
        """Move what forward, backward and step move.

        A step after backward leaves the forward its weights in memory. So does the end of each pass the weights that the
        next one begins with: of the last units for backward, and for a step after that those of the first.
        """
        first, last = self._units[:self._buffers], self._units[-self._buffers:]
        for unit in _ahead(self._units, self._buffers) if self._in_backward else ():
            if unit in last:
                unit[0].fetch()
            unit[0].commit(changed=False)
        for unit in _ahead(self._units[::-1], self._buffers):
            if unit in last and self._begun:
                unit[0].commit(changed=False)
            if self._in_backward:
                self._step([unit])
            if not self._in_backward:
                unit[1].fetch(fresh=True).wait()
                unit[1].commit()
            if self._in_backward or unit not in first:
                unit[0].commit(changed=False)
        if not self._in_backward:
            self._step(self._units, held=first, kept=last)
        self._begun = True

    def settle(self) -> None:
        """Wait for what is still being written."""
        while self._leaving:
            for transfer in self._leaving.popleft():
                transfer.wait()

    def close(self) -> None:
        """Remove the file."""
        self._swap.close()

    def _step(self, units: list[list[DiskSpan]], *, held: Sequence[list[DiskSpan]] = (),
              kept: Sequence[list[DiskSpan]] = ()) -> None:
        """Step `units`, of which the weights of those `held` are in memory, and of those `kept` stay there."""
        pieces = deque((unit, start, min(start + CHUNK, unit[0].tensor.numel()))
                       for unit in units for start in range(0, unit[0].tensor.numel(), CHUNK))
        fetched: deque[tuple[list[DiskSpan], int, int, list[Transfer]]] = deque()
        while pieces or fetched:
            while pieces and len(fetched) < 2:
                unit, start, stop = pieces.popleft()
                fetched.append((unit, start, stop, [span.fetch(start, stop) for span in self._stepped(unit)]))
            unit, start, stop, arriving = fetched.popleft()
            for transfer in arriving:
                transfer.wait()
            if unit in kept:
                unit[0].fetch(start, stop)
            self._leaving.append([span.commit(start, stop, changed=span is not unit[1]) for span in self._stepped(unit)])
            if unit in held:
                unit[0].commit(start, stop, changed=False)
            while len(self._leaving) > PIECES - 2:
                for transfer in self._leaving.popleft():
                    transfer.wait()
        for unit in units:
            unit[1].discard()

    def _stepped(self, unit: list[DiskSpan]) -> list[DiskSpan]:
        """Return what the step of a unit brings: in backward the gradient is there."""
        return [unit[0], *unit[2:]] if self._in_backward else unit


def _ahead(units: list[list[DiskSpan]], buffers: int) -> Iterable[list[DiskSpan]]:
    """Yield units whose weights have arrived, with those of `buffers` units in memory at once."""
    arriving = deque(unit[0].fetch() for unit in units[:buffers])
    for number, unit in enumerate(units):
        arriving.popleft().wait()
        yield unit
        if number + buffers < len(units):
            arriving.append(units[number + buffers][0].fetch())
