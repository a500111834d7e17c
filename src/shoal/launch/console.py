"""Where an agent reports: the terminal of this process, or, on a host of a cluster, the connection to the launcher."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import BinaryIO, Protocol

from shoal.launch import failure
from shoal.launch.failure import Failure
from shoal.launch.protocol import Channel, Output, Report, Status
from shoal.launch.streams import RankLogs

__all__ = ["Console", "Remote", "Terminal", "counted", "print_line", "print_status"]


def counted(count: int, word: str, ending: str = "s") -> str:
    """Return the count with its noun: "1 rank", "2 ranks", with `ending` "es" also "2 microbatches"."""
    return f"{count} {word}{'' if count == 1 else ending}"


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


def print_line(prefix: str, line: Output) -> None:
    """Write a line of a rank, byte for byte after its prefix, in a single write."""
    stream: BinaryIO = sys.stdout.buffer if line.stream == "out" else sys.stderr.buffer
    stream.write(prefix.encode() + os.fsencode(line.text) + b"\n")
    stream.flush()


def print_status(text: str) -> None:
    """Write one message to stderr in a single write."""
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()
