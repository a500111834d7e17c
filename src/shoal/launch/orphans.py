"""Nothing that a launch started outlives it.

Every process of a launch carries the launch's mark in its environment, which children inherit through any number of forks
and sessions, so `sweep` finds them all. Three deaths, three answers: a launcher that ends sweeps; the kernel kills the
ranks of a launcher that is killed (`shoal.launch.rank.die_with`); and a guardian, forked before the first rank, sweeps what
those ranks had started.
"""

from __future__ import annotations

import os
import shutil
import signal
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import NoReturn, Self

__all__ = ["MARK", "Guardian", "marked", "sweep"]

MARK = "SHOAL_LAUNCH"
"""The environment variable that holds a launch's mark."""
UNKILLABLE = 5.0


def marked(mark: str) -> list[int]:
    """Return the live processes, other than this one, that carry `mark`."""
    word = f"{MARK}={mark}".encode()
    found: list[int] = []
    for entry in os.scandir("/proc") if os.path.isdir("/proc") else ():
        if entry.name.isdecimal() and int(entry.name) != os.getpid():
            try:
                if word in Path(entry.path, "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
            except OSError:  # another user's, or gone by now
                continue
    return found


def sweep(mark: str, seconds: float) -> None:
    """End every process that carries `mark`: ask, wait up to `seconds`, then kill until none is left.

    A process that not even the kernel can end (it waits for a device) is given up after another `UNKILLABLE` seconds.
    """
    deadline = time.monotonic() + seconds
    asked: set[int] = set()
    while (pids := marked(mark)) and time.monotonic() < deadline + UNKILLABLE:
        late = time.monotonic() >= deadline
        for pid in pids:
            if late or pid not in asked:
                _kill(pid, signal.SIGKILL if late else signal.SIGTERM)
        asked.update(pids)
        time.sleep(0.01)


def _kill(pid: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)


class Guardian:
    """A process that waits for this one to end; if it did not end in peace, it sweeps and removes `folder`.

    Enter it before there are threads: it forks.
    """

    def __init__(self, mark: str, folder: str) -> None:
        self.mark = mark
        self.folder = folder
        self.pid = 0
        self._lifeline = -1

    def __enter__(self) -> Self:
        listen, self._lifeline = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            os.close(self._lifeline)
            self._watch(listen)
        os.close(listen)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        with suppress(BrokenPipeError):  # the guardian itself was killed
            os.write(self._lifeline, b".")
        os.close(self._lifeline)
        os.waitpid(self.pid, 0)

    def _watch(self, lifeline: int) -> NoReturn:
        try:
            os.setsid()
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
                signal.signal(number, signal.SIG_IGN)
            null = os.open(os.devnull, os.O_RDWR)
            for stream in (0, 1, 2):
                os.dup2(null, stream)
            if not os.read(lifeline, 1):
                sweep(self.mark, 0)
                shutil.rmtree(self.folder, ignore_errors=True)
        finally:
            os._exit(0)
