"""The gradient of one unit: what the ranks have together, resting where the stage says.

A reduction closes this rank's addend (addend.py) and adds the sum over the ranks to what rests in `reduced`. Where the
gradient rests PARTIAL the addend's own span receives the sum in place, and nothing else is held.

What rests, rests in a tier: it is brought when something is to be added to it, and left when its pass or its sum is done.

Where gradients may travel as signs (compressed.py) they rest PARTIAL. Division by the ranks then comes before the sum, so
that it is one of a mean.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from shoal.mesh.parameter_groups import ReplicaGroup
from shoal.precision.policy import Averaging
from shoal.recording.call import Handle
from shoal.sparse.row_exchange import RowExchange
from shoal.tier import FetchOnce, ResidentSpan, Store, Transfer, mirrored, offset_names
from shoal.transport.collectives import Communicator, Label
from shoal.transport.reduction import CopyOut
from shoal.zero.buffer import Pool
from shoal.zero.grad_accumulator import GradAccumulator
from shoal.zero.layout import Layout
from shoal.zero.onebit_transport import OneBitTransport
from shoal.zero.placement import PARTIAL, SHARD, Stage, master_dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientDtypes:
    """The dtype in which a gradient rests, the one in which it travels, and where between them it is divided."""

    accumulate: torch.dtype
    wire: torch.dtype
    averaging: Averaging = field(default_factory=Averaging)


class Gradient:
    """One unit's gradient between the backward passes that make it and the step that consumes it."""

    stays = False
    """A step may take the sum as soon as it is there: it does not go to rest before."""
    again = False
    """Recompute within a backward pass may add to it when it seemed complete."""
    unsynced = False
    """A backward pass ended without reducing this gradient."""
    launched = False
    """The present backward pass has reduced this gradient once."""
    measured = True
    """Whether a step will ask for the norm."""
    signed = False
    """It travels as signs."""
    still = False
    """It stays where it is until a later step sends it."""
    _valid = False  # `reduced` holds a sum

    def __init__(self, layout: Layout, stage: Stage, replica_group: ReplicaGroup, dtypes: GradientDtypes, pool: Pool,
                 store: Store, *, unit: str, index: int, rows: RowExchange | None = None,
                 signs: OneBitTransport | None = None):
        self.layout = layout
        self.rows = rows  # what moves those of an embedding; None: the gradient is always whole
        self.stage = stage
        self._communicator = communicator = replica_group.communicator
        self._replicas = replica_group.replicas
        self._dtypes, self._pool = dtypes, pool
        factors = dtypes.averaging.factors(replica_group.grad_divisor, accumulate=dtypes.accumulate, wire=dtypes.wire)
        before, self._after = factors.before, factors.after
        if signs is not None:  # what was not sent is an addend of the mean
            before, self._after = factors.before * factors.after, 1.0
        self._signs = signs
        self._reduce_label = Label(kind="reduce", unit=unit, index=index)
        self._replicate_label = Label(kind="replicate", unit=unit, index=index)
        self._flight: _Flight | None = None
        self._norm: Tensor | None = None
        partial, own = stage.gradient is PARTIAL, layout.span(communicator.rank)
        self._span, self.rest = mirrored(pool.device, store, layout.size if partial else len(own), dtypes.accumulate,
                                      f"gradient of unit '{unit}'", offset_names(layout.names, 0 if partial else own.start))
        self._place = FetchOnce(self._span)
        self._place.fetch(fresh=True)
        self._at = own.start if partial and stage.master is SHARD else 0
        self.own = self._span.tensor[own.start:own.stop] if partial else self._span.tensor
        """This rank's span of the reduced gradient."""
        whole = stage.master is SHARD or len(own) == layout.size
        self.reduced = self.own if whole else self._span.tensor
        """The reduced gradient, where the master rests."""
        self.addend = GradAccumulator(layout, dtypes.accumulate, pool, factor=before, rows=rows, signed=signs is not None,
                             resting=self._span.tensor if partial else None, place=self._place,
                             kept=isinstance(self._span, ResidentSpan))
        """What this rank has collected."""
        self.reset()

    @property
    def reopened(self) -> bool:
        """Whether gradients arrived after the present pass had reduced this one (re-entrant recompute)."""
        return self.launched and (self.addend.is_open or bool(self.rows and self.rows.collected))

    @property
    def pending(self) -> bool:
        """Whether a backward pass ran since the last step."""
        return self._valid or self.unsynced

    @property
    def bytes(self) -> int:
        """Bytes that rest on this rank."""
        return self._span.tensor.nbytes

    def norm(self) -> Tensor:
        """Return the L2 norm of this rank's span of the reduced gradient, in fp32 or wider."""
        if (norm := self._norm) is None:
            fetched = self._place.fetched
            self._place.fetch()
            norm = self._norm = _norm(self.own)
            if not fetched:
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
        return sync and not self.still and (boundary or self.stage.gradient is SHARD)

    def begin(self, *, stays: bool) -> None:
        """Start a backward pass, whose sum `stays` for a step that may take it at once."""
        self.stays, self.launched = stays, False
        self.addend.begin()

    def launch(self) -> None:
        """Start reducing the open buffer; slots that received nothing count as zero."""
        self.fold()
        self._norm = None
        if self.signed:
            self._launch_signs()
            return
        by_rows = self.rows and self.rows.agree_on_rows(dense=self.addend.dense)
        self._flight = self._launch_rows(self.rows) if self.rows and by_rows else self._launch_whole()
        self.addend.sent()
        self._valid = self.launched = True
        self.unsynced = False

    def _launch_whole(self) -> _Flight:
        resting = self.addend.resting
        self.addend.spill()
        self._place.fetch(fresh=not (self._valid or (self.addend.dense and resting is not None)))
        source = self.addend.close() if self._communicator.ranks == 1 else self._closed_on_wire()
        staging = self._pool.borrow(self._communicator.staging_elements(self.layout.size), source.dtype)
        handle = self._communicator.reduce_scatter(source, self.own, staging, self._reduce_label,
                                                   scale=self._after, accumulate=self._valid)
        return _Flight(handle=handle, borrowed=[staging] if source is resting else [staging, source])

    def _launch_rows(self, rows: RowExchange) -> _Flight:
        self._place.fetch(fresh=not self._valid)
        if not self._valid:
            self.reduced.zero_()
        return _Flight(handle=rows.reduce(self.own, scale=self._after, accumulate=self._valid), borrowed=[], rows=rows)

    def _launch_signs(self) -> None:
        """Start reducing the resting buffer by its signs, with what was collected elsewhere after a first sum was there."""
        assert self._signs is not None
        source = self.addend.close()
        self._signs.keep(source, onto=self._valid)
        self._flight = _Flight(handle=self._signs.reduce(self.addend.send_signs(source), self._reduce_label), borrowed=[])
        self._valid = self.launched = True
        self.unsynced = False

    def keep(self) -> None:
        """Let all that was collected be what was not sent: a later step sends it."""
        self.addend.keep()
        self.reset()

    def owe(self, residual: Tensor | None) -> None:
        """Take over `residual` (size,), as the addend's `residual` gave it, as what is still to be sent."""
        for owed in (None, residual):  # first, nothing is
            self.addend.owe(owed)
            self.reset()

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
            flight.handle = (self._replicate(self._communicator, self.reduced) if flight.rows is None
                             else flight.rows.replicate(self.reduced))
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
        self._place.fetch()
        self._norm = None
        size = self.own.numel() // self._replicas.ranks
        part = self.own[self._replicas.rank * size:][:size]
        source = self._on_wire(self.own)
        staging = self._pool.borrow(self._replicas.staging_elements(source.numel()), source.dtype)
        self._replicas.reduce_scatter(source, part, staging, self._reduce_label, scale=1.0, accumulate=False).wait()
        self._pool.give_back(staging)
        if source is not self.own:
            self._pool.give_back(source)
        self._replicate(self._replicas, self.own).wait()
        self.leave()

    def leave(self) -> None:
        """Let what was collected or reduced rest in its tier."""
        kept = isinstance(self._span, ResidentSpan) or (self.stays and self._span is self.rest)
        if kept or not self._place.fetched or self._flight is not None:
            return
        if self.measured and self._valid and self._norm is None:
            self._norm = _norm(self.own)
        self._place.commit()

    def reset(self) -> None:
        """Forget the gradient: the step has consumed it."""
        self.fold()
        self.spend()
        if self.addend.reset(summed=self._valid) and self._valid:
            self.own.zero_()  # which was this rank's own to sum
        self._norm = None
        self._valid = self.unsynced = self.launched = self.stays = self.again = False

    def spend(self) -> None:
        """Give up the sum, which a step has consumed, but not who received a gradient: the ranks may not have agreed yet."""
        self._place.commit(changed=False)
        self._span.discard()

    def _closed_on_wire(self) -> Tensor:
        """Return the open buffer in the wire's dtype."""
        source = self.addend.close()
        wire = self._on_wire(source)
        if wire is not source:
            self.addend.give_back(source)
        return wire

    def _on_wire(self, source: Tensor) -> Tensor:
        """Return `source` in the wire's dtype: itself, or a borrowed copy."""
        if source.dtype == self._dtypes.wire:
            return source
        return self._pool.borrow(source.numel(), self._dtypes.wire).copy_(source)

    def _replicate(self, communicator: Communicator, whole: Tensor) -> Handle:
        """Give every rank the spans of `whole`. Where the wire is narrower they are rounded to it, this rank's own too."""
        if self._dtypes.wire.itemsize >= whole.dtype.itemsize:
            return communicator.all_gather(whole, self._replicate_label)
        narrow = self._pool.borrow(whole.numel(), self._dtypes.wire)
        rows = whole.view(communicator.ranks, -1)
        narrow.view(communicator.ranks, -1)[communicator.rank] = rows[communicator.rank]
        return CopyOut(communicator.all_gather(narrow, self._replicate_label), narrow, whole, self._pool.give_back)


def _norm(gradient: Tensor) -> Tensor:
    return torch.linalg.vector_norm(gradient, dtype=master_dtype(gradient.dtype))


@dataclass(slots=True, kw_only=True)
class _Flight:
    """A reduction under way, and what it borrowed."""

    handle: Handle
    borrowed: list[Tensor]
    rows: RowExchange | None = None
    summed: bool = False
