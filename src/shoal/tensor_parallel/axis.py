"""The collectives of a tensor axis, which sum or gather activations and their gradients.

    all_reduce        every rank holds an addend   -> every rank holds the sum           2 (N-1)/N of the tensor sent
    reduce_scatter    every rank holds N addends   -> rank r holds the sum of the r-th     (N-1)/N of them sent
    all_gather        rank r holds part r          -> every rank holds all parts           (N-1) times the part sent

A sum has the same bits on every rank and in every run. On the host it is taken in rank order and in fp32 or wider; small
tensors between ranks of one machine go through shared memory (shared_memory.py), others by all-to-all. On an accelerator
the collectives are the backend's own. All are asynchronous: computation before `wait` overlaps with the transfer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Self
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.errors import CollectiveFailed, CollectiveTimeout
from shoal.recording import Call, over
from shoal.tensor_parallel.shared_memory import SLOT_BYTES, SharedMemoryRing, open_ring
from shoal.transport.collectives import CHUNK_BYTES, Communicator, eager, native_all_gather, native_reduce_scatter, traffic
from shoal.transport.failure_board import abort_waits, interruptible_wait, peer_failed
from shoal.transport.native_watch import launched_collectives
from shoal.transport.reduction import Reduction

__all__ = ["Axis", "PendingTensor", "eager"]

SWAP_BYTES = 128 << 10
"""Up to this size two ranks without shared memory sum fastest by swapping whole tensors, one message each; for larger
ones gloo's ring overlaps its two messages (on two cores 51 against 93 microseconds at 1 KiB, 175 against 143 at 256 KiB)."""

_rings: WeakKeyDictionary[dist.ProcessGroup, SharedMemoryRing | None] = WeakKeyDictionary()

_Finish = Callable[[], object]
"""Waits for a collective and finishes it."""

