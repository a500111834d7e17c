"""How the weights and the gradient of one unit travel between ranks.

    WeightTransport    the weights alone, of a frozen unit: all-gather the whole buffer
    DenseTransport     reduce-scatter the whole buffer, all-gather the sum or the stepped weights
    RowsTransport      an embedding: exchange only the rows that a step touches, where these are fewer bytes
    OneBitTransport    one bit an element and one scale a block (docs/compression.md)
    Transports         which of them a unit gets

`Unit` asks its transport to gather, `TrainableUnit` to publish, `Gradient` to reduce and to replicate. A transport keeps
neither weights nor gradient: it fills the shards of other ranks in the unit's buffer, reads the accumulator's closed buffer,
and adds to `gradient.own`, this rank's shard of the sum.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from shoal import onebit
from shoal.mesh.parameter_groups import ReplicaGroup
from shoal.precision.policy import Averaging
from shoal.recording.call import Handle
from shoal.sparse.row_exchange import RowExchange
from shoal.tier import FetchOnce
from shoal.transport.collectives import Communicator, Label
from shoal.zero.grad_accumulator import GradAccumulator, Pool, ResidualAccumulator, RowsAccumulator
from shoal.zero.layout import Layout

__all__ = ["COMPRESSIBLE", "DenseTransport", "GradientDtypes", "InFlight", "OneBitTransport", "RowsTransport", "Transports",
           "UnitWire", "WeightTransport"]

COMPRESSIBLE = (torch.float32, torch.bfloat16, torch.float16)
"""The dtypes of weights that one-bit compression takes; others travel uncompressed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientDtypes:
    """The dtype in which a gradient rests, the one in which it travels, and where between them it is divided."""

    accumulate: torch.dtype
    wire: torch.dtype
    averaging: Averaging = field(default_factory=Averaging)


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitWire:
    """One unit as its transport sees it."""

    name: str
    index: int
    layout: Layout
    replica_group: ReplicaGroup
    dtypes: GradientDtypes
    pool: Pool


@dataclass(slots=True, kw_only=True)
class InFlight:
    """A reduction under way, and the buffers that it borrowed."""

    handle: Handle
    borrowed: list[Tensor] = field(default_factory=list[Tensor])
    replicate: Callable[[Tensor], Handle]
    """Gives all ranks the shards of the sum, where it rests replicated."""
    summed: bool = field(default=False, init=False)
    """Whether the addends are summed, and the shards of the sum are on their way."""

    def sum(self, pool: Pool) -> bool:
        """Wait for the addends and sum them; return whether what follows has yet to start, as after a start that failed."""
        if self.summed:
            return False
        self.handle.wait()
        while self.borrowed:
            pool.give_back(self.borrowed.pop())
        return True

    def start_replicating(self, whole: Tensor) -> None:
        """Start giving all ranks the shards of the sum `whole` (1-D)."""
        self.handle = self.replicate(whole)
        self.summed = True


class Reducible(Protocol):
    """The part of a `Gradient` that a transport reads and writes."""

    accumulator: GradAccumulator
    own: Tensor
    """This rank's shard of the sum."""
    reduced: Tensor
    """The sum, where the master rests."""
    has_sum: bool
    """Whether `reduced` holds an earlier sum of the step, to which this one is added."""

    def fetch_sum(self, *, fresh: bool) -> None:
        """Fetch the resting buffer; `fresh`: the caller overwrites it."""
        ...


class WeightTransport:
    """Sends the whole buffer of the weights, in their own dtype."""

    gathers_rows = False
    """Whether `gather_rows` may bring the rows that a call looks up, instead of the whole."""

    def __init__(self, communicator: Communicator, unit: str, index: int):
        self._communicator = communicator
        self._gather_label = Label(kind="gather", unit=unit, index=index)
        self._publish_label = Label(kind="publish", unit=unit, index=index)

    def gather(self, full: Tensor, own: Tensor | None = None) -> Handle:
        """Give every rank all shards of the weights `full`. This rank's is `own`, or if that is None in `full` already."""
        return self._communicator.all_gather(full, self._gather_label, own)

    def gather_rows(self, full: Tensor, rows: Tensor) -> bool:
        """Bring `rows` of an embedding to `full`; return False, having done nothing, where the whole is fewer bytes."""
        return False

    def publish(self, master: Tensor, full: Tensor, *, foreign_writes: bool) -> Handle:
        """Give every rank the stepped weights of every shard of `full`. `foreign_writes`: the script wrote into `full`."""
        return self._communicator.all_gather(full, self._publish_label)


