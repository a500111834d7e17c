"""One way of bytes between two ranks: what is posted at one end under a tag arrives at the other, in order.

Tensors travel as bytes, so that every dtype does, without a copy, in pieces, as those of collectives. Where the group has
gloo for the host, words and tensors of the host go by gloo; what rests on a device goes by the device's own backend, or
where that is gloo too, by way of the host. On NCCL alone everything goes by way of the device. NCCL knows no tags: each
way needs a group of its own there.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.collectives import PIECE_BYTES
from shoal.reduction import pieces

__all__ = ["EVER", "TAGS", "Transfer", "Wire"]

TAGS = 128
"""The tags of one wire."""

EVER = timedelta(days=3650)
"""Of a thread that waits for what somebody else may never need."""

_FIRST_TAG = 1 << 24  # above those of collectives on the same group
_AT_ONCE = timedelta(milliseconds=1)
_HOST = torch.device("cpu")


class Transfer:
    """Messages under way, and the tensors that they fill or empty."""

    __slots__ = ("_gloo", "_works", "tensors")

    def __init__(self, works: list[dist.Work], tensors: Sequence[Tensor], *, gloo: bool):
        self.tensors = tensors
        self._works = works
        self._gloo = gloo

    def wait(self, timeout: timedelta = EVER) -> None:
        """Return when the tensors may be used; on NCCL, by what this thread's stream is given from now on. Once only.

        Raises RuntimeError where the other end is gone. After `timeout` gloo ends the whole group, and raises too.
        """
        for work in self._works:
            if self._gloo:
                work.wait(timeout)
            else:
                work.wait()


class Wire:
    """This rank's end of a way to, or from, rank `peer` of `group`; its tags are `TAGS` from `number` times `TAGS` on."""

    def __init__(self, group: dist.ProcessGroup, peer: int, number: int, device: torch.device):
        backends = dict(item.split(":") for item in dist.get_backend_config(group).split(","))
        self._group = group
        self._peer = peer
        self._tag = _FIRST_TAG + number * TAGS
        self._device = device
        self._gloo = backends.get("cpu") == "gloo"
        self._host_way = _HOST if self._gloo else device
        self._device_way = _HOST if backends.get(device.type) in (None, "gloo") else device
        self.peer = dist.get_global_rank(group, peer)
        """The peer's rank in the world."""
        self.waits_idly = self._host_way == self._device_way == _HOST
        """Whether a message that was asked for early costs no more than its memory: NCCL's would keep the device busy."""

    def words(self, *values: int) -> Tensor:
        """Return integers as a tensor that travels as it is."""
        return torch.tensor(values, dtype=torch.int64, device=self._host_way)

    def text(self, data: bytes) -> Tensor:
        """Return bytes as a tensor that travels as it is."""
        return torch.frombuffer(bytearray(data), dtype=torch.uint8).to(self._host_way)

    def way(self, *, on_host: bool) -> torch.device:
        """Return the device by which a tensor travels that rests on the host, or does not."""
        return self._host_way if on_host else self._device_way

    def rest(self, *, on_host: bool) -> torch.device:
        """Return the device on which a tensor rests at this end, when it has come."""
        return _HOST if on_host else self._device

    def send(self, tagged: Sequence[tuple[int, Tensor]]) -> Transfer:
        """Start sending the contiguous tensors, each under its tag and where it travels."""
        group, peer, first = self._group, self._peer, self._tag
        works = [group.send([piece], peer, first + tag) for tag, tensor in tagged for piece in self._pieces(tensor)]
        return Transfer(works, [tensor for _, tensor in tagged], gloo=self._gloo)

    def receive(self, tensors: Sequence[Tensor], tag: int) -> Transfer:
        """Start filling the contiguous `tensors`, each where it travels, with what the other end sends next."""
        group, peer, tag = self._group, self._peer, self._tag + tag
        works = [group.recv([piece], peer, tag) for tensor in tensors for piece in self._pieces(tensor)]
        return Transfer(works, tensors, gloo=self._gloo)

    def cut(self) -> None:
        """End whatever waits in this group, here and at its peers: gloo closes its connections when a wait is too long."""
        if self._gloo:
            try:
                self._group.recv([torch.empty(1)], self._peer, self._tag).wait(_AT_ONCE)
            except RuntimeError:
                return

    def _pieces(self, tensor: Tensor) -> tuple[Tensor, ...]:
        size = tensor.nbytes
        if size == 0:
            return ()
        if size <= PIECE_BYTES and self._gloo:  # which asks for no dtype
            return (tensor,)
        return pieces(tensor.view(-1).view(torch.uint8), PIECE_BYTES)
