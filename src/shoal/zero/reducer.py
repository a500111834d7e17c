"""Gradients are reduced in one fixed order, each as soon as it and all before it are complete.

The order is a contract between ranks. A gradient that a pass did not complete is reduced when the pass ends, with zeros
for what is missing, so that a rank that skips a module does not hang the others. Those that travel by rows come last, when
the pass ends: they begin with a word from every rank, which within a pass might be waiting for something of this one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import torch

from shoal.zero.gradient import Gradient

IN_FLIGHT = 2
"""Reductions under way before the oldest is summed: what they borrow is constant. None are where nothing travels."""


class Reducer:
    """The reductions of one backward pass, and those that a step still owes."""

    def __init__(self, gradients: list[Gradient], *, overlap: bool, ranks: int = 1, late: Sequence[Gradient] = ()):
        """`late` are gradients that no pass reduces: a step does when it begins."""
        self._late = late
        self._order = sorted(gradients, key=lambda gradient: gradient.rows is not None)
        self._in_flight = IN_FLIGHT if ranks > 1 else 0
        self._overlap = overlap
        self._flight: deque[Gradient] = deque()
        self._replicating: deque[Gradient] = deque()
        self._due: list[Gradient] = []
        self._is_due: set[Gradient] = set()
        self._next = 0
        self.consume: Callable[[Gradient], bool] | None = None
        """Offered each sum of a pass as soon as it is there; says whether a step has taken it, so that it need not rest."""

    def begin(self, *, boundary: bool, sync: bool) -> None:
        """Start a backward pass, which reduces at an accumulation `boundary` and not at all without `sync`."""
        self._due = [gradient for gradient in self._order if gradient.due(boundary=boundary, sync=sync)]
        self._is_due = set(self._due)
        self._next = 0
        for gradient in self._order:
            gradient.begin(stays=self.consume is not None and gradient in self._is_due)

    def advance(self) -> None:
        """Launch what is complete, in order."""
        while (self._overlap and self._next < len(self._due) and (due := self._due[self._next]).addend.complete
               and due.rows is None):
            self._launch(due)
            self._next += 1

    def completed(self, gradient: Gradient) -> None:
        """Let a complete gradient rest that this pass does not reduce."""
        if gradient not in self._is_due:
            gradient.leave()

    def finish(self) -> None:
        """End the backward pass: reduce the rest, and wait for all."""
        for gradient in self._order:
            if gradient not in self._is_due:
                gradient.unsynced = True
                gradient.leave()
        for gradient in self._late:
            gradient.unsynced = True
        if self._due:
            self._reduce_rest()

    @torch.no_grad()
    def _reduce_rest(self) -> None:
        for gradient in self._due:
            if not gradient.launched:
                self._launch(gradient)
        for gradient in self._due:
            if gradient.reopened:
                self._launch(gradient)
        self._drain()
        self._due, self._is_due = [], set()

    def flush(self) -> None:
        """Reduce what earlier passes left unreduced: a step needs it."""
        for gradient in self._order:
            if gradient.unsynced:
                self._launch(gradient)
        self._drain()

    def _launch(self, gradient: Gradient) -> None:
        gradient.launch()
        self._flight.append(gradient)
        if len(self._flight) > self._in_flight:
            self._replicating.append(self._flight.popleft())
            self._replicating[-1].advance()
        if len(self._replicating) > self._in_flight:
            self._fold(self._replicating.popleft())
        if not self._overlap:
            self._fold(gradient)

    def _fold(self, gradient: Gradient) -> None:
        gradient.fold()
        if gradient.stays:
            gradient.stays = False
            if self.consume is None or not self.consume(gradient):
                gradient.leave()

    def _drain(self) -> None:
        for gradient in self._order:
            gradient.advance()
        for gradient in self._order:
            self._fold(gradient)
        self._flight.clear()
        self._replicating.clear()
