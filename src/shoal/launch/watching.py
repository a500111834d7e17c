"""The agent's reaction to a rank that is stopped or hung: it dumps its stacks, then kills the rank or reports it.

A killed rank has failed like any other: the report shows its stacks, and the attempt ends. Stacks are those of py-spy where
that is installed, else of Python's faulthandler, which `rank.py` has registered for a real-time signal.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from shoal.errors import LaunchError
from shoal.launch import rank
from shoal.launch.console import Console
from shoal.recording.page import TrainingPhase
from shoal.resilience.watch import StallKind, Suspicion, Watch

__all__ = ["Reaction", "WatchedRank", "current_first", "stacks"]

LOOK = 0.25
"""Seconds between two looks at the ranks."""
DUMP = 1.0
"""Seconds to wait for the stacks of a rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchedRank:
    """One rank of this node."""

    rank: int
    pid: int
    error_file: str


class Reaction:
    """Looks at the ranks of a node, and ends or reports those that are stopped or hung."""

    def __init__(self, folder: str, console: Console, mode: str, *, whole_job: bool) -> None:
        """`mode` is `restart`, `report` or `off`."""
        self._watch = Watch(folder, whole_job=whole_job)
        self._console = console
        self._mode = mode
        self._looked = 0.0
        self._reported: set[tuple[int, int]] = set()

    def begin_attempt(self, ranks: int) -> None:
        """Forget the processes of the last attempt; the job has `ranks` now."""
        self._watch.begin_attempt(ranks)
        self._reported.clear()

    @property
    def threads(self) -> Mapping[int, int]:
        """Compute threads, by local rank, in the last attempt of as many ranks."""
        return self._watch.threads

    def trained(self, local_ranks: int) -> bool:
        """Whether every rank of this node has taken a step in this attempt."""
        readings = [self._watch.reading(local_rank) for local_rank in range(local_ranks)]
        return all(reading is not None and reading.steps > 0 for reading in readings)

    def has_left(self, local_rank: int, watched: WatchedRank) -> bool:
        """Whether the script of a rank has ended, or given its engine up, without an error; its process may still run."""
        reading = self._watch.reading(local_rank)
        return (reading is not None and reading.pid == watched.pid and reading.phase is TrainingPhase.END
                and not os.path.exists(watched.error_file))

    def poll(self, ranks: Mapping[int, WatchedRank], *, held_up: bool) -> None:
        """Look at the ranks, by local rank, if it is time to; `held_up`: something outside of the job has them wait."""
        if self._mode == "off" or time.monotonic() - self._looked < LOOK:
            return
        found = self._watch.poll({local_rank: each.pid for local_rank, each in ranks.items()}, held_up=held_up)
        for suspicion in found:
            watched = ranks[suspicion.local_rank]
            if self.restarts:
                self._kill(suspicion, watched)
            else:
                self._report(suspicion, watched)
        self._looked = time.monotonic()

    @property
    def restarts(self) -> bool:
        """Whether a rank that does not go on is ended."""
        return self._mode == "restart"

    def end(self, watched: WatchedRank, reason: str, text: str = "") -> None:
        """Kill a rank, unless it has failed already, and have `reason` reported with its stacks `text`."""
        if not os.path.exists(watched.error_file):
            rank.record(watched.error_file, LaunchError(reason), text, summary=reason)
        with suppress(ProcessLookupError):
            os.kill(watched.pid, signal.SIGKILL)

    def _kill(self, suspicion: Suspicion, watched: WatchedRank) -> None:
        text = stacks(suspicion.pid, watched.error_file, stopped=suspicion.kind is StallKind.STOPPED)
        self._watch.double(suspicion)
        self.end(watched, str(suspicion), text)

    def _report(self, suspicion: Suspicion, watched: WatchedRank) -> None:
        call = (suspicion.local_rank, -1 if suspicion.reading is None else suspicion.reading.calls)
        if call not in self._reported:
            self._reported.add(call)
            text = stacks(suspicion.pid, watched.error_file, stopped=suspicion.kind is StallKind.STOPPED)
            self._console.status(f"shoal run: rank {watched.rank} (pid {suspicion.pid}) is {suspicion}; it goes on, because "
                                 f"--watch does not end it\n{text}".rstrip())


def stacks(pid: int, error_file: str, *, stopped: bool) -> str:
    """Return the stacks of all threads of a rank; empty where they cannot be had.

    A stopped process runs no signal handler, and only py-spy can read it.
    """
    if spy := shutil.which("py-spy"):
        with suppress(subprocess.SubprocessError):
            done = subprocess.run([spy, "dump", "--nonblocking", "--pid", str(pid)], capture_output=True, text=True,
                                  timeout=DUMP * 5, check=True)
            return done.stdout
    path = Path(f"{error_file}{rank.STACKS}")
    if stopped or not error_file or not path.exists():
        return ""
    before = path.stat().st_size
    with suppress(ProcessLookupError):
        os.kill(pid, rank.DUMP_SIGNAL)
    deadline, size = time.monotonic() + DUMP, before
    while time.monotonic() < deadline:
        time.sleep(0.02)
        last, size = size, path.stat().st_size
        if size == last > before:
            break
    return current_first(path.read_bytes()[before:].decode(errors="replace"))


def current_first(text: str) -> str:
    """Return stacks by faulthandler with the thread that got the signal, as a rule the main one, before all others."""
    threads = text.strip("\n").split("\n\n")
    threads.sort(key=lambda thread: not thread.startswith("Current thread"))
    return "\n\n".join(threads) + "\n" if text else ""
