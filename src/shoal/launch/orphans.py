"""No process that a launch started outlives the launch, nor does its memory.

Every process of a launch carries a mark in its environment. Children inherit it across forks and sessions, unless they are
given another environment. The launcher adopts its orphaned descendants (PR_SET_CHILD_SUBREAPER), so that it knows those too.
Three mechanisms cover all cases:

- A launcher that exits normally sweeps its descendants and all that carry the mark (`Guardian.sweep`).
- If the launcher is killed, the kernel kills its ranks (`shoal.launch.rank.die_with`).
- A guardian process, forked before the first rank, then sweeps the processes with the mark that those ranks had started.

The launcher and its guardian hold a lock on the launch's folder in memory. Where both are killed, the lock is free, and the
next launch removes the folder, and the temporary folder that the lock's file names.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Container, Generator, Iterable
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType, TracebackType
from typing import NoReturn, Self

from shoal.errors import LaunchError
from shoal.resilience.processes import descendants

__all__ = ["LAST_PAGE", "MARK", "Guardian", "call_within", "exit_on_signals", "is_abandoned", "marked", "memory_folder",
           "open_streams", "remove_abandoned", "signals_held", "sweep"]

PR_SET_CHILD_SUBREAPER = 36

MARK = "SHOAL_LAUNCH"
"""The environment variable that holds a launch's mark."""
LOCK = "lock"
"""The file in the folder in memory on which the launch holds a lock. It has the path of the launch's temporary folder."""
LAST_PAGE = 10.0
"""Seconds that a process which ends gives its last page to be written: a disk of the network may never answer."""
UNKILLABLE = 5.0
"""Seconds after SIGKILL after which `sweep` gives up."""


def marked(mark: str) -> list[int]:
    """Return the live processes, other than this one, that carry `mark`."""
    word = f"{MARK}={mark}".encode()
    pids: list[int] = []
    for entry in os.scandir("/proc") if os.path.isdir("/proc") else ():
        if entry.name.isdecimal() and int(entry.name) != os.getpid():
            try:
                if word in Path(entry.path, "environ").read_bytes().split(b"\0"):
                    pids.append(int(entry.name))
            except OSError:  # another user's process, or it has exited
                continue
    return pids


def memory_folder(mark: str) -> str:
    """Return the folder in memory of a launch: pages of ranks, and copies of their state. It goes with the launch."""
    root = "/dev/shm" if os.access("/dev/shm", os.W_OK) else tempfile.gettempdir()
    return os.path.join(root, f"shoal-{mark}")


def is_abandoned(folder: Path) -> bool:
    """Whether the launch of a folder in memory has been killed, with its guardian."""
    try:
        descriptor = os.open(folder / LOCK, os.O_RDWR)
    except OSError:  # it is being made, or removed, or another user's
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return True


def remove_abandoned() -> None:
    """Remove the folders of launches that have been killed, with their guardians."""
    for folder in Path(memory_folder("")).parent.glob("shoal-*"):
        if is_abandoned(folder):
            with suppress(OSError):
                if folder.lstat().st_uid == os.geteuid():  # another user's may have any content, or link to it
                    shutil.rmtree(os.fsdecode((folder / LOCK).read_bytes()), ignore_errors=True)
            shutil.rmtree(folder, ignore_errors=True)


def _locked_folder(mark: str, temporary: str) -> int:
    """Make the folder in memory of a launch, and return the descriptor that holds its lock, in a file that has `temporary`.

    Raises `LaunchError` where the folder cannot be made.
    """
    folder = Path(memory_folder(mark))
    draft = folder / f"{LOCK}.part"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        descriptor = os.open(draft, os.O_CREAT | os.O_RDWR, 0o600)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        with suppress(OSError):  # a full file system: the temporary folder is then left
            os.write(descriptor, os.fsencode(os.path.abspath(temporary)))
        draft.rename(folder / LOCK)  # whoever finds it finds it locked
    except OSError as error:
        raise LaunchError(f"{socket.gethostname()}: {folder}, the folder in memory of this launch, cannot be made: "
                          f"{error.strerror}; make room in {folder.parent}") from error
    return descriptor


