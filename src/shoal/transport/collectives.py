"""The collectives that move model state: few, counted, byte-optimal, and named in the error when they fail.

A flat buffer has N equal spans, one per rank. The placements need only two collectives, whose spans lie in the buffer, but
for a rank's own where it rests elsewhere:

    all_gather       rank r holds span r            -> every rank holds every span      (N-1)/N of the buffer sent
    reduce_scatter   every rank holds one addend    -> rank r holds the sum of span r   (N-1)/N of the buffer sent

On gloo both are point-to-point messages in chunks, the receives posted first. The sum is taken in rank order and in fp32, so
that every stage gives the same bits. Large messages between ranks of one machine are copied from memory to memory
(peer_memory.py). On NCCL both are the native collectives.

Every message carries a tag made of its unit and collective. Ranks that take different paths through the model therefore
time out with an error that names the collective, and never take one message for another.
"""

from __future__ import annotations

import pickle
import sys
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import ClassVar, TypeVar, cast
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.device import HOST, current_device, on_accelerator
from shoal.errors import CollectiveFailed, CollectiveTimeout, RanksDisagree
from shoal.recording import Call, Traffic, Watched, over, traffic
from shoal.recording.call import Handle
from shoal.transport.failure_board import abort_waits, interruptible_wait, peer_failed
from shoal.transport.gloo_threads import let_ranks_go_first
from shoal.transport.native_watch import IssuedOrder, first_difference, is_native, launched_collectives
from shoal.transport.peer_memory import PeerMemory, PeerTransfer, peer_memory_of
from shoal.transport.reduction import DONE, Reduction, chunks, sum_addends
from shoal.transport.stalemate import Awaited

__all__ = ["Communicator", "Label", "Traffic", "eager", "native_all_gather", "native_reduce_scatter", "traffic"]

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., object])

# Newer torch renames the two native collectives to `*_single` and deprecates the names that torch 2.11 has.
native_all_gather: Callable[..., dist.Work | None] = (vars(dist).get("all_gather_single")
                                                      or vars(dist)["all_gather_into_tensor"])
native_reduce_scatter: Callable[..., dist.Work | None] = (vars(dist).get("reduce_scatter_single")
                                                          or vars(dist)["reduce_scatter_tensor"])

def eager(function: F) -> F:
    """Exclude a function that calls collectives from the graphs of torch.compile, which break there."""
    return cast(F, torch.compiler.disable(function))


CHUNK_BYTES = 4 << 20
"""Bytes of one point-to-point message: larger ones ran half-duplex on a limited link."""

_TAG_BASE = 1 << 20  # above the tags that a training script may use on the same group
_WORDS, _SIZE, _OBJECT, _COLLECT = (_TAG_BASE - offset for offset in (1, 2, 3, 4))
_STATE_DICT = "collecting the state dict"


_units: WeakKeyDictionary[dist.ProcessGroup, int] = WeakKeyDictionary()
"""The number of units registered in each group, over all its communicators: several engines share no tag."""
_begun: WeakKeyDictionary[dist.ProcessGroup, Counter[int]] = WeakKeyDictionary()
"""How many pairwise collectives of each tag this rank has begun in each group."""
_dropped: WeakKeyDictionary[dist.ProcessGroup, deque[dist.Work]] = WeakKeyDictionary()
"""Messages under way in each group for which nobody waits any more: what a step gathers ahead for an engine that is dropped.

gloo reads nothing more from a connection once data arrive for a receive that is gone, so they are kept. The group's next
communicator waits for them: every rank that makes it has started its own messages before.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Label:
    """The name of one collective: its kind and its unit. Equal on all ranks that take part."""

    kind: str
    unit: str
    index: int
    """The unit's number within its communicator."""

    KINDS: ClassVar[tuple[str, ...]] = ("gather", "publish", "reduce", "replicate",
                                        "gather rows", "publish rows", "reduce rows", "replicate rows",
                                        "sequence exchange", "sequence return")

    @property
    def tag(self) -> int:
        return _TAG_BASE + self.index * len(self.KINDS) + self.KINDS.index(self.kind)

    def __str__(self) -> str:
        return f"{self.kind} of unit '{self.unit}'"


