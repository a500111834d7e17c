"""A rank writes what it does into a page of shared memory, and its agent reads the page, whatever the rank's threads do.

A write is a store to memory: no system call, no lock, nothing to wait for. The page holds

    the phase      which call of the engine has begun, since when, and whether it is the first of its kind
    the wait       which collective of other ranks the process is blocked in, if any
    the past       how long the last calls of each phase took, from which the agent learns how long is too long
    the trail      the collectives that were waited for last
    the threads    with how many the process computed when it began to train

A process without an agent writes the same fields into memory of its own.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
from dataclasses import dataclass
from enum import IntEnum

__all__ = ["KEPT", "PAGES", "THREADS", "RankPage", "Reading", "TrainingPhase", "page", "phase_of", "read"]

PAGES = "SHOAL_PAGES"
"""The environment variable that names the folder of a node's pages; the page of local rank R is the file `rankR`."""
THREADS = "SHOAL_THREADS"
"""The environment variable with the compute threads that this rank had in the last attempt; only forked ranks have it."""

KEPT = 16
"""Durations that are kept of each phase."""
_SIZE = 8192
_MAGIC = b"SHOALPG1"
_HEAD = struct.Struct("<8sI4xQQdBB")
"""Magic, process, calls, steps, since, phase, first."""
_WAIT = struct.Struct("<I4xd120s")
"""Waits under way, since, and the name of the latest."""
_DURATION = struct.Struct("<f")
_COUNT = struct.Struct("<I")
_TRAIL, _NAME = 16, 120
_AT_THREADS, _AT_WAIT, _AT_PAST, _AT_TRAIL = 48, 64, 256, 2048


class TrainingPhase(IntEnum):
    """The call of the engine that a rank made last."""

    START = 0
    """None: the program starts, or builds the model."""
    BUILD = 1
    """`initialize`."""
    FORWARD = 2
    BACKWARD = 3
    STEP = 4
    BETWEEN = 5
    """None since the last call ended: data, and what else the script does."""
    EVALUATE = 6
    """A forward without gradients, or `eval_batch`."""
    SAVE = 7
    LOAD = 8
    TRAIN_BATCH = 9
    """A step of a pipeline."""
    OTHER = 10
    END = 11
    """The engine was destroyed, or the script has ended."""


_PHASES = {
    "forward": TrainingPhase.FORWARD,
    "forward without gradients": TrainingPhase.EVALUATE,
    "eval_batch": TrainingPhase.EVALUATE,
    "backward": TrainingPhase.BACKWARD,
    "step": TrainingPhase.STEP,
    "train_batch": TrainingPhase.TRAIN_BATCH,
    "save_checkpoint": TrainingPhase.SAVE,
    "load_checkpoint": TrainingPhase.LOAD,
    "destroy": TrainingPhase.END,
}


def phase_of(call: str) -> TrainingPhase:
    """Return the phase of the engine's `call`."""
    return _PHASES.get(call, TrainingPhase.OTHER)


