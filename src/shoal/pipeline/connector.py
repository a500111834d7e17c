"""Opens the channels of one pipeline over the pipeline axis of a mesh; those of two engines are never mistaken.

On gloo all edges share the axis' group, each with a number of its own; on NCCL, which knows no tags, each has a group.
"""

from __future__ import annotations

from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from shoal import distributed
from shoal.board import end_waits
from shoal.mesh import Mesh
from shoal.pipeline.channel import Receiver, Sender
from shoal.pipeline.links import Edge

__all__ = ["Connector"]

_channels: WeakKeyDictionary[dist.ProcessGroup, int] = WeakKeyDictionary()
"""How many channels were numbered in each group, over all its engines."""


class Connector:
    """Opens channels over the pipeline axis."""

    def __init__(self, mesh: Mesh, stages: int, device: torch.device, timeout: float):
        self._group = mesh.group("pipeline")
        self._device = device
        self._timeout = timeout
        self._first = _channels.get(self._group, 0)
        _channels[self._group] = self._first + 2 * stages
        self._own: list[dist.ProcessGroup | None] = []
        if "gloo" not in dist.get_backend_config(self._group):  # which knows no tags: a group for every edge
            self._own = [distributed.group_of(mesh.lines("pipeline"), alone=True) for _ in range(2 * stages)]

    def sender(self, edge: Edge, peer: int) -> Sender:
        return Sender(self._of(edge), peer, self._first + edge.number, device=self._device, timeout=self._timeout,
                      what=str(edge))

    def receiver(self, edge: Edge, peer: int) -> Receiver:
        return Receiver(self._of(edge), peer, self._first + edge.number, device=self._device, timeout=self._timeout,
                        what=str(edge))

    def end_waits(self) -> None:
        """End whatever waits in the channels."""
        end_waits(self._group)

    def _of(self, edge: Edge) -> dist.ProcessGroup:
        own = self._own[edge.number] if self._own else None
        return own or self._group
