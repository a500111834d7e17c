"""A channel is a FIFO queue of values from one rank to another, with a `Sender` and a `Receiver` at its ends.

    Sender.send ===== wire =====> [at most `AHEAD`] -> Receiver.receive

Neither end blocks its caller on the network longer than needed. `send` posts a message (format: `shoal.pipeline.message`)
and returns; a thread releases the tensors when they are sent. The receiver accepts as many messages as `expect` announced,
at most `AHEAD` of them before the caller asks: in a thread, or, while messages of one form repeat, by receives posted early
in the transport.

An abort is delivered in order: `receive` first returns all messages sent before it. The caller must not write to a sent
tensor until `flush` returns. Each channel has its own number within its group; on NCCL, which has no tags, each channel has
its own group.

This file holds the part common to both ends: the wire, the thread, and the orderly end of the thread. A thread that waits in
the transport wakes up only through the peer, or when the group ends. It must end before the interpreter does, because a
thread that wakes up during finalization aborts the process.
"""

from __future__ import annotations

import atexit
import threading
from abc import ABC, abstractmethod
from functools import cache
from weakref import WeakSet

import torch
import torch.distributed as dist

from shoal.errors import CollectiveFailed
from shoal.pipeline.wire import Wire
from shoal.tier.streams import side_stream

__all__ = ["ChannelEndpoint"]


class ChannelEndpoint(ABC):
    """This rank's end of channel `number` with rank `peer` of `group`; `name` names it in errors."""

    close_timeout: float
    """Seconds that `close` waits for messages in flight."""

    def __init__(self, group: dist.ProcessGroup, peer: int, number: int, *, device: torch.device, timeout: float, name: str):
        self._wire = Wire(group, peer, number, device)
        self._timeout = timeout
        self._name = name
        self._label = f"rank {dist.get_rank()}: {name}"
        self._stream = side_stream(device)
        self._thread = threading.Thread(target=self._run, name=f"shoal-pipeline {name}", daemon=True)
        _close_all_at_exit()
        _open_endpoints.add(self)
        self._thread.start()

    def close(self) -> None:
        """End the thread. A thread that waits for its peer, for a message or for room for one, keeps waiting."""
        self.stop()
        self._thread.join(self.close_timeout)

    @abstractmethod
    def stop(self) -> None:
        """Tell the thread to end after its current work."""

    def force_close(self) -> None:
        """End a thread that still waits for its peer, and the group with it."""
        self._thread.join(self.close_timeout)
        if self._thread.is_alive():
            self._wire.break_waits()
            self._thread.join(1)

    def _run(self) -> None:
        with self._stream.use():
            while self._run_next():
                pass

    @abstractmethod
    def _run_next(self) -> bool:
        """Run the thread's next job; return whether the thread goes on."""

    def _broken(self, error: object) -> CollectiveFailed:
        return CollectiveFailed(f"{self._label} broke: {error}. If rank {self._wire.peer} died or closed its connection, "
                                f"the error in the output of that rank is the cause")


_open_endpoints: WeakSet[ChannelEndpoint] = WeakSet()


@cache
def _close_all_at_exit() -> None:
    """Close open endpoints at exit. Registered after the groups were made, it runs before they are destroyed."""
    atexit.register(_close_all)


def _close_all() -> None:
    for endpoint in list(_open_endpoints):
        endpoint.stop()
    for endpoint in list(_open_endpoints):
        endpoint.force_close()
