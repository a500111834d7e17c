"""The gradient of one unit: collected slot by slot, reduced as a whole, resting where the stage says.

Collected gradients are copied into the *open* buffer, one addend of the whole unit. A reduction closes it and adds the sum
over the ranks to what rests in `reduced`. Where the gradient rests PARTIAL the open buffer is the resting one, its own
span receives the sum in place, and nothing else is held; where it rests SHARD the open buffer is borrowed and given back.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from shoal.collectives import Communicator, Handle, Label
from shoal.zero.buffer import Pool, zeros
from shoal.zero.layout import Layout
from shoal.zero.placement import PARTIAL, SHARD, Stage


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientDtypes:
    """The dtype in which a gradient rests, and the one in which it travels."""

    accumulate: torch.dtype
    wire: torch.dtype


class Gradient:
    """One unit's gradient between the backward passes that make it and the step that consumes it."""

    def __init__(self, layout: Layout, stage: Stage, communicator: Communicator, dtypes: GradientDtypes, pool: Pool, *,
                 unit: str, index: int):
        self.layout = layout
        self.stage = stage
        self.touched = 0
        """Bit i: slot i received a gradient on this rank since the last step."""
        self.unsynced = False
        """A backward pass ended without reducing this gradient."""
        self.launched = False
        """The present backward pass has reduced this gradient once."""
        self._communicator = communicator
        self._dtypes = dtypes
        self._pool = pool
        mean = 1 / communicator.ranks
        wide = dtypes.accumulate == dtypes.wire and dtypes.wire.itemsize >= torch.float32.itemsize
        # Division by the ranks costs nothing in the copy that collects; 16-bit addends are divided after their sum in fp32.
        self._before, self._after = (mean, 1.0) if wide else (1.0, mean)
        self._reduce_label = Label(kind="reduce", unit=unit, index=index)
        self._replicate_label = Label(kind="replicate", unit=unit, index=index)
        self._slots = len(layout.slots)
        self.complete = False
        """Every slot received its gradient in the present backward pass."""
        self._seen = 0  # slots of the present backward pass, since it last was complete
        self._filled = 0  # slots whose view of the open buffer holds a value
        self._valid = False  # `reduced` holds a sum
        self._open: Tensor | None = None
        self._views: list[Tensor] = []
        self._resting: Tensor | None = None
        self._flight: _Flight | None = None
        own = layout.span(communicator.rank)
        if stage.gradient is PARTIAL:
            self._resting = zeros(layout.size, dtypes.accumulate, pool.device)
            self._resting_views = layout.views(self._resting)
            self.own = self._resting[own.start:own.stop]
            """This rank's span of the reduced gradient."""
            self.reduced = self.own if stage.master is SHARD else self._resting
            """The reduced gradient, where the master rests."""
        else:
            self.own = self.reduced = zeros(len(own), dtypes.accumulate, pool.device)
        self.reset()

    @property
    def reopened(self) -> bool:
        """Whether gradients arrived after the present pass had reduced this one (re-entrant recompute)."""
        return self.launched and self._open is not None

    @property
    def missing(self) -> list[int]:
        """The slots that the present backward pass has given nothing, since it last completed the gradient."""
        return [slot for slot in range(self._slots) if not self._seen >> slot & 1]

    @property
    def pending(self) -> bool:
        """Whether a backward pass ran since the last step."""
        return self._valid or self.unsynced

    @property
    def bytes(self) -> int:
        """Bytes that rest on this rank."""
        resting = self.reduced if self._resting is None else self._resting
        return resting.numel() * resting.element_size()

    def due(self, *, boundary: bool, sync: bool) -> bool:
        """Whether a backward pass reduces this gradient: at the boundary where it rests PARTIAL, else always."""
        return sync and (boundary or self.stage.gradient is SHARD)

    def begin(self) -> None:
        """Start a backward pass."""
        self._seen = 0
        self.launched = self.complete = False

    def collect(self, slot: int, gradient: Tensor) -> bool:
        """Add the gradient of one slot (its shape, any dtype) to the open buffer; return whether it was the last one.

        A pass may complete a gradient more than once: re-entrant recompute runs a backward of its own for each call.
        """
        bit = 1 << slot
        if self._open is None:
            self._open = self._pool.borrow(self.layout.size, self._dtypes.accumulate)
            self._views = self.layout.views(self._open)
            self._filled = 0
        view = self._views[slot]
        if self._filled & bit:
            view.add_(gradient, alpha=self._before)
        elif self._before == 1:
            view.copy_(gradient)
        elif gradient.dtype == view.dtype:
            torch.mul(gradient, self._before, out=view)
        else:
            view.copy_(gradient).mul_(self._before)
        self._filled |= bit
        self.touched |= bit
        self._seen |= bit
        if self._seen.bit_count() < self._slots:
            return False
        self._seen, self.complete = 0, True
        return True

    def conclude(self) -> None:
        """Take the slots that the present backward pass gave nothing so far to receive nothing from it."""
        self._seen, self.complete = 0, True

    def launch(self) -> None:
        """Start reducing the open buffer; slots that received nothing count as zero."""
        self.fold()
        source = self._close()
        staging = self._pool.borrow(self._communicator.staging_elements(self.layout.size), source.dtype)
        handle = self._communicator.reduce_scatter(source, self.own, staging, self._reduce_label,
                                                   scale=self._after, accumulate=self._valid)
        borrowed = [staging] if source is self._resting else [staging, source]
        self._flight = _Flight(handle=handle, borrowed=borrowed)
        self._valid = True
        self.launched = True
        self.unsynced = False

    def advance(self) -> None:
        """Wait for the addends, sum them, and start replicating the sum where the master rests replicated."""
        flight = self._flight
        if flight is None or flight.summed:
            return
        flight.handle.wait()
        flight.summed = True
        while flight.borrowed:
            self._pool.give_back(flight.borrowed.pop())
        if self.reduced is not self.own:
            flight.handle = self._communicator.all_gather(self.reduced, self._replicate_label)

    def fold(self) -> None:
        """Wait until `reduced` holds the sum."""
        self.advance()
        if self._flight is not None:
            self._flight.handle.wait()
            self._flight = None

    def reset(self) -> None:
        """Forget the gradient: the step has consumed it."""
        self.fold()
        if self._open is not None and self._open is not self._resting:
            self._pool.give_back(self._open)
        self._open = self._resting
        self._views = [] if self._resting is None else self._resting_views
        self._filled = self._seen = self.touched = 0
        self._valid = self.unsynced = self.launched = self.complete = False

    def _close(self) -> Tensor:
        """Return the open buffer, in the wire's dtype, with zeros where nothing was collected."""
        source = self._open
        if source is None:
            source = self._pool.borrow(self.layout.size, self._dtypes.accumulate)
            source.zero_()
        elif self._filled.bit_count() < self._slots:
            for slot, view in enumerate(self._views):
                if not self._filled >> slot & 1:
                    view.zero_()
        if source is not self._resting:
            for gap in self.layout.gaps():
                source[gap.start:gap.stop].zero_()
        self._open, self._views, self._filled = None, [], 0
        if source.dtype == self._dtypes.wire:
            return source
        wire = self._pool.borrow(self.layout.size, self._dtypes.wire).copy_(source)
        if source is not self._resting:
            self._pool.give_back(source)
        return wire


@dataclass(slots=True, kw_only=True)
class _Flight:
    """A reduction under way, and what it borrowed."""

    handle: Handle
    borrowed: list[Tensor]
    summed: bool = False
