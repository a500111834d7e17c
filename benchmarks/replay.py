"""The bytes of an iteration with everything on disk, in the same order and the same window, without its arithmetic."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

import torch

from shoal.tier import Span, Swap, Swapped, Transfer
from shoal.tier.opening import WRITE_AHEAD

CHUNK = 1 << 20
PIECES = 4
REQUESTS = 16  # as an engine has by default: 8 each way


class Replay:
    """Spans of weights, gradients and two moments in fp32 for units of so many elements."""

    def __init__(self, folder: str, units: list[int], *, buffers: int):
        self._swap = Swap(folder, requests=REQUESTS, write_ahead=WRITE_AHEAD)
        self._units = [[Swapped(self._swap, size, torch.float32, "replay") for _ in range(4)] for size in units]
        self._buffers = buffers

    def iteration(self) -> None:
        """Move what forward, backward and step move."""
        self._pass([unit[0] for unit in self._units])
        written: list[Transfer] = []
        for weight, gradient in _ahead([unit[0] for unit in reversed(self._units)], self._buffers,
                                       [unit[1] for unit in reversed(self._units)]):
            weight.commit(changed=False)
            gradient.fetch(fresh=True).wait()
            written.append(gradient.commit())
        self._step()

    def close(self) -> None:
        """Remove the file."""
        self._swap.close()

    def _pass(self, spans: list[Span]) -> None:
        for span, _ in _ahead(spans, self._buffers, spans):
            span.commit(changed=False)

    def _step(self) -> None:
        pieces = deque((unit, start, min(start + CHUNK, unit[0].tensor.numel()))
                       for unit in self._units for start in range(0, unit[0].tensor.numel(), CHUNK))
        fetched: deque[tuple[list[Swapped], int, int, list[Transfer]]] = deque()
        leaving: deque[list[Transfer]] = deque()
        while pieces or fetched:
            while pieces and len(fetched) < 2:
                unit, start, stop = pieces.popleft()
                fetched.append((unit, start, stop, [span.fetch(start, stop) for span in unit]))
            unit, start, stop, arriving = fetched.popleft()
            for transfer in arriving:
                transfer.wait()
            leaving.append([span.commit(start, stop, changed=span is not unit[1]) for span in unit])
            while len(leaving) > PIECES - 2:
                for transfer in leaving.popleft():
                    transfer.wait()
        for unit in self._units:
            unit[1].discard()


def _ahead(spans: list[Span], buffers: int, others: list[Span]) -> Iterable[tuple[Span, Span]]:
    """Yield spans that have arrived, with `buffers` of them in memory at once."""
    arriving = deque(span.fetch() for span in spans[:buffers])
    for number, span in enumerate(spans):
        arriving.popleft().wait()
        yield span, others[number]
        if number + buffers < len(spans):
            arriving.append(spans[number + buffers].fetch())