def exit_on_signals(numbers: Iterable[signal.Signals] = (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT), *,
                    also_ignored: bool = False) -> None:
    """Have signals that end a process raise `SystemExit`, which leaves its contexts, as SIGINT's `KeyboardInterrupt` does.

    Those that the parent (nohup, a shell's `&`) has set to ignored stay so, unless `also_ignored`.
    """
    for number in numbers:
        if also_ignored or signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _exit)


def _exit(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


@contextmanager
def signals_held() -> Generator[None]:
    """Hold the signals that end a process until the context ends, which then gives the first to its handler.

    An exception that a handler raises while torch is imported may be lost: torch imports numpy, and clears what that raises.
    """
    caught: list[int] = []

    def hold(number: int, frame: FrameType | None) -> None:
        caught.append(number)

    before = {number: signal.getsignal(number)
              for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)}
    held = {number: handler for number, handler in before.items() if handler not in (None, signal.SIG_IGN)}
    try:
        for number in held:
            signal.signal(number, hold)
        yield
    finally:
        for number, handler in held.items():
            signal.signal(number, handler)
        if caught:
            signal.raise_signal(caught[0])


def open_streams() -> None:
    """Open standard streams that are closed, so that no other file takes their place, here or in a rank."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)


def sweep(mark: str, seconds: float) -> None:
    """End every process that carries `mark`: send SIGTERM, wait up to `seconds`, then send SIGKILL until none is left.

    A process in uninterruptible sleep ignores SIGKILL; `sweep` gives up after another `UNKILLABLE` seconds.
    """
    _end(lambda: marked(mark), seconds)


def _end(find: Callable[[], list[int]], seconds: float) -> None:
    """End the processes that `find` returns, as `sweep` does."""
    deadline = time.monotonic() + seconds
    signalled: set[int] = set()
    while (pids := find()) and time.monotonic() < deadline + UNKILLABLE:
        expired = time.monotonic() >= deadline
        for pid in pids:
            if expired or pid not in signalled:
                _kill(pid, signal.SIGKILL if expired else signal.SIGTERM)
        signalled.update(pids)
        time.sleep(0.01)


def _kill(pid: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def call_within(seconds: float, function: Callable[[], None]) -> None:
    """Call `function` in a thread of its own, and go on after `seconds`, whether or not it has returned."""
    thread = threading.Thread(target=function, daemon=True)
    thread.start()
    thread.join(seconds)


class Guardian:
    """Makes the folder in memory; a child process that sweeps, and removes it and `folder`, if this process ends without
    leaving the context. Before it removes them it calls `write_page`, for which it waits `LAST_PAGE` seconds.

    Enter the context before any thread starts, because it forks.
    """

    def __init__(self, mark: str, folder: str, write_page: Callable[[], None] = lambda: None) -> None:
        self.mark = mark
        self.folder = folder
        self._write_page = write_page
        self.pid = 0
        self._pipe = -1
        self._lock = -1

    def __enter__(self) -> Self:
        remove_abandoned()
        self._lock = _locked_folder(self.mark, self.folder)  # the child shares it, other processes close it as they start
        read_end, self._pipe = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            os.close(self._pipe)
            self._watch(read_end)
        os.close(read_end)
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        with suppress(BrokenPipeError):  # the guardian itself was killed
            os.write(self._pipe, b".")
        os.close(self._pipe)
        os.waitpid(self.pid, 0)
        os.close(self._lock)

    def sweep(self, seconds: float, spared: Container[int] = ()) -> None:
        """End every process of the launch but this one, the guardian and those in `spared`, as the function `sweep` does."""
        _end(lambda: [pid for pid in self._family() if pid not in spared], seconds)

    def _family(self) -> set[int]:
        """Return the live processes of the launch but this one and the guardian."""
        adopted = {pid for pid, facts in descendants(os.getpid()).items() if facts.state != "Z"}
        return {*marked(self.mark), *adopted} - {self.pid}

    def _watch(self, read_end: int) -> NoReturn:
        try:
            os.setsid()
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
                signal.signal(number, signal.SIG_IGN)
            null = os.open(os.devnull, os.O_RDWR)
            for stream in (0, 1, 2):
                os.dup2(null, stream)
            if not os.read(read_end, 1):
                sweep(self.mark, 0)
                call_within(LAST_PAGE, self._write_page)
                for folder in (memory_folder(self.mark), self.folder):
                    shutil.rmtree(folder, ignore_errors=True)
        finally:
            os._exit(0)