class Axis:
    """The ranks of a process group that hold slices of the same layers, and the collectives between them."""

    def __init__(self, group: dist.ProcessGroup):
        self.group = group
        self.rank = dist.get_rank(group)
        self.ranks = dist.get_world_size(group)
        self.members = tuple(dist.get_process_group_ranks(group))
        self._launched = launched_collectives(group)
        self._ring_opened = False
        self._ring: SharedMemoryRing | None = None

    def __deepcopy__(self, memo: object) -> Self:
        return self  # a copied layer uses the same process group

    def all_reduce(self, tensor: Tensor, *, keep: bool = False) -> PendingTensor:
        """Sum the contiguous `tensor` over the ranks: in place, or with `keep` into a new tensor."""
        if self.ranks == 1:
            return PendingTensor(self, "all-reduce", tensor, _nothing)
        size = tensor.numel() * tensor.element_size()
        total = torch.empty_like(tensor) if keep else tensor
        if tensor.device.type == "cpu" and self.ranks == 2:
            ring = self._ring_for(size)
            if ring is not None or size <= SWAP_BYTES:
                return PendingTensor(self, "all-reduce", total, self._swap(tensor, total, size, ring))
        if tensor.device.type == "cpu" and self.ranks > 2:
            return self._all_reduce_by_spans(tensor, total)
        if keep:
            total.copy_(tensor)
        call = self._count("all-reduce", 2 * size * (self.ranks - 1) // self.ranks, "all_reduce", tensor)
        work = dist.all_reduce(total, group=self.group, async_op=True)
        return PendingTensor(self, "all-reduce", total, _recorded(self._wait_for(work), call))

    def reduce_scatter(self, addends: Tensor) -> PendingTensor:
        """Sum the contiguous `addends` (ranks, ...) over the ranks; the result is this rank's (...)."""
        if self.ranks == 1:
            return PendingTensor(self, "reduce-scatter", addends[0], _nothing)
        total = torch.empty_like(addends[0])
        if addends.device.type != "cpu":
            sent = total.numel() * total.element_size() * (self.ranks - 1)
            call = self._count("reduce-scatter", sent, "reduce_scatter", addends)
            work = native_reduce_scatter(total.view(-1), addends.view(-1), group=self.group, async_op=True)
            return PendingTensor(self, "reduce-scatter", total, _recorded(self._wait_for(work), call))
        received = torch.empty_like(addends)
        finish = self._scatter_spans(addends.view(-1), received, [total.numel()] * self.ranks, kind="reduce-scatter")
        return PendingTensor(self, "reduce-scatter", total, lambda: (finish(), _sum(received, total)))

    def all_gather(self, part: Tensor) -> PendingTensor:
        """Gather the contiguous `part` (...) of every rank; the result is (ranks, ...)."""
        whole = part.new_empty((self.ranks, *part.shape))
        if self.ranks == 1:
            return PendingTensor(self, "all-gather", whole.copy_(part), _nothing)
        size = part.numel() * part.element_size()
        if part.device.type == "cpu":
            return PendingTensor(self, "all-gather", whole,
                                 self._gather_spans(part, whole, [part.numel()] * self.ranks, size, kind="all-gather"))
        call = self._count("all-gather", size * (self.ranks - 1), "all_gather", whole)
        work = native_all_gather(whole.view(-1), part.view(-1), self.group, async_op=True)
        return PendingTensor(self, "all-gather", whole, _recorded(self._wait_for(work), call))

    def _swap(self, tensor: Tensor, total: Tensor, size: int, ring: SharedMemoryRing | None) -> _Finish:
        """Exchange whole tensors between two ranks and add them; the order of two addends does not change the bits."""
        peer = 1 - self.rank
        call = self._count("all-reduce", size, "all_reduce", tensor)
        if ring is not None:
            traffic.peer_memory_bytes += size
            number = ring.put(tensor)

            def add() -> None:
                torch.add(tensor.view(-1), ring.peek(peer, number, tensor), out=total.view(-1))
                ring.ack(peer, number)

            return _recorded(add, call)
        other = torch.empty_like(tensor)
        splits = [0 if rank == self.rank else tensor.numel() for rank in range(2)]
        work = self.group.alltoall_base(other.view(-1), tensor.view(-1), splits, splits)
        arrived = _recorded(self._wait_for(work), call)
        return lambda: (arrived(), torch.add(tensor, other, out=total))

    def _all_reduce_by_spans(self, tensor: Tensor, total: Tensor) -> PendingTensor:
        """Sum one span of the tensor on each rank, then gather the spans."""
        length, left = divmod(tensor.numel(), self.ranks)
        spans = [length + (rank < left) for rank in range(self.ranks)]
        received = tensor.new_empty((self.ranks, spans[self.rank]))
        finish = self._scatter_spans(tensor.view(-1), received, spans)

        def gather() -> None:
            finish()
            span = _sum(received, tensor.new_empty(spans[self.rank]))
            self._gather_spans(span, total, spans, spans[0] * tensor.element_size())()

        return PendingTensor(self, "all-reduce", total, gather)

    def _scatter_spans(self, flat: Tensor, received: Tensor, spans: Sequence[int], *, kind: str = "all-reduce") -> _Finish:
        """Send each rank its span of `flat`, and receive this rank's span from each into `received` (ranks, own span)."""
        own = spans[self.rank]
        size = (flat.numel() - own) * flat.element_size()
        call = self._count(kind, size, "reduce_scatter", flat)
        ring = self._ring_for(flat.numel() * flat.element_size())
        if ring is None:
            work = self.group.alltoall_base(received.view(-1), flat, [own] * self.ranks, list(spans))
            return _recorded(self._wait_for(work), call)
        traffic.peer_memory_bytes += size
        start = sum(spans[:self.rank])
        number = ring.put(flat)
        rows = received.view(self.ranks, own)
        rows[self.rank] = flat[start:start + own]
        return _recorded(lambda: [ring.get(peer, number, rows[peer], start, flat) for peer in self._peers()], call)

    def _gather_spans(self, part: Tensor, whole: Tensor, spans: Sequence[int], size: int, *,
                      kind: str = "all-reduce") -> _Finish:
        """Send `part` to every rank, and receive all spans, of at most `size` bytes each, into `whole`."""
        sent = part.numel() * part.element_size() * (self.ranks - 1)
        call = self._count(kind, sent, "all_gather", whole)
        rows = whole.view(-1).split(list(spans))
        ring = self._ring_for(size)
        if ring is not None:
            traffic.peer_memory_bytes += sent
            number = ring.put(part)
            rows[self.rank].copy_(part.view(-1))
            return _recorded(lambda: [ring.get(peer, number, rows[peer]) for peer in self._peers()], call)
        if self.ranks == 2:
            rows[self.rank].copy_(part.view(-1))
            splits = [part.numel() if peer != self.rank else 0 for peer in range(2)]
            work = self.group.alltoall_base(rows[1 - self.rank], part.view(-1), splits, splits)
            return _recorded(self._wait_for(work), call)
        copies = part.view(-1).repeat(self.ranks)
        work = self.group.alltoall_base(whole.view(-1), copies, list(spans), [part.numel()] * self.ranks)
        return _recorded(self._wait_for(work), call)

    def _check_not_aborted(self) -> None:
        if self._launched is not None and self._launched.aborted:
            where = f"rank {self.rank} of {self.ranks} of a tensor axis"
            raise peer_failed(where) or CollectiveFailed(f"{where}: the collectives of the device were aborted")

    def _count(self, kind: str, sent: int, op: str, buffer: Tensor) -> Call | None:
        """Count a collective before its launch. Raises `CollectiveFailed` where those of the device were aborted."""
        self._check_not_aborted()
        return traffic.count(f"tensor {kind}", sent, op=op, of=buffer, ranks=self.members)

    def _peers(self) -> list[int]:
        return [(self.rank + offset) % self.ranks for offset in range(1, self.ranks)]

    def _wait_for(self, work: dist.Work | None) -> _Finish:
        """Return a function that waits for `work`. A published failure aborts the wait, and what a device runs for it."""
        launched = self._launched
        number = None if launched is None or work is None else launched.add(work)

        def finish() -> None:
            with interruptible_wait(partial(abort_waits, self.group)):
                if work is not None:
                    work.wait()
            if launched is not None and number is not None:
                self._check_not_aborted()
                launched.waited(number)

        return finish

    def _ring_for(self, size: int) -> SharedMemoryRing | None:
        """Return the ring if a tensor of `size` bytes goes through shared memory, else None. First call: collective."""
        if not self._ring_opened:
            if self.group not in _rings:
                timeout = self.group._get_backend(torch.device("cpu")).options._timeout  # pyright: ignore  no other way
                communicator = Communicator(self.group, timeout=timeout.total_seconds())
                _rings[self.group] = open_ring(self.rank, self.ranks, timeout.total_seconds(), communicator.gather_objects)
            self._ring, self._ring_opened = _rings[self.group], True
        return self._ring if size <= SLOT_BYTES else None


class PendingTensor:
    """The result of a collective under way."""

    __slots__ = ("_axis", "_finish", "_kind", "_tensor")

    def __init__(self, axis: Axis, kind: str, tensor: Tensor, finish: _Finish):
        self._axis = axis
        self._kind = kind
        self._tensor = tensor
        self._finish = finish

    def wait(self) -> Tensor:
        """Return the tensor. Call it once. Raises `CollectiveFailed` naming the rank, the collective and the tensor."""
        try:
            self._finish()
        except RuntimeError as error:
            raise self._failure(error) from error
        return self._tensor

    def _failure(self, error: RuntimeError) -> CollectiveFailed:
        axis = self._axis
        what = (f"rank {axis.rank} of {axis.ranks} of a tensor axis: {self._kind} of {tuple(self._tensor.shape)} "
                f"{self._tensor.dtype}".replace("torch.", ""))
        if (published := peer_failed(what)) is not None:
            return published
        if "imed out" in str(error) or "timeout" in str(error).lower():
            return CollectiveTimeout(f"{what} did not finish in time. Another rank took a different path through the model, "
                                     f"was given a batch of another shape, or stopped. ({error})")
        return CollectiveFailed(f"{what} broke: another rank died or closed its connection, or was given a batch of another "
                                f"shape. The error in its output is the cause. ({error})")


def _nothing() -> None:
    """Finish a collective of one rank."""


def _recorded(finish: _Finish, call: Call | None) -> _Finish:
    return finish if call is None else lambda: over(call, finish)


def _sum(addends: Tensor, total: Tensor) -> Tensor:
    """Sum `addends` (ranks, ...) in rank order, in fp32 or wider, into `total` (...)."""
    rows = list(addends.view(addends.shape[0], -1).unbind())
    Reduction(_COMPLETED, rows, total.view(-1), 1.0, False, CHUNK_BYTES).wait()
    return total


class _CompletedTensor:
    """A transfer that has finished."""

    def wait(self) -> None:
        return


_COMPLETED = _CompletedTensor()
