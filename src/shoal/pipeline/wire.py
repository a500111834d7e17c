"""Point-to-point transport between two ranks: tensors sent under a tag arrive at the peer under that tag, in order.

Tensors travel as raw bytes without a copy, so every dtype is supported. Headers and CPU tensors go by gloo, cut into chunks
like those of collectives. Device tensors go by the device's own backend, uncut; if that backend is gloo, they are copied
through the host. NCCL has no tags, so with NCCL each wire needs a process group of its own. The messages that a device
carries are watched, and aborted, as its collectives are (`transport/native_watch.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.errors import CollectiveFailed
from shoal.transport import process_group
from shoal.transport.collectives import CHUNK_BYTES
from shoal.transport.failure_board import peer_failed
from shoal.transport.native_watch import LaunchedCollectives, launched_collectives
from shoal.transport.reduction import chunks

__all__ = ["NO_TIMEOUT", "TAGS", "Wire", "WireTransfer", "wire_chunks"]

TAGS = 128
"""The tags of one wire."""

NO_TIMEOUT = timedelta(days=3650)
"""For a background thread whose message the caller may never ask for."""

_FIRST_TAG = 1 << 24  # above those of collectives on the same group
_IMMEDIATELY = timedelta(milliseconds=1)
_HOST = torch.device("cpu")


class WireTransfer:
    """Sends or receives in flight, and their tensors. `launched` watches those that a device runs."""

    __slots__ = ("_device_work", "_host_work", "_launched", "tensors")

    def __init__(self, tensors: Sequence[Tensor], launched: LaunchedCollectives | None):
        self.tensors = tensors
        self._launched = launched
        self._host_work: list[dist.Work] = []
        self._device_work: list[tuple[dist.Work, int]] = []  # and its number in the watch

    def add(self, tensor: Tensor, works: Iterable[dist.Work]) -> None:
        """Add the work handles of the chunks of `tensor`."""
        if tensor.is_cpu:
            self._host_work.extend(works)
            return
        assert self._launched is not None, "a device has messages of its own only in a group that is native"
        self._device_work.extend((work, self._launched.add(work)) for work in works)

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> None:
        """Return when the tensors may be used; on NCCL, by later work on this thread's stream. Call it once.

        Raises RuntimeError if the peer is gone, or another rank's failure has ended the device's messages. After `timeout`
        gloo ends the whole group and raises too.
        """
        for work in self._host_work:
            work.wait(timeout)
        for work, number in self._device_work:
            work.wait()  # with a timeout this thread would poll for the end instead of ordering its stream
            assert self._launched is not None
            _check_not_aborted(self._launched)
            self._launched.waited(number)


class Wire:
    """This rank's end of a connection to rank `peer` of `group`, with the `TAGS` tags from `number` x `TAGS` on."""

    def __init__(self, group: dist.ProcessGroup, peer: int, number: int, device: torch.device):
        backends = process_group.backends(group)
        assert backends.get("cpu") == "gloo", f"headers go by gloo, and the group has {backends}"
        self._group = group
        self._peer = peer
        self._tag = _FIRST_TAG + number * TAGS
        self._device = device
        self._launched = launched_collectives(group)
        self._device_carrier = _HOST if backends.get(device.type, "gloo") == "gloo" else device
        self.peer = dist.get_global_rank(group, peer)
        """The peer's rank in the world."""
        self.early_receives_are_free = self._device_carrier == _HOST
        """Whether a pending receive costs only its memory; with NCCL a pending receive occupies the device."""

    def pack_integers(self, *values: int) -> Tensor:
        """Return integers as a tensor that can be sent."""
        return torch.tensor(values, dtype=torch.int64, device="cpu")

    def pack_bytes(self, data: bytes) -> Tensor:
        """Return bytes as a tensor that can be sent."""
        return torch.frombuffer(bytearray(data), dtype=torch.uint8)

    def carrier(self, *, on_host: bool) -> torch.device:
        """Return the device from which a tensor is sent, for a tensor of the host or of the device."""
        return _HOST if on_host else self._device_carrier

    def destination(self, *, on_host: bool) -> torch.device:
        """Return the device on which a received tensor belongs, for a tensor of the host or of the device."""
        return _HOST if on_host else self._device

    def send(self, tagged: Sequence[tuple[int, Tensor]]) -> WireTransfer:
        """Start sending the contiguous tensors, each under its tag; each is on its carrier device."""
        group, peer, first = self._group, self._peer, self._tag
        transfer = self._transfer_of([tensor for _, tensor in tagged])
        for tag, tensor in tagged:
            transfer.add(tensor, [group.send([chunk], peer, first + tag) for chunk in wire_chunks(tensor)])
        return transfer

    def receive(self, tensors: Sequence[Tensor], tag: int) -> WireTransfer:
        """Start receiving what the peer sends next under `tag` into contiguous `tensors`, each on its carrier device."""
        group, peer, tag = self._group, self._peer, self._tag + tag
        transfer = self._transfer_of(tensors)
        for tensor in tensors:
            transfer.add(tensor, [group.recv([chunk], peer, tag) for chunk in wire_chunks(tensor)])
        return transfer

    def _transfer_of(self, tensors: Sequence[Tensor]) -> WireTransfer:
        """Return a transfer to be started. Raises CollectiveFailed where the device's messages were aborted."""
        if not all(tensor.is_cpu for tensor in tensors):
            _check_not_aborted(self._launched)
        return WireTransfer(tensors, self._launched)

    def break_waits(self) -> None:
        """End all waits in this group, here and at its peers: gloo closes its connections when a wait times out."""
        with suppress(RuntimeError):
            self._group.recv([torch.empty(1, dtype=torch.float32, device="cpu")], self._peer, self._tag).wait(_IMMEDIATELY)


def _check_not_aborted(launched: LaunchedCollectives | None) -> None:
    if launched is not None and launched.aborted:
        where = f"rank {dist.get_rank()}: a message between stages"
        raise peer_failed(where) or CollectiveFailed(f"{where}: the messages of the device were aborted")


def wire_chunks(tensor: Tensor) -> tuple[Tensor, ...]:
    """Return the chunks in which `tensor` is sent.

    For gloo they are byte views of at most `CHUNK_BYTES`, since gloo checks no dtype. A device tensor is one chunk: NCCL
    cuts it by itself, and launches a kernel for each message.
    """
    size, by_gloo = tensor.nbytes, tensor.is_cpu
    if size == 0:
        return ()
    if size <= CHUNK_BYTES and by_gloo:
        return (tensor,)
    return chunks(tensor.view(-1).view(torch.uint8), CHUNK_BYTES if by_gloo else size)