class Communicator:
    """The ranks that share one data axis, and the transport between them."""

    def __init__(self, group: dist.ProcessGroup, *, timeout: float, debug: bool = False,
                 direct_bytes: int | None = None, chunk_bytes: int = CHUNK_BYTES,
                 gather_elements: int = sys.maxsize, reduce_elements: int = sys.maxsize):
        self.group = group
        self.rank = dist.get_rank(group)
        self.ranks = dist.get_world_size(group)
        self.members = tuple(dist.get_process_group_ranks(group))
        """The ranks of the job, by rank of this group."""
        self.timeout = timedelta(seconds=timeout)
        self.debug = debug
        self.chunk_bytes = chunk_bytes
        self.gather_elements = gather_elements
        """The most elements of a buffer in one chunk of a gather, over all ranks."""
        self.reduce_elements = reduce_elements
        """The most elements of a buffer in one chunk of a reduction, over all ranks."""
        self.native = is_native(group)
        self._gloo_on_host = not self.native or "cpu:gloo" in dist.get_backend_config(group)
        self.words_device = HOST if self._gloo_on_host else current_device()
        """Where the few numbers are that ranks exchange: on the host where the group has a backend for that."""
        self.direct_bytes = direct_bytes
        """Messages of at least so many bytes between ranks of one machine go through peer memory; None: no message."""
        self.step = 0
        self._launched = launched_collectives(group)
        self._order = IssuedOrder()
        self._begun = _begun.setdefault(group, Counter())
        self._finish_dropped()
        let_ranks_go_first()
        self._name = f"{group.group_name} {self.members[0]}"
        self._peer_memory: PeerMemory | None = None
        if direct_bytes is not None and self.ranks > 1 and not self.native:
            self._peer_memory = peer_memory_of(group, self.gather_objects)

    def exchange_by_memory(self, peer: int, tag: int, send: Tensor, receive: Tensor) -> PeerTransfer | None:
        """Exchange two tensors of one size with `peer` through peer memory; None where that is impossible or too small."""
        size = send.numel() * send.element_size()
        alike = send.numel() == receive.numel()  # both sides see the same two sizes, and choose the same way
        worthwhile = alike and send.device.type == "cpu" and size >= (self.direct_bytes or 1)
        if self._peer_memory is None or peer not in self._peer_memory or not worthwhile:
            return None
        traffic.peer_memory_bytes += size
        return self._peer_memory.exchange(peer, tag, send, receive)

    def _finish_dropped(self) -> None:
        try:
            with self.interruptible_wait():
                for work in _dropped.pop(self.group, ()):
                    work.wait(self.timeout)
        except RuntimeError as error:
            raise self.failure("what an engine that was dropped had started", error) from error

    def note_step(self, step: int) -> None:
        """Name `step` in errors from now on."""
        self.step = step

    def shorten_timeout(self, most: timedelta) -> None:
        """Wait for other ranks no longer than `most` from now on."""
        self.timeout = min(self.timeout, most)

    def register(self) -> int:
        """Return the number of a new unit in its process group. Ranks register their units in the same order."""
        number = _units.get(self.group, 0)
        _units[self.group] = number + 1
        return number

    def all_gather(self, full: Tensor, label: Label, own: Tensor | None = None) -> Handle:
        """Fill the 1-D `full` with the spans of all ranks: this rank's is `own`, or if that is None in its place already.

        A device reads `own` in the stream of its collectives: it may be written to, or freed, after the wait.
        """
        self._check(label, full)
        span = full.numel() // self.ranks
        call = traffic.count(label.kind, span * full.element_size() * (self.ranks - 1), op="all_gather", of=full,
                             ranks=self.members, what=label)
        if self.ranks == 1:
            if own is not None:
                full.copy_(own)
            return _watched(DONE, call)
        if self.native:
            own = full[self.rank * span:(self.rank + 1) * span] if own is None else own
            launch = partial(native_all_gather, _as_real(full), _as_real(own), self.group, async_op=True)
            return _watched(self._launch(label, launch), call)
        spans = full.view(self.ranks, span)
        if own is not None:
            spans[self.rank].copy_(own)
        work = _Pairwise(self, label, label.tag, receive={peer: spans[peer] for peer in self._peers()},
                         send={peer: spans[self.rank] for peer in self._peers()}, elements=self.gather_elements)
        return _watched(work, call)

    def reduce_scatter(self, source: Tensor, target: Tensor, staging: Tensor, label: Label, *,
                       scale: float, accumulate: bool) -> Handle:
        """Sum `source` over the ranks, times `scale`, into this rank's `target` (added to it if `accumulate`).

        `source` is 1-D with N equal spans and is left as it is, except where `target` aliases its own span. `staging`
        has the dtype of `source` and room for the N-1 addends of the other ranks.
        """
        self._check(label, source)
        if self.ranks == 1:  # the same sum, without a transfer to prepare or wait for
            sum_addends((source,), target, scale, accumulate)
            return DONE
        span = source.numel() // self.ranks
        call = traffic.count(label.kind, span * source.element_size() * (self.ranks - 1), op="reduce_scatter", of=source,
                             ranks=self.members, what=label)
        spans = source.view(self.ranks, span)
        if self.native:
            total = staging[:span]
            launch = partial(native_reduce_scatter, _as_real(total), _as_real(source), group=self.group, async_op=True)
            transfer = _watched(self._launch(label, launch), call)
            return Reduction(transfer, [total], target, scale, accumulate, self.chunk_bytes)
        peers = self._peers()
        received = dict(zip(sorted(peers), staging[:span * (self.ranks - 1)].view(self.ranks - 1, span), strict=True))
        work = _Pairwise(self, label, label.tag, receive={peer: received[peer] for peer in peers},
                         send={peer: spans[peer] for peer in peers}, elements=self.reduce_elements)
        addends = [spans[self.rank] if r == self.rank else received[r] for r in range(self.ranks)]
        return Reduction(_watched(work, call), addends, target, scale, accumulate, self.chunk_bytes)

    def all_to_all(self, send: Sequence[Tensor], receive: Sequence[Tensor], label: Label) -> Handle:
        """Send each rank a contiguous tensor and receive one of each, of any sizes, this rank's own being empty."""
        self._check(label, send[self.rank])
        call = traffic.count(label.kind, sum(tensor.numel() * tensor.element_size() for tensor in send), op="all_to_all",
                             of=send, ranks=self.members, what=label)
        if self.native:
            launch = partial(dist.all_to_all, list(receive), list(send), self.group, async_op=True)
            return _watched(self._launch(label, launch), call)
        work = _Pairwise(self, label, label.tag, receive={peer: receive[peer] for peer in self._peers()},
                         send={peer: send[peer] for peer in self._peers()}, elements=sys.maxsize)
        return _watched(work, call)

    def staging_elements(self, elements: int) -> int:
        """Return the elements of staging that a `reduce_scatter` of a buffer of `elements` needs."""
        return elements // self.ranks * (1 if self.native else self.ranks - 1)

    def gather_words(self, words: Tensor, what: str = "the decision at the end of a step") -> Tensor:
        """Return the int64 `words` (n,) of every rank as (ranks, n). Blocks; meant for a few numbers."""
        self._check(what, words)
        size = words.numel() * 8
        call = traffic.count("words", size * (self.ranks - 1), op="all_gather", of=words, ranks=self.members)
        return over(call, lambda: self._gather_whole(words, what, _WORDS))

    def gather_step_words(self, words: Tensor) -> Tensor:
        """Return the `words` of every rank as `gather_words` does, once a step.

        Raises `RanksDisagree` where the ranks have given the device collectives in different orders since the last call.
        """
        if self._launched is None:
            return self.gather_words(words)
        checksum, names = self._order.take()
        rows = self.gather_words(torch.cat([words, words.new_tensor([checksum])]))
        if len(set(rows[:, -1].tolist())) > 1:
            where = first_difference(self.gather_objects(names), self.members)
            raise RanksDisagree(f"step {self.step}: ranks issue collectives in different orders, so that each receives what "
                                f"others sent for something else: {where}. Let every rank call the same modules in one "
                                f"order. The weights are of no use: load a checkpoint")
        return rows[:, :-1]

    def broadcast(self, tensor: Tensor, source: int, what: str) -> None:
        """Copy the contiguous `tensor` of rank `source` of this group to every rank, of whatever dtype.

        Blocks for a tensor of the host; the current stream waits for one of a device.
        """
        if self.ranks == 1:
            return
        self._check(f"broadcast of {what}", tensor)
        size = tensor.numel() * tensor.element_size() if self.rank == source else 0
        call = traffic.count("broadcast", size, op="broadcast", of=tensor, ranks=self.members, what=what)
        launch = partial(dist.broadcast, _bytes_of(tensor), dist.get_global_rank(self.group, source), self.group,
                         async_op=True)
        if self.native and on_accelerator(tensor):
            over(call, self._launch(f"broadcast of {what}", launch).wait)
            return
        try:
            with self.interruptible_wait():
                if (work := launch()) is not None:
                    over(call, partial(work.wait, self.timeout))
        except RuntimeError as error:
            raise self.failure(f"broadcast of {what}", error) from error

    def gather_objects(self, value: T) -> list[T]:
        """Return the picklable `value` of every rank, by rank. Blocks; meant for checks."""
        what = "a comparison between ranks"
        device = self.words_device
        pickled = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8).to(device)
        sizes = self._gather_whole(torch.tensor([pickled.numel()], dtype=torch.int64, device=device), what,
                                   _SIZE).flatten().tolist()
        padded = pickled.new_zeros(max(sizes))
        padded[:pickled.numel()] = pickled
        rows = self._gather_whole(padded, what, _OBJECT).cpu()
        return [pickle.loads(row[:size].numpy().tobytes()) for row, size in zip(rows, sizes, strict=True)]

    def gather_to_first(self, tensor: Tensor | None,
                        owners: Mapping[int, tuple[tuple[int, ...], torch.dtype]]) -> list[Tensor]:
        """Send the CPU tensor of each of `owners` to rank 0, in their order; return an empty list on other ranks. Blocks.

        `owners` gives the shape and dtype for each rank that has a `tensor`; other ranks pass None.
        """
        device = self.words_device
        parts: list[Tensor] = []
        if self.rank == 0:
            for peer, (shape, dtype) in owners.items():
                if peer == 0:
                    assert tensor is not None
                    parts.append(tensor)
                else:
                    part = torch.empty(shape, dtype=dtype, device=device)
                    self._wait_for_message(part, partial(self.group.recv, [_bytes_of(part)], peer, _COLLECT))
                    parts.append(part.cpu())
                    self._check_not_aborted(_STATE_DICT)  # else the device has received it
        elif self.rank in owners and tensor is not None:
            traffic.count("collect", tensor.numel() * tensor.element_size())
            sent = tensor.contiguous().to(device)
            self._wait_for_message(sent, partial(self.group.send, [_bytes_of(sent)], 0, _COLLECT))
        return parts

    def _wait_for_message(self, tensor: Tensor, launch: Callable[[], dist.Work | None]) -> None:
        """Send or receive a part of the state dict: on a device the current stream waits for it."""
        self._check_not_aborted(_STATE_DICT)
        if on_accelerator(tensor):
            self._launch(_STATE_DICT, launch).wait()
            return
        try:
            with self.interruptible_wait():
                if (work := launch()) is not None:
                    work.wait(self.timeout)
        except RuntimeError as error:
            raise self.failure(_STATE_DICT, error) from error

    def interruptible_wait(self, awaited: Awaited | None = None) -> interruptible_wait:
        """Return the context of a wait for the other ranks, which a published failure aborts."""
        return interruptible_wait(partial(abort_waits, self.group), awaited=awaited)

    def begin(self, tag: int, what: object) -> Awaited | None:
        """Count a collective in which every rank waits for all others, and return what a wait for it awaits."""
        if self.ranks == 1:
            return None
        self._begun[tag] += 1
        return Awaited(group=self._name, members=self.members, tag=tag, number=self._begun[tag], what=what,
                       begun=self._begun)

    def failure(self, what: object, error: RuntimeError) -> CollectiveFailed:
        """Return the error for a collective that failed: the rank, the step, the collective and the likely cause."""
        where = f"rank {self.rank} of {self.ranks}, step {self.step}: {what}"
        if (published := peer_failed(where)) is not None:
            return published
        if "imed out" in str(error) or "timeout" in str(error).lower():
            return CollectiveTimeout(
                f"{where} did not finish within {self.timeout.total_seconds():g} s. Another rank took a different path "
                f"through the model, stopped, or is that slow: set \"debug\": true to name the first difference, or "
                f"raise \"timeout\". ({error})")
        return CollectiveFailed(f"{where} broke: another rank died or closed its connection. The error in the output "
                                f"of that rank is the cause. If it ended without one, its data ended first: put the loop "
                                f"within `with engine.join():`. ({error})")

    def _gather_whole(self, tensor: Tensor, what: str, tag: int) -> Tensor:
        """Return the 1-D `tensor` (n,) of every rank as (ranks, n)."""
        if self.ranks == 1:
            return tensor[None].clone()
        out = tensor.new_empty((self.ranks, tensor.numel()))
        if self.native and (on_accelerator(tensor) or not self._gloo_on_host):
            self._launch(what, partial(native_all_gather, out.view(-1), tensor, self.group, async_op=True)).wait()
        else:
            out[self.rank] = tensor
            _Pairwise(self, what, tag, receive={peer: out[peer] for peer in self._peers()},
                      send=dict.fromkeys(self._peers(), tensor), elements=sys.maxsize).wait()
        return out

    def _peers(self) -> list[int]:
        return [(self.rank + offset) % self.ranks for offset in range(1, self.ranks)]

    def _launch(self, what: object, launch: Callable[[], dist.Work | None]) -> _Native:
        """Give a collective to the device."""
        try:
            work = launch()
        except RuntimeError as error:
            raise self.failure(what, error) from error
        if self._launched is None or work is None:
            return _Native(self, what, work)
        return _Native(self, what, work, partial(self._launched.waited, self._launched.add(work)))

    def _check_not_aborted(self, what: object) -> None:
        if self._launched is not None and self._launched.aborted:
            raise self.failure(what, RuntimeError("the collectives of the device were aborted"))

    def _check(self, what: object, tensor: Tensor) -> None:
        """Note, and in debug mode compare, the collective that this rank issues next."""
        self._check_not_aborted(what)
        if self._launched is not None and on_accelerator(tensor):
            self._order.add(f"{what} ({tensor.numel()} x {tensor.dtype})")
        if not self.debug or self.ranks == 1:
            return
        issued = self.gather_objects(f"{what} ({tensor.numel()} x {tensor.dtype})")
        if len(set(issued)) > 1:
            raise RanksDisagree(f"step {self.step}: ranks issue different collectives: " +
                                "; ".join(f"rank {rank}: {what}" for rank, what in enumerate(issued)))


