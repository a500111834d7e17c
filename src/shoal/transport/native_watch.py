"""Collectives that a device runs are watched by the failure board, and their order is compared once a step.

The host enqueues such a collective on a stream and continues. It blocks later, at a read of the device, such as a script's
`loss.item()`. So the board's thread looks at the oldest collective that has not ended. If that is late, this rank polls the
store; once another rank has published a failure, the collectives of the group are aborted. The blocked read returns, and the
rank's next collective raises the error of the other one.

A backend takes same-sized collectives of two ranks for one, whatever they were meant for. So every rank keeps a checksum
of the names that it has issued, which travels with the masks of a step.
"""

from __future__ import annotations

import threading
import zlib
from collections import deque
from contextlib import suppress
from itertools import zip_longest
from weakref import WeakKeyDictionary, ref

import torch.distributed as dist

from shoal.device import DeviceEvent, current_device, on_accelerator, set_current
from shoal.transport.failure_board import OldestWait, abort_waits, interruptible_wait, watch_oldest

__all__ = ["IssuedOrder", "LaunchedCollectives", "first_difference", "is_native", "launched_collectives"]

_REMEMBERED = 4096
"""Names that a rank keeps for the error; the checksum is of all."""


_launched: WeakKeyDictionary[dist.ProcessGroup, LaunchedCollectives] = WeakKeyDictionary()
"""The collectives that this rank has launched in each group, over all its communicators and tensor axes."""


def is_native(group: dist.ProcessGroup) -> bool:
    """Whether a device has collectives of its own in the group."""
    return any(not each.endswith(":gloo") for each in dist.get_backend_config(group).split(","))


def launched_collectives(group: dist.ProcessGroup) -> LaunchedCollectives | None:
    """Return those of `group`, which its communicators and tensor axes share; None of one rank, and where all are gloo's."""
    if not is_native(group) or dist.get_world_size(group) == 1:
        return None
    return _launched.get(group) or _launched.setdefault(group, LaunchedCollectives(group))


class LaunchedCollectives(OldestWait):
    """The collectives of one group that this rank has given to a device, in order."""

    def __init__(self, group: dist.ProcessGroup):
        self._group = ref(group)
        self._device = current_device()
        self._running: dict[int, dist.Work | DeviceEvent] = {}
        """The work or event that tells the end of each collective, by the number of its launch."""
        self._launches = 0
        self._wait: interruptible_wait | None = None
        self._awaited: int | None = None
        self._lock = threading.Lock()
        self.aborted = False
        """Whether another rank's failure has ended them all; what they wrote is undefined."""
        watch_oldest(self)

    def add(self, work: dist.Work) -> int:
        """Watch `work`, which was launched just now; return its number."""
        with self._lock:
            self._launches += 1
            self._running[self._launches] = work
            return self._launches

    def waited(self, number: int) -> None:
        """Note that the current stream waits for a collective: an event there tells its end from now on.

        A `Work` would keep the collective's tensors in memory until the next look at it.
        """
        device = current_device()
        event = DeviceEvent(device) if on_accelerator(device) else None
        with self._lock:
            if event is None:  # on the host the wait has ended it
                self._running.pop(number, None)
            elif number in self._running:
                self._running[number] = event  # in its place in the order

    def oldest(self) -> interruptible_wait | None:
        set_current(self._device)  # a new thread has the first one, where each rank's question would make a context
        with self._lock:
            while self._running and _has_ended(next(iter(self._running.values()))):
                del self._running[next(iter(self._running))]
            first = next(iter(self._running), None)
            if first != self._awaited:
                self._awaited = first
                self._wait = None if first is None else interruptible_wait(self._abort).begin()
            return self._wait

    def _abort(self) -> None:
        self.aborted = True
        with self._lock:
            self._running.clear()
        if (group := self._group()) is None:  # it was destroyed meanwhile
            return
        with suppress(RuntimeError):  # a backend that cannot: its own timeout ends it
            group._get_backend(current_device()).abort()  # pyright: ignore[reportPrivateUsage]  no public name
        abort_waits(group)


def _has_ended(end: dist.Work | DeviceEvent) -> bool:
    """Whether a collective is over; some backends raise the error of a failed one here, which its readers raise too."""
    try:
        return end.passed if isinstance(end, DeviceEvent) else end.is_completed()
    except RuntimeError:
        return True


class IssuedOrder:
    """The names of the collectives that this rank has issued in one group since the last comparison."""

    def __init__(self) -> None:
        self._checksum = 0
        self._names: deque[str] = deque(maxlen=_REMEMBERED)
        self._count = 0

    def add(self, name: str) -> None:
        """Note the next collective."""
        self._checksum = zlib.crc32(name.encode(), self._checksum)
        self._names.append(name)
        self._count += 1

    def take(self) -> tuple[int, list[str]]:
        """Return a checksum of the order, and the last names; begin anew."""
        taken = self._checksum << 30 | self._count & (1 << 30) - 1, list(self._names)
        self._checksum = self._count = 0
        self._names.clear()
        return taken


def first_difference(names: list[list[str]], ranks: tuple[int, ...]) -> str:
    """Return where the orders of the ranks part, given the `names` that each has issued."""
    for index, issued in enumerate(zip_longest(*names, fillvalue="nothing")):
        for rank, name in zip(ranks, issued, strict=True):
            if name != issued[0]:
                return (f"collective {index + 1} since the last step is {issued[0]} on rank {ranks[0]} and {name} on rank "
                        f"{rank}")
    return f"they differ before the last {_REMEMBERED} collectives"
