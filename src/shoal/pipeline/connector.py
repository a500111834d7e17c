"""Opens the channels of one pipeline over the pipeline axis of a mesh; those of two engines are never mistaken.

Where gloo carries the device's tensors all edges share the axis' group, each with a number of its own. NCCL knows no tags:
there each edge has a group, in which the words go by gloo all the same. So nobody waits on the device for a message that
may not come, and what NCCL is asked for has been announced.
"""

from __future__ import annotations

from collections.abc import Mapping
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from shoal.mesh.mesh import Mesh
from shoal.pipeline.channel import Receiver, Sender
from shoal.pipeline.links import Edge
from shoal.transport import process_group
from shoal.transport.failure_board import abort_waits

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
        if (apart := own_backends(process_group.backends(self._group), device)) is not None:
            self._own = [process_group.group_of(mesh.lines("pipeline"), backend=apart) for _ in range(2 * stages)]

    def sender(self, edge: Edge, peer: int) -> Sender:
        return Sender(self._of(edge), peer, self._first + edge.number, device=self._device, timeout=self._timeout,
                      what=str(edge))

    def receiver(self, edge: Edge, peer: int) -> Receiver:
        return Receiver(self._of(edge), peer, self._first + edge.number, device=self._device, timeout=self._timeout,
                        what=str(edge))

    def end_waits(self) -> None:
        """End whatever waits in the channels."""
        for group in self._own or [self._group]:
            if group is not None:
                abort_waits(group)

    def _of(self, edge: Edge) -> dist.ProcessGroup:
        own = self._own[edge.number] if self._own else None
        return own or self._group


def own_backends(backends: Mapping[str, str], device: torch.device) -> str | None:
    """Return the backends of the group that each edge has of its own; None where gloo's tags tell the edges apart.

    `backends` are those of the axis, by type of device; tensors of `device` are to travel.
    """
    carrier = backends.get(device.type, "gloo")
    if carrier == "gloo":
        return None
    return "cpu:gloo" if device.type == "cpu" else f"cpu:gloo,{device.type}:{carrier}"
