"""One way of bytes between two ranks: what is posted at one end under a tag arrives at the other, in order.

Tensors travel as bytes, so that every dtype does, without a copy. Words and tensors of the host go by gloo, in pieces, as
those of collectives; what rests on a device goes by the device's own backend, whole, or where that is gloo too, by way of
the host. NCCL knows no tags: each way needs a group of its own there.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.transport import process_group
from shoal.transport.collectives import CHUNK_BYTES
from shoal.transport.reduction import chunks

__all__ = ["EVER", "TAGS", "Wire", "WireTransfer"]

TAGS = 128
"""The tags of one wire."""

EVER = timedelta(days=3650)
"""Of a thread that waits for what somebody else may never need."""

_FIRST_TAG = 1 << 24  # above those of collectives on the same group
_AT_ONCE = timedelta(milliseconds=1)
_HOST = torch.device("cpu")


class WireTransfer:
    """Messages under way, and the tensors that they fill or empty."""

    __slots__ = ("_by_device", "_by_host", "tensors")

    def __init__(self, tensors: Sequence[Tensor]):
        self.tensors = tensors
        self._by_host: list[dist.Work] = []
        self._by_device: list[dist.Work] = []

    def add(self, tensor: Tensor, works: Iterable[dist.Work]) -> None:
        """Take note of the messages of `tensor`."""
        (self._by_host if tensor.is_cpu else self._by_device).extend(works)

    def wait(self, timeout: timedelta = EVER) -> None:
        """Return when the tensors may be used; on NCCL, by what this thread's stream is given from now on. Once only.

        Raises RuntimeError where the other end is gone. After `timeout` gloo ends the whole group, and raises too.
        """
        for work in self._by_host:
            work.wait(timeout)
        for work in self._by_device:
            work.wait()  # a timeout would have this thread look for the end again and again


class Wire:
    """This rank's end of a way to, or from, rank `peer` of `group`; its tags are `TAGS` from `number` times `TAGS` on."""

    def __init__(self, group: dist.ProcessGroup, peer: int, number: int, device: torch.device):
        backends = process_group.backends(group)
        assert backends.get("cpu") == "gloo", f"words go by gloo, and the group has {backends}"
        self._group = group
        self._peer = peer
        self._tag = _FIRST_TAG + number * TAGS
        self._device = device
        self._device_way = _HOST if backends.get(device.type, "gloo") == "gloo" else device
        self.peer = dist.get_global_rank(group, peer)
        """The peer's rank in the world."""
        self.waits_idly = self._device_way == _HOST
        """Whether a message that was asked for early costs no more than its memory: NCCL's would keep the device busy."""

    def words(self, *values: int) -> Tensor:
        """Return integers as a tensor that travels as it is."""
        return torch.tensor(values, dtype=torch.int64)

    def text(self, data: bytes) -> Tensor:
        """Return bytes as a tensor that travels as it is."""
        return torch.frombuffer(bytearray(data), dtype=torch.uint8)

    def way(self, *, on_host: bool) -> torch.device:
        """Return the device by which a tensor travels that rests on the host, or does not."""
        return _HOST if on_host else self._device_way

    def rest(self, *, on_host: bool) -> torch.device:
        """Return the device on which a tensor rests at this end, when it has come."""
        return _HOST if on_host else self._device

    def send(self, tagged: Sequence[tuple[int, Tensor]]) -> WireTransfer:
        """Start sending the contiguous tensors, each under its tag and where it travels."""
        group, peer, first = self._group, self._peer, self._tag
        transfer = WireTransfer([tensor for _, tensor in tagged])
        for tag, tensor in tagged:
            transfer.add(tensor, [group.send([piece], peer, first + tag) for piece in messages(tensor)])
        return transfer

    def receive(self, tensors: Sequence[Tensor], tag: int) -> WireTransfer:
        """Start filling the contiguous `tensors`, each where it travels, with what the other end sends next."""
        group, peer, tag = self._group, self._peer, self._tag + tag
        transfer = WireTransfer(tensors)
        for tensor in tensors:
            transfer.add(tensor, [group.recv([piece], peer, tag) for piece in messages(tensor)])
        return transfer

    def cut(self) -> None:
        """End whatever waits in this group, here and at its peers: gloo closes its connections when a wait is too long."""
        with suppress(RuntimeError):
            self._group.recv([torch.empty(1)], self._peer, self._tag).wait(_AT_ONCE)


def messages(tensor: Tensor) -> tuple[Tensor, ...]:
    """Return `tensor` as the messages in which it travels: in pieces by gloo, which asks for no dtype; whole by a device's
    backend, which cuts by itself, and takes a kernel for each message.
    """
    size, by_gloo = tensor.nbytes, tensor.is_cpu
    if size == 0:
        return ()
    if size <= CHUNK_BYTES and by_gloo:
        return (tensor,)
    return chunks(tensor.view(-1).view(torch.uint8), CHUNK_BYTES if by_gloo else size)