class RankPage:
    """The page of this process."""

    def __init__(self) -> None:
        self._memory: bytearray | mmap.mmap = bytearray(_SIZE)
        self._begin()

    def _begin(self) -> None:
        self._pid = os.getpid()
        self._calls = self._steps = self._trail = 0
        self._phase = TrainingPhase.START
        self._since = time.monotonic()
        self._counts = [0] * len(TrainingPhase)
        self._seen = set[TrainingPhase]()
        self._first = 1
        self._threads = 0

    @property
    def attached(self) -> bool:
        """Whether an agent can read this page."""
        return isinstance(self._memory, mmap.mmap)

    def attach(self, folder: str, local_rank: int, *, pid: int | None = None) -> None:
        """Write into the file of `local_rank` in `folder` from now on, as process `pid` (this one).

        Raises OSError where memory has no room for the file; the page is then written as before.
        """
        path = os.path.join(folder, f"rank{local_rank}")
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(descriptor, 0, _SIZE)  # a write to a mapped page without room would kill the process
            else:
                os.ftruncate(descriptor, _SIZE)
            memory = mmap.mmap(descriptor, _SIZE)
        finally:
            os.close(descriptor)
        memory[:] = bytes(_SIZE)
        self._memory = memory
        self._begin()
        self._pid = pid or self._pid
        self.enter(TrainingPhase.BUILD)

    def enter(self, phase: TrainingPhase, steps: int | None = None) -> None:
        """Note that a call begins, and how long the one before it took; `steps` have been taken so far."""
        now = time.monotonic()
        before = self._phase
        if before in self._seen:
            count = self._counts[before]
            at = _AT_PAST + before * (4 + 4 * KEPT)
            _DURATION.pack_into(self._memory, at + 4 + 4 * (count % KEPT), now - self._since)
            _COUNT.pack_into(self._memory, at, count + 1)
            self._counts[before] = count + 1
        self._seen.add(before)
        self._phase, self._since = phase, now
        self._first = int(phase not in self._seen)
        self._calls += 1
        if steps is not None:
            self._steps = steps
        _HEAD.pack_into(self._memory, 0, _MAGIC, self._pid, self._calls, self._steps, self._since, self._phase, self._first)

    def begin_wait(self, what: object, count: int) -> None:
        """Note that the process waits for other ranks in `what`, the latest of `count` waits that are under way."""
        name = str(what).encode(errors="replace")[:_NAME]
        _WAIT.pack_into(self._memory, _AT_WAIT, count, time.monotonic(), name)
        at = _AT_TRAIL + self._trail % _TRAIL * _NAME
        self._memory[at:at + _NAME] = name.ljust(_NAME, b"\0")
        self._trail += 1

    def end_wait(self, count: int) -> None:
        """Note that `count` waits go on."""
        _COUNT.pack_into(self._memory, _AT_WAIT, count)

    def note_threads(self, count: int) -> None:
        """Note that the process begins to train with `count` threads; what it sets later it sets in each attempt."""
        self._threads = self._threads or count
        _COUNT.pack_into(self._memory, _AT_THREADS, self._threads)


page = RankPage()
"""The page of this process, which the engine and the transport write."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """A page at one moment."""

    pid: int
    calls: int
    steps: int
    since: float
    """`time.monotonic()` of this machine when the call began."""
    phase: TrainingPhase
    first: bool
    """The phase is the first of its kind in this process, which may compile."""
    waits: int
    waits_since: float
    waits_for: str
    past: dict[TrainingPhase, list[float]]
    """Seconds of the last calls of each phase, the first one not counted."""
    trail: list[str]
    """The last collectives that were waited for, in no order."""
    threads: int
    """The compute threads of the process; 0 before it has told."""


def read(path: str) -> Reading | None:
    """Return the page in the file `path`, None where no process has attached to it yet."""
    try:
        with open(path, "rb") as file:
            memory = file.read(_SIZE)
    except OSError:
        return None
    if len(memory) < _SIZE:
        return None
    magic, pid, calls, steps, since, phase, first = _HEAD.unpack_from(memory, 0)
    if magic != _MAGIC:
        return None
    waits, waits_since, name = _WAIT.unpack_from(memory, _AT_WAIT)
    past: dict[TrainingPhase, list[float]] = {}
    for each in TrainingPhase:
        at = _AT_PAST + each * (4 + 4 * KEPT)
        (count,) = _COUNT.unpack_from(memory, at)
        if count:
            past[each] = [_DURATION.unpack_from(memory, at + 4 + 4 * n)[0] for n in range(min(count, KEPT))]
    names = [memory[at:at + _NAME].rstrip(b"\0").decode(errors="replace")
             for at in range(_AT_TRAIL, _AT_TRAIL + _TRAIL * _NAME, _NAME)]
    return Reading(pid=pid, calls=calls, steps=steps, since=since, phase=TrainingPhase(phase), first=bool(first),
                   waits=waits, waits_since=waits_since, waits_for=name.rstrip(b"\0").decode(errors="replace"), past=past,
                   trail=[name for name in names if name], threads=_COUNT.unpack_from(memory, _AT_THREADS)[0])
