"""Nodes that were started by hand compare their clocks through the job's store: the first learns which others are off.

It asks, and the others answer with their time. By its own clock an answer was written between the question and its arrival,
so a clock is off by as much as the answer lies outside of these; a node that answers late never seems to be.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from typing import Any

from shoal.launch.facts import CLOCK

__all__ = ["Clocks"]

_ASKED = "clock"


class Clocks:
    """One comparison of the clocks of all nodes; `tell` gets a line for each that is off."""

    def __init__(self, node: int, nodes: int, tell: Callable[[str], None], clock: Callable[[], float] = time.time) -> None:
        self._node = node
        self._awaited = set(range(1, nodes)) if node == 0 else {0}
        """The nodes whose answer, or question, has not come."""
        self._asked: float | None = None
        self._tell = tell
        self._clock = clock

    def look(self, store: Any) -> None:
        """Ask, or answer, or see which answers have come. No call waits for another node."""
        if self._node:
            if self._awaited and store.check([_ASKED]):
                self._awaited.clear()
                store.set(f"{_ASKED}/{self._node}", f"{self._clock()} {socket.gethostname()}")
            return
        if self._asked is None:
            self._asked = self._clock()
            store.set(_ASKED, "")
        for node in [each for each in self._awaited if store.check([f"{_ASKED}/{each}"])]:
            self._awaited.remove(node)
            answer, host = store.get(f"{_ASKED}/{node}").decode().split(" ", 1)
            ahead, behind = float(answer) - self._clock(), self._asked - float(answer)
            if max(ahead, behind) > CLOCK:
                self._tell(f"shoal run: the clock of {host} is at least {max(ahead, behind):.1f} s "
                           f"{'ahead of' if ahead > behind else 'behind'} that of {socket.gethostname()}; set both by NTP "
                           "(chronyc makestep), or logs mislead, and nodes lose each other at the rendezvous")
