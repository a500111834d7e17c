"""Where an agent reports: the terminal of this process, or, on a host of a cluster, the connection to the launcher.

A log that cannot be written ends no job and holds up no rank: the loss is told once, and the job goes on.
"""

from __future__ import annotations

import argparse
import errno
import fcntl
import os
import stat
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Protocol, Self

from shoal.config.sizes import parse_bytes
from shoal.errors import LaunchError
from shoal.launch import failure
from shoal.launch.failure import Failure
from shoal.launch.outbox import Outbox
from shoal.launch.printing import Printer
from shoal.launch.protocol import Output, Report, Status

__all__ = ["Console", "RankLogs", "Remote", "Terminal", "check_log_dir", "counted", "numbered_ranks", "size_argument"]

HURRY = 3.0
"""Seconds that a job which a signal ends waits at its end for the reader of its output."""


def counted(count: int, word: str, ending: str = "s") -> str:
    """Return the count with its noun: "1 rank", "2 ranks", with `ending` "es" also "2 microbatches"."""
    return f"{count} {word}{'' if count == 1 else ending}"


def size_argument(text: str) -> int:
    """Return the bytes that the value of an option names, 1 at least; argparse shows the error."""
    try:
        size = parse_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    if size < 1:
        raise argparse.ArgumentTypeError(f"got {text!r}; give 1 byte or more")
    return size


def numbered_ranks(numbers: range) -> str:
    """Return "rank 3", or "ranks 3 to 5"."""
    return f"rank {numbers[0]}" if len(numbers) == 1 else f"ranks {numbers[0]} to {numbers[-1]}"


class Console(Protocol):
    """The receiver of an agent's reports."""

    @property
    def takes_output(self) -> bool:
        """Whether the lines of ranks go to `output`; otherwise ranks write where this process writes."""
        ...

    def output(self, line: Output) -> None:
        """Show a line of a rank."""
        ...

    def status(self, text: str) -> None:
        """Tell the user."""
        ...

    def report(self, failures: list[Failure], ranks: int, note: str, page: str) -> None:
        """Tell of failed ranks; `page` is what `shoal doctor` would show of their host."""
        ...

    def wait(self, seconds: float) -> None:
        """Wait until all of it has reached the user or the launcher, at most so long."""
        ...

    def hurry(self) -> None:
        """Be told that a signal ends the job: the end does not wait for a reader that pauses."""
        ...


