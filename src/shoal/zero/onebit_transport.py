"""How the gradient and the weights of a unit travel as signs: one bit an element and one scale a block.

    reduce     every rank packs its addend of each other's span; the owner adds what it unpacks to its own, exact addend
    publish    the owner packs by how much its master is ahead of the published weights; every rank adds what it unpacks

The owner's addend is kept apart until the step, since the squares of what signs say are not those of a gradient. Nothing
else is kept beside what rests anyway, and nothing is lost: what the signs of an addend do not say stays in the gradient's
buffer, to which the next backward pass adds, and what those of an update do not say is the difference that remains between
master and weight. docs/compression.md derives both.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from shoal import onebit
from shoal.mesh.parameter_groups import ReplicaGroup
from shoal.recording.call import Handle
from shoal.transport.collectives import Communicator, Label
from shoal.zero.buffer import Pool
from shoal.zero.layout import Layout

__all__ = ["SIGNED", "OneBitTransport"]

SIGNED = (torch.float32, torch.bfloat16, torch.float16)
"""The dtypes of weights whose units travel so; others travel as they are."""


class OneBitTransport:
    """The compressed transport of one unit over the ranks of its communicator. The gaps of its layout hold zeros, and do
    after it, though signs know no zero: what is padded must not count in a block's scale.
    """

    def __init__(self, layout: Layout, communicator: Communicator, pool: Pool, *, copies: int = 1):
        self._communicator = communicator
        self._copies = copies
        self._pool = pool
        self._layout = layout
        self._span = layout.size // communicator.ranks
        self._row = onebit.packed_bytes(self._span)
        self.addend: Tensor | None = None
        """The exact addend of this rank and its copies, of its span of the step's sum, (span,)."""
        self.addends = communicator.ranks // copies
        """How many such addends the sum is of."""

    @classmethod
    def between(cls, layout: Layout, replica_group: ReplicaGroup, pool: Pool, dtype: torch.dtype) -> OneBitTransport | None:
        """Return the transport of weights of `dtype`; None where nothing travels, or nothing that signs can stand for.

        Nor where several pipeline stages use the weights: of addends that are not alike one does not tell the variance.
        """
        if replica_group.communicator.ranks == 1 or replica_group.spans_stages or dtype not in SIGNED:
            return None
        return cls(layout, replica_group.communicator, pool, copies=replica_group.identical_grad_ranks)

    def keep(self, addend: Tensor, *, onto: bool) -> None:
        """Keep this rank's span of the 1-D `addend`, which is to be reduced, `onto` that of an earlier sum of the step."""
        own = addend.view(self._communicator.ranks, self._span)[self._communicator.rank]
        if self.addend is None:
            self.addend = torch.zeros_like(own)
        if not onto:
            self.addend.zero_()
        self.addend.add_(own, alpha=self._copies)

    def reduce(self, addend: Tensor, label: Label) -> Handle:
        """Sum the 1-D `addend` over the ranks into this rank's span of it; elsewhere leave what was not sent.

        The sum is taken in rank order, this rank's own addend first.
        """
        ranks, rank = self._communicator.ranks, self._communicator.rank
        spans = addend.view(ranks, self._span)
        borrowed = [self._borrow(), self._borrow()]
        sent, received = (list(flat.view(ranks, self._row)) for flat in borrowed)
        sent[rank] = received[rank] = borrowed[0][:0]
        for peer in range(ranks):
            if peer != rank:
                onebit.pack(spans[peer], sent[peer])
        transfer = self._communicator.all_to_all(sent, received, label)

        def add() -> None:
            for peer in range(ranks):
                if peer != rank:
                    onebit.unpack(received[peer], spans[rank], accumulate=True)
            self._layout.clear_gaps(addend)
            self._give_back(borrowed)

        return _Then(transfer, add)

    def publish(self, master: Tensor, full: Tensor, label: Label) -> Handle:
        """Bring the weights `full` of every rank nearer to the masters (span,) of their owners, all by the same bits."""
        ranks, rank = self._communicator.ranks, self._communicator.rank
        spans = full.view(ranks, self._span)
        flat = self._borrow()
        rows = flat.view(ranks, self._row)
        onebit.difference(master, spans[rank], rows[rank])
        transfer = self._communicator.all_gather(flat, label)

        def add() -> None:
            for row, span in zip(rows, spans, strict=True):
                onebit.unpack(row, span, accumulate=True)
            self._layout.clear_gaps(full)
            self._give_back([flat])

        return _Then(transfer, add)

    def _borrow(self) -> Tensor:
        """Return room for a packed vector of each rank, one after the other."""
        return self._pool.borrow(self._communicator.ranks * self._row, torch.uint8)

    def _give_back(self, borrowed: list[Tensor]) -> None:
        while borrowed:
            self._pool.give_back(borrowed.pop())


class _Then:
    """A transfer, and what is done once it is over."""

    def __init__(self, transfer: Handle, then: Callable[[], None]):
        self._transfer = transfer
        self._then: Callable[[], None] | None = then

    @torch.no_grad()
    def wait(self) -> None:
        if self._then is None:
            return
        self._transfer.wait()  # if it fails, every later wait fails with it
        then, self._then = self._then, None
        then()