def _as_real(tensor: Tensor) -> Tensor:
    """Return a complex 1-D tensor as its real and imaginary parts in turn: backends have no complex dtypes."""
    return torch.view_as_real(tensor).view(-1) if tensor.is_complex() else tensor


def _bytes_of(tensor: Tensor) -> Tensor:
    """Return the memory of a contiguous tensor as bytes (n,): backends lack some dtypes, such as int16."""
    return tensor.view(-1).view(torch.uint8)


def _watched(handle: Handle, call: Call | None) -> Handle:
    return handle if call is None else Watched(handle, call)


class _Pairwise:
    """Point-to-point messages to and from each peer, in chunks, or through peer memory."""

    def __init__(self, communicator: Communicator, what: object, tag: int, *,
                 receive: dict[int, Tensor], send: dict[int, Tensor], elements: int):
        self._works: deque[dist.Work] = deque()
        self._communicator = communicator
        self._what = what
        self._awaited = communicator.begin(tag, what)
        self._failed: RuntimeError | None = None  # at the start or in an earlier wait; every later wait fails too
        group = communicator.group
        transfers = {peer: communicator.exchange_by_memory(peer, tag, send[peer], receive[peer]) for peer in send}
        self._transfers = [transfer for transfer in transfers.values() if transfer is not None]
        remote = [peer for peer, transfer in transfers.items() if transfer is None]
        width = next((tensor.element_size() for tensor in send.values()), 1)
        size = min(communicator.chunk_bytes, elements // communicator.ranks * width)
        try:
            self._works += [group.recv([chunk], peer, tag) for peer in remote for chunk in chunks(receive[peer], size)
                            if chunk.numel()]
            self._works += [group.send([chunk], peer, tag) for peer in remote for chunk in chunks(send[peer], size)
                            if chunk.numel()]
        except RuntimeError as error:  # the connection is closed already
            self._failed = error

    def __del__(self) -> None:
        if self._works:
            _dropped.setdefault(self._communicator.group, deque()).extend(self._works)

    def wait(self) -> None:
        if self._failed is not None:
            raise self._communicator.failure(self._what, self._failed)
        try:
            with self._communicator.interruptible_wait(self._awaited):
                while self._works:  # each only once: a second wait for a gloo work never returns
                    self._works.popleft().wait(self._communicator.timeout)
                while self._transfers:
                    self._transfers[-1].wait(self._communicator.timeout.total_seconds())
                    self._transfers.pop()
        except RuntimeError as error:
            self._failed = error
            self._works.clear()  # gloo has closed the connection
            raise self._communicator.failure(self._what, error) from error


class _Native:
    """A native collective of the backend; `wait` makes the current stream wait for it."""

    def __init__(self, communicator: Communicator, what: object, work: dist.Work | None,
                 waited: Callable[[], None] | None = None):
        self._communicator = communicator
        self._what = what
        self._work = work
        self._waited = waited

    def wait(self) -> None:
        work, self._work = self._work, None
        try:
            if work is not None:
                work.wait()
                if self._waited is not None:
                    self._waited()
        except RuntimeError as error:
            raise self._communicator.failure(self._what, error) from error
