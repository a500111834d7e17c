"""The gradient of one unit over all ranks, resting where the stage says.

A reduction closes this rank's accumulator and adds the sum over the ranks to `own`. Where the gradient rests PARTIAL the
accumulator's own shard receives the sum in place, and nothing else is held. The sum rests in a tier: it is fetched before
an addition, and offloaded after its pass or its reduction. The transport decides how it travels.

Between two steps two facts hold independently of each other:

    has_sum     `reduced` holds a sum          set by `reduce`
    unreduced   addends wait to be reduced     set by `mark_unreduced` at the end of a pass; cleared by `reduce`

and within one backward pass two more, both set anew by `begin`:

    reduced_in_pass     this pass has reduced it      set by `reduce`, so it implies `has_sum`
    may_step_early      a step may take the sum now   given to `begin`; cleared once it was offered

With copies of the state (hybrid sharding) the sum of one copy is summed over them, once a step:

    joined      the sum is one over the copies, or becomes one by what is under way     cleared by `reduce`

A pass that ends an accumulation does so at once, if the last step came after a single reduction at such a pass; else the
step does. A reduction after that counts the joined sum on the first copy alone, so that the next join is right, if rounded
otherwise than one of all addends.

A pass is `begin`, collection, then `reduce` (with `sum_addends` and `wait_reduced`) or `leave_unreduced`. A step ends with
`free_buffer` and `mark_consumed`. `reset` and `mark_consumed` clear all facts.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager

import torch
from torch import Tensor

from shoal.errors import UsageError
from shoal.tier import FetchOnce, ResidentSpan, Store, Transfer, fetched, mirrored, offset_names
from shoal.transport.reduction import wide_dtype
from shoal.zero.placement import PARTIAL, Stage
from shoal.zero.unit_transport import DenseTransport, InFlight, UnitWire

__all__ = ["Gradient", "OnReduced"]


class Gradient:
    """One unit's gradient between the backward passes that make it and the step that consumes it."""

    def __init__(self, wire: UnitWire, stage: Stage, transport: DenseTransport, store: Store, own: range):
        """`own` are the elements of the buffer whose sum this rank gets where gradients or masters are sharded."""
        self.transport = transport
        self.layout = layout = wire.layout
        self.stage = stage
        self.late_recompute = False
        """Whether recompute within a backward pass may add to it after it seemed complete."""
        self.unreduced = False
        """Whether a backward pass ended without reducing this gradient."""
        self.reduced_in_pass = False
        """Whether the present backward pass has reduced it."""
        self.has_sum = False
        """Whether `reduced` holds a sum."""
        self.may_step_early = False
        """Whether a step may still take the sum within the present backward pass: it is not offloaded before."""
        self._norm_wanted = True
        self._replicas = wire.replica_group.replicas
        self._joined = False
        self._at_boundary = self._joins_in_pass = False
        self._boundary_reductions = 0  # since the last step, by passes that end an accumulation
        self._flight: InFlight | None = None
        self._norm: Tensor | None = None
        self._gathered: Tensor | None = None
        partial = stage.gradient is PARTIAL
        self._own_range, self._ranks = own, wire.replica_group.communicator.ranks
        self._replicates = not stage.shards_state and self._ranks > 1  # one rank's addend is the sum, unrounded
        self._span, self.rest = mirrored(
            wire.pool.device, store, layout.size if partial else len(own), wire.dtypes.accumulate,
            f"gradient of unit '{wire.name}'", offset_names(layout.names, 0 if partial else own.start))
        self._pool = wire.pool
        self._residency = FetchOnce(self._span)
        self._residency.fetch(fresh=True)
        self._start = own.start if partial and stage.shards_state else 0
        self.own = self._span.tensor[own.start:own.stop] if partial else self._span.tensor
        """This rank's shard of the reduced gradient."""
        self.reduced = self.own if stage.shards_state else self._span.tensor
        """The reduced gradient, where the master rests."""
        self.accumulator = transport.accumulator(self._span.tensor if partial else None, self._residency,
                                                 resident=isinstance(self._span, ResidentSpan))
        """This rank's addend."""
        self.reset()

    @property
    def reopened(self) -> bool:
        """Whether gradients arrived after the present pass had reduced this one (re-entrant recompute)."""
        return self.reduced_in_pass and self.accumulator.reopened

    @property
    def has_gradient(self) -> bool:
        """Whether a backward pass ran since the last step: there is a sum, or there are addends of one."""
        return self.has_sum or self.unreduced

    @property
    def bytes(self) -> int:
        """Bytes that rest on this rank."""
        return self._span.tensor.nbytes

    def expect_norm(self, wanted: bool) -> None:
        """Compute the norm before the sum is offloaded, if a step will ask for it."""
        self._norm_wanted = wanted

    def norm(self) -> Tensor:
        """Return the L2 norm of this rank's shard of the reduced gradient, in fp32 or wider."""
        if (norm := self._norm) is None:
            here = self._residency.fetched
            self._residency.fetch()
            norm = self._norm = _norm(self.own)
            if not here:
                self._residency.commit(changed=False)
        return norm

    def at_rest(self, part: range) -> Tensor:
        """Return the elements `part` of the reduced gradient, counted as the master's, where the step reads them."""
        return self.rest.tensor[self._start + part.start:self._start + part.stop]

    def fetch(self, part: range) -> Transfer:
        """Start fetching the elements that `at_rest` returns."""
        return self.rest.fetch(self._start + part.start, self._start + part.stop)

    def commit(self, part: range) -> Transfer:
        """End the use of the elements that `at_rest` returned."""
        return self.rest.commit(self._start + part.start, self._start + part.stop, changed=False)

    @contextmanager
    def opened(self, part: range, *, changed: bool) -> Generator[Tensor]:
        """Yield the elements `part` of the reduced gradient, counted as the master's; `changed`: the caller writes."""
        with fetched(self.rest, self._start + part.start, self._start + part.stop, changed=changed) as values:
            yield values
        if changed:
            self._norm = None

    def is_reduced_by(self, *, boundary: bool, sync: bool) -> bool:
        """Whether a backward pass reduces this gradient: at the boundary where it rests PARTIAL, else always."""
        return sync and not self.transport.skips_sync and (boundary or self.stage.shards_gradients)

    @property
    def spans_copies(self) -> bool:
        """Whether `reduced` is summed over all copies of the state, if there are several."""
        return self._joined or self._replicas is None

    @property
    def collectives(self) -> int:
        """The most collectives, one after the other, that bring the sum of a pass to where it rests."""
        return 2 if self._replicas is None else 3

    def begin(self, *, may_step_early: bool, boundary: bool) -> None:
        """Start a backward pass, at the `boundary` of an accumulation or within it; with `may_step_early` a step may take
        its sum at once."""
        self.may_step_early, self.reduced_in_pass = may_step_early, False
        self._at_boundary = boundary
        self.accumulator.begin()

    def expect_recompute(self) -> None:
        """Note that recompute may add to the gradient after it seemed complete: no step takes it within backward."""
        self.late_recompute = True

    def leave_unreduced(self) -> None:
        """End a backward pass that does not reduce this gradient."""
        self.mark_unreduced()
        self.offload()

    def mark_unreduced(self) -> None:
        """Note that a backward pass ended without reducing this gradient, to which later passes may add."""
        self.unreduced = True

    def fetch_sum(self, *, fresh: bool) -> None:
        """Fetch the resting buffer; `fresh`: the caller overwrites it."""
        self._residency.fetch(fresh=fresh)

    def reduce(self) -> None:
        """Start reducing the accumulator; slots without a gradient count as zero."""
        self.wait_reduced()
        self._norm = None
        self._leave_replicas()
        self._boundary_reductions += self._at_boundary
        self._flight = self.transport.reduce(self)
        self.has_sum = self.reduced_in_pass = True
        self.unreduced = False

    def sum_addends(self) -> None:
        """Wait for the addends, sum them, and start what follows: the sum over copies of the state, or the replication of a
        sum that rests replicated."""
        flight = self._flight
        if flight is None or not flight.sum(self._pool):
            return
        if self._replicates or self._joined:
            flight.start_replicating(self.reduced)
        elif self._at_boundary and self._joins_in_pass:
            self._join()
        else:
            self._flight = None
            self.offload()

    def wait_reduced(self) -> None:
        """Wait until `reduced` holds the sum, and offload it unless an early step may take it."""
        while self._flight is not None and not self._flight.summed:
            self.sum_addends()
        if self._flight is not None:
            self._flight.handle.wait()
            self._flight = None
            self.offload()

    def hand_to_step(self, on_reduced: OnReduced | None) -> None:
        """Offer the sum to the step that may take it now, once; offload it otherwise."""
        if self.may_step_early:
            self.may_step_early = False
            if on_reduced is None or not on_reduced(self):
                self.offload()

    # Reading by scripts

    @property
    def can_gather(self) -> bool:
        """Whether there is a gradient on this rank, or a sum over the ranks."""
        return self.has_sum or self.accumulator.open_addend is not None

    @torch.no_grad()
    def gathered(self) -> Tensor:
        """Return the gradient of the whole unit (size,), to read and to write until `end_gather`.

        Where the sum rests sharded it takes all ranks to gather it. Raises `UsageError` before several ranks have reduced
        it, and for a sum that rests in another tier.
        """
        if self._gathered is None:
            self.wait_reduced()
            self._gathered = self._gather()
        return self._gathered

    def _gather(self) -> Tensor:
        addend = self.accumulator.open_addend
        if addend is not None and (self.has_sum or self._ranks > 1):
            raise UsageError("p.grad was read before it was reduced over the ranks (within an accumulation at stages 0 and "
                             "1, or after no_sync): read it at the end of the accumulation, or call "
                             "engine.allreduce_gradients() on every rank first")
        if addend is not None:
            return addend
        if not isinstance(self._span, ResidentSpan):
            raise UsageError("p.grad was read while gradients rest in another tier: set gradient_clipping to clip them, and "
                             "register hooks on parameters to read them, or leave offload_optimizer out")
        if not self.stage.shards_state or self._ranks == 1:
            return self.reduced
        whole = self._span.tensor
        if whole.numel() < self.layout.size:  # of its own: a script may keep a gradient
            whole = torch.empty(self.layout.size, dtype=self.own.dtype, device=self.own.device)
            self._own_part(whole).copy_(self.own)
        self.transport.gather_shards(whole)
        return whole

    @torch.no_grad()
    def end_gather(self, *, keep: bool) -> None:
        """End a `gathered`; with `keep` what was written counts."""
        whole, self._gathered = self._gathered, None
        if whole is not None and self.has_sum:
            self._norm = None
            if keep and whole.data_ptr() not in (self._span.tensor.data_ptr(), self.reduced.data_ptr()):
                self.own.copy_(self._own_part(whole))

    def _own_part(self, whole: Tensor) -> Tensor:
        """Return this rank's shard of `whole` (size,)."""
        return whole[self._own_range.start:self._own_range.stop]

    def join_replicas(self) -> None:
        """Add the sums of the other copies of the state, if a backward pass has not: a step begins."""
        if self._replicas is not None and self.has_sum:
            self.wait_reduced()
            if not self._joined:
                self._residency.fetch()
                self._norm = None
                self._join()
                self.wait_reduced()
            self._joins_in_pass = self._boundary_reductions == 1

    def _join(self) -> None:
        """Start summing `own` over the copies of the state."""
        self._flight = self.transport.sum_over_replicas(self.own)
        self._joined = True

    def _leave_replicas(self) -> None:
        """Leave the sum over the copies of the state to the first copy: another addend comes, and they are summed anew."""
        if self._joined and self._replicas is not None and self._replicas.rank:
            self._residency.fetch()
            self.own.zero_()
        self._joined = False

    def carry_over(self) -> None:
        """Keep everything that was collected for a later step."""
        self.accumulator.carry_over()
        self.reset()

    def load_residual(self, residual: Tensor | None) -> None:
        """Replace the compression error by `residual` (size,)."""
        for value in (None, residual):  # with no residual first, `reset` drops everything
            self.accumulator.load_residual(value)
            self.reset()

    def offload(self) -> None:
        """Let the accumulator's buffer or the sum rest in its tier."""
        stays = isinstance(self._span, ResidentSpan) or (self.may_step_early and self._span is self.rest)
        if stays or not self._residency.fetched or self._flight is not None:
            return
        if self._norm_wanted and self.has_sum and self._norm is None:
            self._norm = _norm(self.own)
        self._residency.commit()

    def reset(self) -> None:
        """Discard the gradient. Recompute of an earlier forward may add to the next one."""
        self.wait_reduced()
        self.free_buffer()
        self._reset_flags()

    def mark_consumed(self) -> None:
        """Forget the gradient that a step has consumed and freed: no recompute adds to it any more."""
        self._reset_flags()
        self.late_recompute = False

    def _reset_flags(self) -> None:
        """Forget which slots received a gradient, and that there is a sum."""
        if self.accumulator.reset(summed=self.has_sum) and self.has_sum:
            self.own.zero_()  # this rank's shard of the residual buffer held the sum
        self._norm = None
        self.has_sum = self.unreduced = self.reduced_in_pass = self.may_step_early = self._joined = False
        self._boundary_reductions = 0

    @property
    def is_reset(self) -> bool:
        """Whether `reset` has nothing to discard."""
        return not (self.has_gradient or self.reduced_in_pass or self.accumulator.slots_with_grad or self._flight is not None
                    or self.may_step_early)

    def free_buffer(self) -> None:
        """Free the memory of the sum, which a step has consumed. `mark_consumed` forgets which slots received a gradient."""
        self._residency.commit(changed=False)
        self._span.discard()


OnReduced = Callable[[Gradient], bool]
"""Takes the sum of a gradient in a step; returns whether it did, so that the sum need not rest."""


def _norm(gradient: Tensor) -> Tensor:
    return torch.linalg.vector_norm(gradient, dtype=wide_dtype(gradient.dtype))
