"""What both ends of a channel are: a wire, a thread that waits for it, and an orderly end of that thread.

A thread that waits within the transport can only be woken by the other end, or by the end of the group. The interpreter
must not end before it: one that wakes up later aborts the process.
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
    """This rank's end of channel `number` with rank `peer` of `group`; `what` names it in errors."""

    patience: float
    """Seconds for what is on its way when this end is closed."""

    def __init__(self, group: dist.ProcessGroup, peer: int, number: int, *, device: torch.device, timeout: float, what: str):
        self._wire = Wire(group, peer, number, device)
        self._timeout = timeout
        self._what = what
        self._where = f"rank {dist.get_rank()}: {what}"
        self._stream = side_stream(device)
        self._thread = threading.Thread(target=self._run, name=f"shoal-pipeline {what}", daemon=True)
        _close_all_at_exit()
        _open.add(self)
        self._thread.start()

    def close(self) -> None:
        """End the thread. One that waits for the other end, which owes a message or room for one, waits on."""
        self.stop()
        self._thread.join(self.patience)

    @abstractmethod
    def stop(self) -> None:
        """Let the thread end when it can."""

    def cut(self) -> None:
        """End a thread that still waits for the other end, and the group with it."""
        self._thread.join(self.patience)
        if self._thread.is_alive():
            self._wire.cut()
            self._thread.join(1)

    def _run(self) -> None:
        with self._stream.use():
            while self._next():
                pass

    @abstractmethod
    def _next(self) -> bool:
        """Do the thread's next piece of work; return whether there is more to come."""

    def _broke(self, error: object) -> CollectiveFailed:
        return CollectiveFailed(f"{self._where} broke: {error}. If rank {self._wire.peer} died or closed its connection, "
                                f"the error in the output of that rank is the cause")


_open: WeakSet[ChannelEndpoint] = WeakSet()


@cache
def _close_all_at_exit() -> None:
    """Have open ends closed at exit: registered after the groups were made, it is called before they are destroyed."""
    atexit.register(_close_all)


def _close_all() -> None:
    for end in list(_open):
        end.stop()
    for end in list(_open):
        end.cut()
