"""Processes of this host by /proc. No torch is imported, because launchers read them before it is."""

from __future__ import annotations

import os
from collections import defaultdict
from dataclasses import dataclass

__all__ = ["FamilyTime", "Process", "descendants", "process", "processes"]

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
    waited: float
    """Those of the children that have ended and that it has waited for, and of theirs."""


def process(pid: int) -> Process | None:
    """Return the facts of process `pid`, None where there is none (or no /proc)."""
    try:
        with open(f"/proc/{pid}/stat", errors="replace") as file:
            fields = file.read().rpartition(")")[2].split()
    except OSError:
        return None
    return Process(state=fields[0], parent=int(fields[1]), cpu=(int(fields[11]) + int(fields[12])) / _TICKS,
                   waited=(int(fields[13]) + int(fields[14])) / _TICKS)


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


class FamilyTime:
    """The processor time of the processes that one has started, and those have, with those that have ended since."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._last: dict[int, Process] = {}
        self._seconds = 0.0

    def seconds(self) -> float:
        """Return the seconds so far; they never fall.

        The time of a child that its parent waits for moves into the parent's `waited`. So what the living ones have waited
        for counts, less what those that are gone had when they were seen last. Children are read before their parents: one
        that ends meanwhile is found in its parent, and perhaps twice, which the next look takes back.
        """
        order = [*reversed(descendants(self._pid)), self._pid]  # which has parents before their children
        now = {pid: facts for pid in order if (facts := process(pid)) is not None}
        before, self._last = self._last, now
        if not before:
            return self._seconds
        none = Process(state="", parent=0, cpu=0.0, waited=0.0)
        used = sum(max(0.0, facts.cpu - before.get(pid, none).cpu) for pid, facts in now.items() if pid != self._pid)
        waited = sum(max(0.0, facts.waited - before.get(pid, none).waited) for pid, facts in now.items())
        gone = sum(facts.cpu + facts.waited for pid, facts in before.items() if pid not in now)
        self._seconds += used + max(0.0, waited - gone)
        return self._seconds
