"""gloo's own thread never preempts a rank's: on Linux it runs under the policy `SCHED_BATCH`.

gloo serves all connections of a device from one thread. A rank that sends holds a lock of the connection; while it does,
that thread asks the kernel for events again and again. An answer that arrives during the send wakes the thread, and where
no core is free the kernel lets a thread that wakes preempt the one that computes: the rank then cannot run, still holds
the lock, and gloo's thread spins on it until its time slice ends, 3 to 4 ms later.

A thread of policy `SCHED_BATCH` has the same share of the processor, but does not preempt when it wakes. It runs at once
on a free core, or when the rank waits; else at the end of a slice. Measured: docs/decisions/0029-gloo-yields-to-ranks.md.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

__all__ = ["let_ranks_go_first"]

_TASKS = Path("/proc/self/task")
_LOOP = "gloo_tcp_loop"
"""The name that torch's gloo gives the thread."""


def let_ranks_go_first() -> None:
    """Set the policy of every gloo thread of this process; where the system does not allow it, nothing changes."""
    if not hasattr(os, "sched_setscheduler"):
        return
    for task in _TASKS.glob("*/comm"):
        with suppress(OSError):  # the thread has ended, or a sandbox forbids the call
            thread = int(task.parent.name)
            if task.read_text().strip() == _LOOP and os.sched_getscheduler(thread) == os.SCHED_OTHER:
                os.sched_setscheduler(thread, os.SCHED_BATCH, os.sched_param(0))
