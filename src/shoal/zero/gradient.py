"""The gradient of one unit: collected slot by slot, reduced as a whole, resting where the stage says.

Collected gradients are copied into the *open* buffer, one addend of the whole unit. A reduction closes it and adds the sum
over the ranks to what rests in `reduced`. Where the gradient rests PARTIAL the open buffer is the resting one, its own
span receives the sum in place, and nothing else is held; where it rests SHARD the open buffer is borrowed and given back.

What rests, rests in a tier: it is brought when something is to be added to it, and left when its pass or its sum is done.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from shoal.collectives import Handle, Label
from shoal.holders import Holders
from shoal.tier import Kept, Store, Transfer, above
from shoal.zero.buffer import Pool
from shoal.zero.layout import Layout
from shoal.zero.placement import PARTIAL, SHARD, Stage, master_dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientDtypes:
    """The dtype in which a gradient rests, and the one in which it travels."""

    accumulate: torch.dtype
    wire: torch.dtype


class Gradient:
    """One unit's gradient between the backward passes that make it and the step that consumes it."""

    stays = False
    """A step may take the sum as soon as it is there: it does not go to rest before."""
    again = False
    """Recompute within a backward pass may add to it when it seemed complete."""

    def __init__(self, layout: Layout, stage: Stage, holders: Holders, dtypes: GradientDtypes, pool: Pool,
                 store: Store, *, unit: str, index: int):
        self.layout = layout
        self.stage = stage
        self.touched = 0
        """Bit i: slot i received a gradient on this rank since the last step."""
        self.unsynced = False
        """A backward pass ended without reducing this gradient."""
        self.launched = False
        """The present backward pass has reduced this gradient once."""
        self._communicator = communicator = holders.communicator
        self._replicas = holders.replicas
        self._dtypes, self._pool = dtypes, pool
        self._before, self._after = _division(1 / holders.addends, dtypes)
        self._reduce_label = Label(kind="reduce", unit=unit, index=index)
        self._replicate_label = Label(kind="replicate", unit=unit, index=index)
        self._slots = len(layout.slots)
        self.complete = False
        """Every slot received its gradient in the present backward pass."""
        self._open: Tensor | None = None
        self._resting: Tensor | None = None
        self._flight: _Flight | None = None
        self.measured = True
        """Whether a step will ask for the norm."""
        self._norm: Tensor | None = None
        partial, own = stage.gradient is PARTIAL, layout.span(communicator.rank)
        self._span, self.rest = above(pool.device, store, layout.size if partial else len(own), dtypes.accumulate,
                                      f"gradient of unit '{unit}'")
        self._here = False  # whether the span is fetched
        self._bring(fresh=True)
        self._at = own.start if partial and stage.master is SHARD else 0
        self.own = self._span.tensor[own.start:own.stop] if partial else self._span.tensor
        """This rank's span of the reduced gradient."""
        whole = stage.master is SHARD or len(own) == layout.size
        self.reduced = self.own if whole else self._span.tensor
        """The reduced gradient, where the master rests."""
        if partial:
            self._resting = self._span.tensor
            self._resting_views = layout.views(self._resting)
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

    def norm(self) -> Tensor:
        """Return the L2 norm of this rank's span of the reduced gradient, in fp32 or wider."""
        if (norm := self._norm) is None:
            self._bring()
            norm = self._norm = _norm(self.own)
            self.leave()
        return norm

    def at_rest(self, part: range) -> Tensor:
        """Return the elements `part` of the reduced gradient, counted as the master's, where the step reads them."""
        return self.rest.tensor[self._at + part.start:self._at + part.stop]

    def fetch(self, part: range) -> Transfer:
        """Bring what `at_rest` returns."""
        return self.rest.fetch(self._at + part.start, self._at + part.stop)

    def commit(self, part: range) -> Transfer:
        """Be done with what `at_rest` returned."""
        return self.rest.commit(self._at + part.start, self._at + part.stop, changed=False)

    def due(self, *, boundary: bool, sync: bool) -> bool:
        """Whether a backward pass reduces this gradient: at the boundary where it rests PARTIAL, else always."""
        return sync and (boundary or self.stage.gradient is SHARD)

    def begin(self, *, stays: bool) -> None:
        """Start a backward pass, whose sum `stays` for a step that may take it at once."""
        self.stays = stays
        self._seen = 0
        self.launched = self.complete = False

    def collect(self, slot: int, gradient: Tensor) -> bool:
        """Add the gradient of one slot (its shape, any dtype) to the open buffer; return whether it was the last one.

        A pass may complete a gradient more than once: re-entrant recompute runs a backward of its own for each call.
        """
        bit = 1 << slot
        if self._open is not None and self._open is self._resting:
            self._bring(fresh=not self._filled)
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
        self._bring(fresh=not (self._valid or self._filled))
        self._norm = None
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
        else:
            self._flight = None
            self.leave()

    def fold(self) -> None:
        """Wait until `reduced` holds the sum, and let it rest."""
        self.advance()
        if self._flight is not None:
            self._flight.handle.wait()
            self._flight = None
            self.leave()

    def join_replicas(self) -> None:
        """Add what the other copies of this rank's span received: once, when a step begins."""
        if self._replicas is None or not self._valid:
            return
        self.fold()
        self._bring()
        self._norm = None
        size = self.own.numel() // self._replicas.ranks
        part = self.own[self._replicas.rank * size:][:size]
        staging = self._pool.borrow(self._replicas.staging_elements(self.own.numel()), self.own.dtype)
        self._replicas.reduce_scatter(self.own, part, staging, self._reduce_label, scale=1.0, accumulate=False).wait()
        self._pool.give_back(staging)
        self._replicas.all_gather(self.own, self._replicate_label).wait()
        self.leave()

    def leave(self) -> None:
        """Let what was collected or reduced rest in its tier."""
        if not self._here or self._flight is not None or isinstance(self._span, Kept):
            return
        if self.stays and self._span is self.rest:
            return
        if self.measured and self._valid and self._norm is None:
            self._norm = _norm(self.own)
        self._here = False
        self._span.commit()

    def reset(self) -> None:
        """Forget the gradient: the step has consumed it."""
        self.fold()
        if self._open is not None and self._open is not self._resting:
            self._pool.give_back(self._open)
        self._open = self._resting
        self._views = [] if self._resting is None else self._resting_views
        self.spend()
        self._norm = None
        self._seen = self.touched = 0  # the slots of the present backward pass, since it last was complete; of the step
        self._filled = 0  # the slots whose view of the open buffer holds a value
        self._valid = False  # whether `reduced` holds a sum
        self.unsynced = self.launched = self.complete = self.stays = self.again = False

    def spend(self) -> None:
        """Give up the sum, which a step has consumed, but not who received a gradient: the ranks may not have agreed yet."""
        if self._here:
            self._here = False
            self._span.commit(changed=False)
        self._span.discard()

    def _bring(self, *, fresh: bool = False) -> None:
        """Have what rests in memory; if `fresh`, its values do not matter."""
        if not self._here:
            self._here = True
            self._span.fetch(fresh=fresh).wait()

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
        if source is not self._resting or not isinstance(self._span, Kept):
            for gap in self.layout.gaps():
                source[gap.start:gap.stop].zero_()
        self._open, self._views, self._filled = None, [], 0
        if source.dtype == self._dtypes.wire:
            return source
        wire = self._pool.borrow(self.layout.size, self._dtypes.wire).copy_(source)
        if source is not self._resting:
            self._pool.give_back(source)
        return wire


def _division(mean: float, dtypes: GradientDtypes) -> tuple[float, float]:
    """Return the factors before and after the sum: in the copy that collects division is free; 16-bit addends are divided
    after their sum in fp32.
    """
    wide = dtypes.accumulate == dtypes.wire and dtypes.wire.itemsize >= torch.float32.itemsize
    return (mean, 1.0) if wide else (1.0, mean)


def _norm(gradient: Tensor) -> Tensor:
    return torch.linalg.vector_norm(gradient, dtype=master_dtype(gradient.dtype))


@dataclass(slots=True, kw_only=True)
class _Flight:
    """A reduction under way, and what it borrowed."""

    handle: Handle
    borrowed: list[Tensor]
    summed: bool = False
