"""Processes of this host by /proc. No torch is imported, because launchers read them before it is."""

from __future__ import annotations

import os
from collections import defaultdict
from dataclasses import dataclass

__all__ = ["Process", "descendants", "process", "processes"]

_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """A process by /proc."""

    state: str
    """R (runs), S (sleeps), D (waits for a device), T (stopped), t (traced), Z (ended)."""
    parent: int
    """The process id of the one that started it, or that adopted it."""
    cpu: float
    """Seconds of processor time of all threads so far."""


def process(pid: int) -> Process | None:
    """Return the facts of process `pid`, None where there is none (or no /proc)."""
    try:
        with open(f"/proc/{pid}/stat", errors="replace") as file:
            fields = file.read().rpartition(")")[2].split()
    except OSError:
        return None
    return Process(state=fields[0], parent=int(fields[1]), cpu=(int(fields[11]) + int(fields[12])) / _TICKS)


def processes() -> dict[int, Process]:
    """Return the facts of all processes by id; none without /proc."""
    names = os.listdir("/proc") if os.path.isdir("/proc") else []
    found = {int(name): process(int(name)) for name in names if name.isdigit()}
    return {pid: facts for pid, facts in found.items() if facts is not None}  # others have ended meanwhile


def descendants(pid: int) -> dict[int, Process]:
    """Return the processes by id that `pid` has started or adopted, and those have."""
    running = processes()
    children: defaultdict[int, list[int]] = defaultdict(list)
    for child, facts in running.items():
        children[facts.parent].append(child)
    found, rest = dict[int, Process](), [*children[pid]]
    while rest:
        child = rest.pop()
        found[child] = running[child]
        rest += children[child]
    return found
