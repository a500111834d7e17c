"""Agents of several nodes give each other signs of life through the job's store, so that a lost node or link is noticed.

Each agent adds one to its counter every second, and reads the counters of the others. A node whose counter stands still for
`SILENCE` seconds is lost: its ranks answer no message, and without this the others would wait until their collectives time
out. Only this node's clock is used. An agent that cannot reach the store itself is cut off.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, cast

from torch.distributed import Store  # pyright: ignore[reportPrivateImportUsage]  documented as public

__all__ = ["SILENCE", "Beats"]

PERIOD = 1.0
"""Seconds between two signs of life."""
SILENCE = 6.0
"""Seconds without one after which a node is lost."""


class Beats:
    """The signs of life of the nodes of one attempt, in a thread with a connection of its own."""

    def __init__(self, store: Store, node: int, nodes: int, on_cut_off: Callable[[float], None], *,
                 period: float = PERIOD, silence: float = SILENCE) -> None:
        """Begin, on a connection like that of `store`; `node` is the number of this one of `nodes`.

        `on_cut_off` is called in a thread, with the seconds, once this node has not reached the store for twice `silence`.
        """
        self._store: Any = cast("Any", store).clone()
        self._node = node
        self._period, self._silence = period, silence
        self._on_cut_off = on_cut_off
        self._counts = dict.fromkeys(range(nodes), -1)
        self._changed = dict.fromkeys(range(nodes), time.monotonic())
        self._reached = time.monotonic()
        self._stop = threading.Event()
        for loop in (self._run, self._look):  # a call on the store may never return
            threading.Thread(target=loop, name="shoal-beats", daemon=True).start()

    @property
    def silent_for(self) -> dict[int, float]:
        """The seconds since the last sign of life of each node that is lost; none is known while this node is cut off."""
        now = time.monotonic()
        if now - self._reached > self._silence:
            return {}
        return {node: now - changed for node, changed in self._changed.items() if now - changed > self._silence}

    def end(self) -> None:
        """End the thread, without waiting for a connection that does not answer."""
        self._stop.set()

    def _run(self) -> None:
        while not self._stop.wait(self._period):
            with suppress(RuntimeError):  # the store has ended, or does not answer
                self._exchange()

    def _look(self) -> None:
        while not self._stop.wait(self._period):
            if (seconds := time.monotonic() - self._reached) > 2 * self._silence:
                self._on_cut_off(seconds)
                return

    def _exchange(self) -> None:
        """Give a sign of life, and read those of the others."""
        for node, before in self._counts.items():
            count = int(self._store.add(f"beat/{node}", int(node == self._node)))
            if count != before:
                self._counts[node], self._changed[node] = count, time.monotonic()
        self._reached = time.monotonic()
