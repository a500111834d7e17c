"""Where an agent reports: the terminal of this process, or, on a host of a cluster, the connection to the launcher.

A stream or a log that cannot be written ends no job and holds up no rank: the loss is told once, and the job goes on.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, Protocol, TextIO

from shoal.errors import LaunchError
from shoal.launch import failure
from shoal.launch.failure import Failure
from shoal.launch.protocol import Channel, Output, Report, Status

__all__ = ["Console", "RankLogs", "Remote", "Terminal", "counted", "numbered_ranks", "print_line", "print_status"]


def counted(count: int, word: str, ending: str = "s") -> str:
    """Return the count with its noun: "1 rank", "2 ranks", with `ending` "es" also "2 microbatches"."""
    return f"{count} {word}{'' if count == 1 else ending}"


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

    def report(self, failures: list[Failure], ranks: int, note: str) -> None:
        """Tell of failed ranks."""
        ...


class Terminal:
    """The terminal of this process; with a folder for logs, each rank's lines go there too, and have a prefix."""

    def __init__(self, log_dir: str | None) -> None:
        self._logs = None if log_dir is None else RankLogs(log_dir)

    @property
    def takes_output(self) -> bool:
        """Whether there are logs."""
        return self._logs is not None

    def output(self, line: Output) -> None:
        """Log a line and show it."""
        if self._logs is not None:
            self._logs.write(line)
        print_line(f"[rank {line.rank}] ", line)

    def status(self, text: str) -> None:
        """Write to stderr."""
        print_status(text)

    def report(self, failures: list[Failure], ranks: int, note: str) -> None:
        """Write the report to stderr."""
        print_status(failure.describe(failures, ranks, note))


class Remote:
    """The connection to the launcher, on a host of a cluster."""

    takes_output = True

    def __init__(self, channel: Channel, attempt: Callable[[], int]) -> None:
        """`attempt` returns the number of the attempt that runs."""
        self._channel = channel
        self._attempt = attempt

    def output(self, line: Output) -> None:
        """Send a line."""
        self._channel.send(line)

    def status(self, text: str) -> None:
        """Send a message for the user."""
        self._channel.send(Status(text=text))

    def report(self, failures: list[Failure], ranks: int, note: str) -> None:
        """Send failures."""
        self._channel.send(Report.of(failures, ranks, note, self._attempt()))


class RankLogs:
    """Files with the output of each rank, in `folder`; the name has the attempt where ranks were restarted."""

    def __init__(self, folder: str) -> None:
        """Make the folder. Raises `LaunchError` where it cannot be written."""
        self._folder = Path(folder)
        self._files: dict[str, BinaryIO] = {}
        self._failed = False
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise LaunchError(f"--log-dir {folder}: the folder cannot be made: {error.strerror}; give another") from None
        if not os.access(self._folder, os.W_OK | os.X_OK):
            raise LaunchError(f"--log-dir {folder}: no file can be made in it: permission denied; give another")
        with suppress(OSError):  # the report of an earlier job says nothing about this one
            for report in self._folder.glob(failure.REPORTS):
                report.unlink(missing_ok=True)

    def write(self, line: Output) -> None:
        """Write one line to the file of its rank and stream, or tell once that lines are missing."""
        name = f"rank{line.rank}" + (f".attempt{line.attempt}" if line.attempt else "") + f".{line.stream}"
        try:
            if name not in self._files:
                self._files[name] = (self._folder / name).open("wb", buffering=0)
            rest = memoryview(os.fsencode(line.text) + b"\n")
            while rest:
                rest = rest[self._files[name].write(rest):]
        except OSError as error:
            if not self._failed:
                self._failed = True
                print_status(f"shoal run: {self._folder / name} cannot be written: {error.strerror}. Lines of ranks are "
                             "missing in the logs from now on, where that lasts; the job goes on")

    def report(self, text: str) -> None:
        """Write the report of a failure, for `shoal doctor`."""
        try:
            (self._folder / failure.REPORT).write_text(text + "\n", encoding="utf-8", errors="backslashreplace")
        except OSError as error:
            print_status(f"shoal run: {self._folder / failure.REPORT} cannot be written: {error.strerror}")

    def close(self) -> None:
        """Close the files."""
        for file in self._files.values():
            file.close()


def print_line(prefix: str, line: Output) -> None:
    """Write a line of a rank, byte for byte after its prefix, in a single write."""
    _write(sys.stdout if line.stream == "out" else sys.stderr, prefix.encode() + os.fsencode(line.text) + b"\n")


def print_status(text: str) -> None:
    """Write one message to stderr in a single write."""
    _write(sys.stderr, f"{text}\n".encode(errors="backslashreplace"))


def _write(stream: TextIO | None, data: bytes) -> None:
    """Write to a stream. One whose reader is gone, or whose disk is full, leads nowhere afterwards; stderr says so."""
    if stream is None:  # it was closed when this process began
        return
    try:
        stream.flush()
        try:
            stream.buffer.write(data)
        except BlockingIOError as full:  # another process has set the terminal so
            os.set_blocking(stream.fileno(), True)
            stream.buffer.write(data[full.characters_written:])
        stream.buffer.flush()
    except OSError as error:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, stream.fileno())
        os.close(null)
        with suppress(OSError):  # what the stream still holds goes there too
            stream.buffer.flush()
        if stream is sys.stdout:
            print_status(f"shoal run: the standard output cannot be written: {error.strerror}. It is lost from now on; the "
                         "job goes on, and --log-dir keeps what ranks write")
