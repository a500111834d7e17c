"""Replays the disk transfers of a training iteration, in the same order and the same window, without its arithmetic."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

import torch

from shoal.tier import DiskSpan, Swap, Transfer
from shoal.tier.store import PAGE_POOL, WRITE_AHEAD

CHUNK = 1 << 20
REQUESTS = 16  # the default of an engine: 8 each way


class Replay:
    """Transfers of units with weights, gradients and two moments in fp32 on disk, stepped after or within backward.

    `units` are their sizes in elements; `buffers` units have their weights in memory at once. `chunks` of state are in
    memory at once: as in an engine of that `buffer_count` about half of them are fetched ahead, across units, and the others
    are written.
    """

    def __init__(self, folder: str, units: list[int], *, buffers: int, chunks: int, in_backward: bool = False):
        self._fetches_ahead = (chunks - 1) // 2
        self._commits_behind = chunks - 1 - self._fetches_ahead
        self._chunks: deque[tuple[list[DiskSpan], int, int]] = deque()
        self._fetched: deque[tuple[list[DiskSpan], int, int, list[Transfer]]] = deque()
        self._swap = Swap(folder, requests=REQUESTS, write_ahead=WRITE_AHEAD, page_pool=PAGE_POOL)
        self._units = [[DiskSpan(self._swap, size, torch.float32, "replay") for _ in range(4)] for size in units]
        self._buffers = buffers
        self._in_backward = in_backward
        self._last_resident = in_backward  # with steps after backward, the first backward finds no weights in memory
        self._commits: deque[list[Transfer]] = deque()

    def iteration(self) -> None:
        """Run the transfers of forward, backward and step.

        A step after backward leaves each unit's weights in memory for the next forward, which then transfers nothing. Each
        pass also leaves in memory the weights with which the next one begins: forward those of the last units, for backward;
        backward those of the first units, for a step after it.
        """
        first, last = self._units[:self._buffers], self._units[-self._buffers:]
        for unit in _ahead(self._units, self._buffers) if self._in_backward else ():
            if unit in last:
                unit[0].fetch()
            unit[0].commit(changed=False)
        if self._in_backward:
            self._begin(self._units[::-1])
        for unit in _ahead(self._units[::-1], self._buffers):
            if unit in last and self._last_resident:
                unit[0].commit(changed=False)
            if self._in_backward:
                self._step(unit)
            else:
                unit[1].fetch(fresh=True).wait()
                unit[1].commit()
            if self._in_backward or unit not in first:
                unit[0].commit(changed=False)
        if not self._in_backward:
            self._begin(self._units)
            for unit in self._units:
                self._step(unit, resident=unit in first, keep=unit in last)
        self._last_resident = True

    def wait(self) -> None:
        """Wait for the pending writes."""
        while self._commits:
            for transfer in self._commits.popleft():
                transfer.wait()

    def close(self) -> None:
        """Remove the file."""
        self._swap.close()

    def _begin(self, units: Sequence[list[DiskSpan]]) -> None:
        """Start fetching what steps of `units`, in this order, need first."""
        self._chunks = deque((unit, start, min(start + CHUNK, unit[0].tensor.numel()))
                             for unit in units for start in range(0, unit[0].tensor.numel(), CHUNK))
        self._fill()

    def _fill(self) -> None:
        while self._chunks and len(self._fetched) <= self._fetches_ahead:
            unit, start, stop = self._chunks.popleft()
            spans = unit[2:] if self._in_backward else unit  # within backward gradient and weights are in memory then
            self._fetched.append((unit, start, stop, [span.fetch(start, stop) for span in spans]))

    def _step(self, unit: list[DiskSpan], *, resident: bool = False, keep: bool = False) -> None:
        """Step `unit`; with `resident` its weights are in memory, and with `keep` they stay there."""
        stepped = [unit[0], *unit[2:]] if self._in_backward else unit
        while self._fetched and self._fetched[0][0] is unit:
            _, start, stop, arriving = self._fetched.popleft()
            self._fill()
            if self._in_backward:
                arriving.append(unit[0].fetch(start, stop))
            for transfer in arriving:
                transfer.wait()
            if keep:
                unit[0].fetch(start, stop)
            self._commits.append([span.commit(start, stop, changed=span is not unit[1]) for span in stepped])
            if resident:
                unit[0].commit(start, stop, changed=False)
            while len(self._commits) > self._commits_behind:
                for transfer in self._commits.popleft():
                    transfer.wait()
        unit[1].discard()


def _ahead(units: list[list[DiskSpan]], buffers: int) -> Iterable[list[DiskSpan]]:
    """Yield units whose weights have arrived; fetches run ahead so that `buffers` units are in memory at once."""
    arriving = deque(unit[0].fetch() for unit in units[:buffers])
    for number, unit in enumerate(units):
        arriving.popleft().wait()
        yield unit
        if number + buffers < len(units):
            arriving.append(units[number + buffers][0].fetch())
