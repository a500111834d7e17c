"""Agents of several nodes exchange heartbeats through the job's store, so that a lost node or link is noticed.

Each agent adds one to its counter every second, and reads the counters of the others. A node whose counter stands still for
`SILENCE` seconds of such exchanges is lost: its ranks answer no message, and without this the others would wait until their
collectives time out. Only this node's clock is used, and a pause of the store or of this process counts for nothing. An
agent that cannot reach the store is cut off; one that ends in order says so.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, cast

from torch.distributed import Store  # pyright: ignore[reportPrivateImportUsage]  documented as public

from shoal.launch.clocks import Clocks

__all__ = ["SILENCE", "Heartbeats"]

PERIOD = 1.0
"""Seconds between two heartbeats."""
SILENCE = 6.0
"""Seconds without one after which a node is lost."""
PAUSE = 2.5
"""Where two exchanges are more periods apart, the store or this process has paused, and missing heartbeats do not count."""
ENDED = 1 << 40
"""Added to the counter of a node that ends in order."""
END = 2.0
"""Seconds to wait until the store has taken that."""


class Heartbeats:
    """The heartbeats of the nodes of one attempt, in a thread with a connection of its own."""

    def __init__(self, store: Store, node: int, nodes: int, on_cut_off: Callable[[float], None], *,
                 clocks: Clocks | None = None, period: float = PERIOD, silence: float = SILENCE) -> None:
        """Begin, on a connection like that of `store`; `node` is the number of this one of `nodes`.

        `on_cut_off` is called in a thread, with the seconds, once this node has not reached the store for twice `silence`.
        `clocks` are compared meanwhile.
        """
        self._store: Any = cast("Any", store).clone()
        self._node = node
        self._period, self._silence = period, silence
        self._on_cut_off = on_cut_off
        self._clocks = clocks
        self._counts = dict.fromkeys(range(nodes), -1)
        self._unchanged = dict.fromkeys(range(nodes), 0)
        """By node: the exchanges in a row in which its counter stood still."""
        self._reached = time.monotonic()
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=loop, name="shoal-heartbeats", daemon=True)
                         for loop in (self._run, self._look)]  # two: a call on the store may not return
        for thread in self._threads:
            thread.start()

    @property
    def silent_for(self) -> dict[int, float]:
        """The seconds without a heartbeat of each node that is lost."""
        silent = {node: count * self._period for node, count in list(self._unchanged.items())}
        return {node: seconds for node, seconds in silent.items() if seconds >= self._silence and node != self._node}

    def end(self) -> None:
        """Tell the others that this node ends in order, unless the store does not answer."""
        self._stop.set()
        self._threads[0].join(END)

    def _run(self) -> None:
        with suppress(RuntimeError):  # the store has ended, or does not answer
            while not self._stop.wait(self._period):
                self._exchange()
                if self._clocks is not None:
                    self._clocks.look(self._store)
            self._store.add(f"beat/{self._node}", ENDED)

    def _look(self) -> None:
        looked = time.monotonic()
        while not self._stop.wait(self._period):
            before, looked = looked, time.monotonic()
            if looked - before > PAUSE * self._period:  # this process was stopped, and may reach the store yet
                self._reached = looked
            if (seconds := looked - self._reached) > 2 * self._silence:
                self._on_cut_off(seconds)
                return

    def _exchange(self) -> None:
        """Send a heartbeat, and read those of the others."""
        found = {node: int(self._store.add(f"beat/{node}", int(node == self._node))) for node in self._counts}
        before, self._reached = self._reached, time.monotonic()
        paused = self._reached - before > PAUSE * self._period
        for node, count in found.items():
            stands = count == self._counts[node] and count < ENDED and not paused
            self._unchanged[node] = self._unchanged[node] + 1 if stands else 0
            self._counts[node] = count