class Terminal:
    """The terminal of this process, as a context manager; with a folder for logs, each rank's lines go there too.

    What is shown waits for its reader in a thread (`Printer`), and leaving the context waits for that, but not long where
    a signal ends the job. Logs are written at once.
    """

    def __init__(self, log_dir: str | None) -> None:
        """Raises `LaunchError` where the folder cannot be written."""
        self._logs = None if log_dir is None else RankLogs(log_dir, self.status)
        self._patience: float | None = None
        """Seconds that leaving the context waits for a reader; None: as long as it takes."""
        self._printer = Printer("--log-dir DIR keeps all of them" if log_dir is None else f"all of them are in {log_dir}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._logs is not None:
            self._logs.close()
        self._printer.close(self._patience)

    @property
    def takes_output(self) -> bool:
        """Whether there are logs."""
        return self._logs is not None

    def output(self, line: Output, host: str = "") -> None:
        """Log a line, and show it with its rank, and the host if there are several."""
        if self._logs is not None:
            self._logs.write(line)
        source = f"[{host} rank {line.rank}] " if host else f"[rank {line.rank}] "
        self._printer.put(source, line.stream, source.encode() + os.fsencode(line.text) + b"\n")

    def status(self, text: str) -> None:
        """Write to stderr."""
        self._printer.put("", "err", f"{text}\n".encode(errors="backslashreplace"))

    def report(self, failures: list[Failure], ranks: int, note: str, page: str) -> None:
        """Write the report to stderr, without the page."""
        self.status(failure.describe(failures, ranks, note))

    def leave_report(self, text: str) -> None:
        """Leave the report of a failure in the folder for logs, for `shoal doctor`."""
        if self._logs is not None:
            self._logs.report(text)

    def wait(self, seconds: float) -> None:
        """Wait until all is written, at most so long."""
        self._printer.wait(seconds)

    def hurry(self) -> None:
        """Wait for a reader at the end no longer than `HURRY`: a signal ends the job."""
        self._patience = HURRY


class Remote:
    """The connection to the launcher, on a host of a cluster."""

    takes_output = True

    def __init__(self, outbox: Outbox, attempt: Callable[[], int]) -> None:
        """`attempt` returns the number of the attempt that runs."""
        self._outbox = outbox
        self._attempt = attempt

    def output(self, line: Output) -> None:
        """Send a line."""
        self._outbox.send(line)

    def status(self, text: str) -> None:
        """Send a message for the user."""
        self._outbox.send(Status(text=text))

    def report(self, failures: list[Failure], ranks: int, note: str, page: str) -> None:
        """Send failures, and the page of this host."""
        self._outbox.send(Report.of(failures, ranks, note, attempt=self._attempt(), page=page))

    def wait(self, seconds: float) -> None:
        """Wait until all has left, at most so long."""
        self._outbox.wait(seconds)

    def hurry(self) -> None:
        """Do nothing: the launcher shows what is left."""


def check_log_dir(folder: str | None) -> None:
    """Raise `LaunchError` where a folder of logs cannot be made or written. Makes none."""
    if folder is None:
        return
    path = Path(folder).absolute()
    there = next(each for each in (path, *path.parents) if os.path.exists(each))
    if not there.is_dir():
        raise LaunchError(f"--log-dir {folder}: the folder cannot be made: {there} is a file; give another")
    if not os.access(there, os.W_OK | os.X_OK):
        raise LaunchError(f"--log-dir {folder}: nothing can be made in {there}: permission denied; give another")
    if there != path:
        try:  # a file without a name: root may write everywhere, and yet makes nothing in /proc
            tempfile.TemporaryFile(dir=there).close()
        except OSError as error:
            raise LaunchError(f"--log-dir {folder}: nothing can be made in {there}: {error.strerror}; give "
                              "another") from None


def _own_file(path: Path) -> BinaryIO:
    """Open a file of this job, empty. Raises `OSError`, also where another job writes it."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)
    if stat.S_ISREG(os.fstat(file).st_mode):  # several jobs may write to one device, such as /dev/null
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(file)
            raise BlockingIOError(errno.EWOULDBLOCK, "another job writes it; give each job its own --log-dir") from None
        except OSError:  # a file system without locks
            pass
        os.ftruncate(file, 0)
    return os.fdopen(file, "wb", buffering=0)


class RankLogs:
    """Files with the output of each rank, in `folder`; the name has the attempt where ranks were restarted."""

    def __init__(self, folder: str, tell: Callable[[str], None]) -> None:
        """Make the folder; `tell` gets what the user must know. Raises `LaunchError` where it cannot be written."""
        self._folder = Path(folder)
        self._tell = tell
        self._files: dict[str, BinaryIO] = {}
        self._failed = False
        check_log_dir(folder)
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise LaunchError(f"--log-dir {folder}: the folder cannot be made: {error.strerror}; give another") from None
        with suppress(OSError):  # the report of an earlier job says nothing about this one
            for report in failure.reports(self._folder):
                report.unlink(missing_ok=True)

    def write(self, line: Output) -> None:
        """Write one line to the file of its rank and stream, or tell once that lines are missing."""
        name = f"rank{line.rank}" + (f".attempt{line.attempt}" if line.attempt else "") + f".{line.stream}"
        try:
            if name not in self._files:
                self._files[name] = _own_file(self._folder / name)
            rest = memoryview(os.fsencode(line.text) + b"\n")
            while rest:
                rest = rest[self._files[name].write(rest):]
        except OSError as error:
            if not self._failed:
                self._failed = True
                self._tell(f"shoal run: {self._folder / name} cannot be written: {error.strerror}. Lines of ranks are "
                           "missing in the logs from now on, where that lasts; the job goes on")

    def report(self, text: str) -> None:
        """Write the report of a failure, for `shoal doctor`."""
        try:
            (self._folder / failure.REPORT).write_text(text + "\n", encoding="utf-8", errors="backslashreplace")
        except OSError as error:
            self._tell(f"shoal run: {self._folder / failure.REPORT} cannot be written: {error.strerror}")

    def close(self) -> None:
        """Close the files."""
        for file in self._files.values():
            file.close()