class DenseTransport(WeightTransport):
    """Sends the whole buffer, in the wire dtype. With `error_feedback` the accumulator keeps a residual."""

    reduces_after_backward = False
    """Whether the reduction waits for the end of the backward pass."""
    compares_published = False
    """Whether a publication compares the weights with those of the last, so that it must know of writes by scripts."""
    is_compressible = False
    """Whether gradients and weights may be compressed."""
    skips_sync = False
    """Whether the gradient stays on this rank until a later step sends it."""

    def __init__(self, wire: UnitWire, *, error_feedback: bool = False):
        super().__init__(wire.replica_group.communicator, wire.name, wire.index)
        self._layout, self._pool, self._dtypes = wire.layout, wire.pool, wire.dtypes
        self._error_feedback = error_feedback
        factors = wire.dtypes.averaging.factors(wire.replica_group.grad_divisor, accumulate=wire.dtypes.accumulate,
                                                wire=wire.dtypes.wire)
        self._before, self._after = factors.before, factors.after
        self._reduce_label = Label(kind="reduce", unit=wire.name, index=wire.index)
        self._replicate_label = Label(kind="replicate", unit=wire.name, index=wire.index)
        self._replicas = wire.replica_group.replicas
        self._replicas_index = 0 if self._replicas is None else self._replicas.register()

    def accumulator(self, resting: Tensor | None, place: FetchOnce, *, resident: bool) -> GradAccumulator:
        """Return the accumulator of this rank's gradients; `resting` (size,) is their buffer where they rest PARTIAL."""
        make = ResidualAccumulator if self._error_feedback else GradAccumulator
        return make(self._layout, self._dtypes.accumulate, self._pool, factor=self._before, resting=resting, place=place,
                    resident=resident)

    @property
    def compresses_weights(self) -> bool:
        """Whether the next publication sends one bit an element, so that the step leaves the resting weights alone."""
        return False

    def set_compression(self, *, gradient: bool, weights: bool, skip_sync: bool) -> None:
        """From the next backward pass on compress gradients or weights, or send no gradients at all."""
        self.skips_sync = skip_sync

    def exact_addend(self, part: range) -> tuple[Tensor, int] | None:
        """Return this rank's uncompressed addend of the elements `part` of its shard, and the number of addends; None where
        all are exact."""
        return None

    def reduce(self, gradient: Reducible) -> InFlight:
        """Close the accumulator and start summing it over the ranks into `gradient.own`."""
        accumulator, resting = gradient.accumulator, gradient.accumulator.resting
        gradient.fetch_sum(fresh=not (gradient.has_sum or (accumulator.has_dense and resting is not None)))
        source = accumulator.close() if self._communicator.ranks == 1 else self._closed_on_wire(accumulator)
        staging = self._pool.borrow(self._communicator.staging_elements(self._layout.size), source.dtype)
        handle = self._communicator.reduce_scatter(source, gradient.own, staging, self._reduce_label, scale=self._after,
                                                   accumulate=gradient.has_sum)
        accumulator.mark_reduced()
        return InFlight(handle=handle, borrowed=[staging] if source is resting else [staging, source],
                        replicate=self.replicate)

    def replicate(self, whole: Tensor) -> Handle:
        """Give every rank the shards of the sum `whole` (1-D)."""
        return self._replicate_over(self._communicator, whole, self._replicate_label)

    def gather_shards(self, whole: Tensor) -> None:
        """Give every rank the shards of `whole` (1-D), unrounded."""
        self._communicator.all_gather(whole, self._replicate_label).wait()

    def sum_over_replicas(self, own: Tensor) -> InFlight:
        """Start summing `own`, this rank's shard, over the copies of the state; then each copy has a part to replicate."""
        replicas = self._replicas
        assert replicas is not None
        reduce, replicate = (Label(kind=kind, unit=self._reduce_label.unit, index=self._replicas_index)
                             for kind in ("reduce", "replicate"))
        part = own[replicas.rank * (own.numel() // replicas.ranks):][:own.numel() // replicas.ranks]
        source = self._on_wire(own, small=True)
        staging = self._pool.borrow(replicas.staging_elements(source.numel()), source.dtype, small=True)
        handle = replicas.reduce_scatter(source, part, staging, reduce, scale=1.0, accumulate=False)
        return InFlight(handle=handle, borrowed=[staging] if source is own else [staging, source],
                        replicate=lambda whole: self._replicate_over(replicas, whole, replicate))

    def _closed_on_wire(self, accumulator: GradAccumulator) -> Tensor:
        source = accumulator.close()
        wire = self._on_wire(source)
        if wire is not source:
            accumulator.give_back(source)
        return wire

    def _on_wire(self, source: Tensor, *, small: bool = False) -> Tensor:
        """Return `source` in the wire dtype: itself, or a borrowed copy."""
        if source.dtype == self._dtypes.wire:
            return source
        return self._pool.borrow(source.numel(), self._dtypes.wire, small=small).copy_(source)

    def _replicate_over(self, communicator: Communicator, whole: Tensor, label: Label) -> Handle:
        """All-gather `whole`. Where the wire is narrower every shard is rounded to it, this rank's own too."""
        if self._dtypes.wire.itemsize >= whole.dtype.itemsize:
            return communicator.all_gather(whole, label)
        narrow = self._pool.borrow(whole.numel(), self._dtypes.wire)
        shards = whole.view(communicator.ranks, -1)
        narrow.view(communicator.ranks, -1)[communicator.rank] = shards[communicator.rank]

        def widen() -> None:
            whole.copy_(narrow)
            self._pool.give_back(narrow)

        return _HandleWithCallback(communicator.all_gather(narrow, label), widen)


class RowsTransport(DenseTransport):
    """Sends the rows of an embedding that a step touches; the whole where all ranks agree that this is fewer bytes.

    A reduction begins with a message from every rank. Within a pass that message might wait for another collective of this
    rank, so rows are reduced when the pass ends.
    """

    reduces_after_backward = True
    compares_published = True
    gathers_rows = True

    def __init__(self, wire: UnitWire, *, columns: int):
        super().__init__(wire)
        self._rows = RowExchange(self._communicator, wire.layout.size, columns, wire.dtypes.accumulate, wire.dtypes.wire,
                                 wire.pool.device, unit=wire.name, index=wire.index)

    def accumulator(self, resting: Tensor | None, place: FetchOnce, *, resident: bool) -> GradAccumulator:
        return RowsAccumulator(self._layout, self._dtypes.accumulate, self._pool, factor=self._before, resting=resting,
                               place=place, resident=resident, rows=self._rows)

    def gather_rows(self, full: Tensor, rows: Tensor) -> bool:
        return self._rows.gather_rows(full, rows)

    def reduce(self, gradient: Reducible) -> InFlight:
        if not self._rows.agree_on_rows(dense=gradient.accumulator.has_dense):
            return super().reduce(gradient)
        gradient.fetch_sum(fresh=not gradient.has_sum)
        if not gradient.has_sum:
            gradient.reduced.zero_()
        handle = self._rows.reduce(gradient.own, scale=self._after, accumulate=gradient.has_sum)
        gradient.accumulator.mark_reduced()
        return InFlight(handle=handle, replicate=self._rows.replicate)

    def publish(self, master: Tensor, full: Tensor, *, foreign_writes: bool) -> Handle:
        return self._rows.publish(full, written=foreign_writes)


class OneBitTransport(DenseTransport):
    """Sends one bit an element and one scale a block, with error feedback.

        reduce     every rank packs its addend of each other's shard; the owner adds what it unpacks to its own, exact addend
        publish    the owner packs by how much its master is ahead of the published weights; every rank adds what it unpacks

    The exact addend is kept apart until the step, since the squares of compressed values are not those of a gradient. The
    compression error of an addend stays in the accumulator's resting buffer; that of an update is the difference that
    remains between master and weight. Nothing is lost. Division by the ranks comes before the sum, so that the error is one
    of a mean. The gaps of the layout hold zeros: padding must not count in a block's scale.
    """

    is_compressible = True

    def __init__(self, wire: UnitWire):
        super().__init__(wire, error_feedback=True)
        self._before, self._after = self._before * self._after, 1.0
        self._copies = wire.replica_group.identical_grad_ranks
        self._shard_size = wire.layout.size // self._communicator.ranks
        self._row = onebit.packed_bytes(self._shard_size)
        self._addends = self._communicator.ranks // self._copies
        self._exact: Tensor | None = None  # this rank's own addend of its shard, of the step's sum
        self._gradient = self._weights = False

    @classmethod
    def suits(cls, group: ReplicaGroup, dtype: torch.dtype) -> bool:
        """Whether weights of `dtype` over `group` may be compressed.

        One rank sends nothing. Where several pipeline stages use the weights, one addend does not tell the variance.
        """
        return group.communicator.ranks > 1 and not group.spans_stages and dtype in COMPRESSIBLE

    @property
    def compresses_weights(self) -> bool:
        return self._weights

    def set_compression(self, *, gradient: bool, weights: bool, skip_sync: bool) -> None:
        super().set_compression(gradient=gradient, weights=weights, skip_sync=skip_sync)
        self._gradient, self._weights = gradient, weights

    def exact_addend(self, part: range) -> tuple[Tensor, int] | None:
        if self._exact is None or not self._gradient:
            return None
        return self._exact[part.start:part.stop], self._addends

    def reduce(self, gradient: Reducible) -> InFlight:
        if not self._gradient:
            return super().reduce(gradient)
        accumulator = gradient.accumulator
        assert isinstance(accumulator, ResidualAccumulator)
        source = accumulator.close()
        self._keep_exact(source, onto=gradient.has_sum)
        return InFlight(handle=self._reduce_packed(accumulator.to_compress(source)), replicate=self.replicate)

    def publish(self, master: Tensor, full: Tensor, *, foreign_writes: bool) -> Handle:
        if not self._weights:
            return super().publish(master, full, foreign_writes=foreign_writes)
        ranks, rank = self._communicator.ranks, self._communicator.rank
        shards = full.view(ranks, self._shard_size)
        flat = self._borrow()
        rows = flat.view(ranks, self._row)
        onebit.difference(master, shards[rank], rows[rank])
        transfer = self._communicator.all_gather(flat, self._publish_label)

        def add() -> None:
            for row, shard in zip(rows, shards, strict=True):
                onebit.unpack(row, shard, accumulate=True)
            self._layout.clear_gaps(full)
            self._give_back([flat])

        return _HandleWithCallback(transfer, add)

    def _keep_exact(self, addend: Tensor, *, onto: bool) -> None:
        """Keep this rank's shard of `addend` (size,), which is to be reduced, `onto` that of an earlier sum of the step."""
        own = addend.view(self._communicator.ranks, self._shard_size)[self._communicator.rank]
        if self._exact is None:
            self._exact = torch.zeros_like(own)
        if not onto:
            self._exact.zero_()
        self._exact.add_(own, alpha=self._copies)

    def _reduce_packed(self, addend: Tensor) -> Handle:
        """Sum `addend` (size,) over the ranks into this rank's shard of it; the other shards keep the compression error.

        The sum is taken in rank order, this rank's own addend first.
        """
        ranks, rank = self._communicator.ranks, self._communicator.rank
        shards = addend.view(ranks, self._shard_size)
        borrowed = [self._borrow(), self._borrow()]
        sent, received = (list(flat.view(ranks, self._row)) for flat in borrowed)
        sent[rank] = received[rank] = borrowed[0][:0]
        for peer in range(ranks):
            if peer != rank:
                onebit.pack(shards[peer], sent[peer])
        transfer = self._communicator.all_to_all(sent, received, self._reduce_label)

        def add() -> None:
            for peer in range(ranks):
                if peer != rank:
                    onebit.unpack(received[peer], shards[rank], accumulate=True)
            self._layout.clear_gaps(addend)
            self._give_back(borrowed)

        return _HandleWithCallback(transfer, add)

    def _borrow(self) -> Tensor:
        """Return room for a packed vector of each rank, one after the other."""
        return self._pool.borrow(self._communicator.ranks * self._row, torch.uint8)

    def _give_back(self, borrowed: list[Tensor]) -> None:
        while borrowed:
            self._pool.give_back(borrowed.pop())


class _HandleWithCallback:
    """A handle that runs a callback after its transfer."""

    def __init__(self, transfer: Handle, callback: Callable[[], None]):
        self._transfer = transfer
        self._callback: Callable[[], None] | None = callback

    @torch.no_grad()
    def wait(self) -> None:
        if self._callback is None:
            return
        self._transfer.wait()  # if it fails, every later wait fails with it
        callback, self._callback = self._callback, None
        callback()


@dataclass(frozen=True, slots=True, kw_only=True)
class Transports:
    """The choice of a transport for each unit of a model."""

    compressed: bool = False
    """Gradients and weights may be compressed."""
    by_rows: bool = False
    """Embeddings whose gradient is rows exchange rows alone."""

    def frozen(self, communicator: Communicator, unit: str, index: int) -> WeightTransport:
        """Return the transport of a unit that is not trained."""
        return WeightTransport(communicator, unit, index)

    def trainable(self, wire: UnitWire, dtype: torch.dtype, columns: int | None) -> DenseTransport:
        """Return the transport of a unit of weights of `dtype`; an embedding has `columns`."""
        if self.compressed and OneBitTransport.suits(wire.replica_group, dtype):
            return OneBitTransport(wire)
        if self.by_rows and columns is not None and not self.compressed:
            return RowsTransport(wire, columns=columns)
        return DenseTransport(wire, error_feedback=self.compressed)
