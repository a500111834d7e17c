"""The messages between the command `shoal run` and its process on each host: one line of JSON each, over one connection.

The connection is standard input and output with ssh, and a TCP socket with other launchers. Bytes that are not UTF-8, in the
output of ranks and in the values of variables, travel as the surrogates of `os.fsdecode`, which JSON escapes.
"""

from __future__ import annotations

import hmac
import json
import socket
import threading
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields
from typing import Any, BinaryIO

from shoal.launch.failure import Failure

__all__ = [
    "AskTime",
    "Beat",
    "Begin",
    "Channel",
    "Down",
    "Exited",
    "Hello",
    "HostProblem",
    "Listen",
    "Listening",
    "Measure",
    "Measured",
    "Message",
    "Output",
    "Report",
    "Serve",
    "Signal",
    "Status",
    "Time",
    "Unreached",
    "answer",
]


# From a host


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """The process on a host runs; its versions and what it has."""

    node: int
    host: str
    pid: int
    facts: dict[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True, slots=True, kw_only=True)
class Listening:
    """The port at which a host listens, and the addresses under which it may be reached."""

    port: int
    addresses: list[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """A line that a rank wrote."""

    rank: int
    attempt: int
    stream: str
    """`out` or `err`."""
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Ranks of a host failed."""

    failures: list[dict[str, Any]]
    ranks: int
    note: str
    """The next act; empty where the failure ends the job."""
    attempt: int
    """The number of the attempt that failed."""
    page: str = ""
    """The page of the host, as `shoal doctor` shows it."""

    @classmethod
    def of(cls, failures: list[Failure], ranks: int, note: str, *, attempt: int, page: str = "") -> Report:
        """Return the report of these failures."""
        return cls(failures=[asdict(each) for each in failures], ranks=ranks, note=note, attempt=attempt, page=page)

    def read(self) -> list[Failure]:
        """Return the failures."""
        given: list[dict[str, Any]] = [{**each, "kinds": tuple(each["kinds"])} for each in self.failures]
        return [Failure(**each) for each in given]


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """A message for the user."""

    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class HostProblem:
    """The host cannot do what it is asked, and why."""

    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Exited:
    """The ranks of a host have ended, with this exit code."""

    code: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Time:
    """The clock of a host, in seconds since the epoch."""

    now: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Bytes a second that a host sent to another; 0 where it reached none of the addresses."""

    rate: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Unreached:
    """The numbers of the hosts that a host had connections to and no longer reaches; empty once it reaches all again."""

    hosts: list[int]


# To a host


@dataclass(frozen=True, slots=True, kw_only=True)
class Serve:
    """Open the store of the next attempt, and say where it listens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Begin:
    """Run the ranks of an attempt, in place of those of an earlier one."""

    attempt: int
    """Its number, from 1."""
    hosts: list[int]
    """The numbers of the hosts that take part; the first has the store."""
    port: int
    addresses: list[str]
    """The port and the addresses of the store."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Signal:
    """Give the ranks this signal, and end."""

    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Beat:
    """The sender lives; sent in both directions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AskTime:
    """Say what time it is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Listen:
    """Receive what a host sends, and say where."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measure:
    """Send to this port for some seconds, and say how fast."""

    port: int
    addresses: list[str]
    seconds: float


Down = Serve | Begin | Signal | Beat | AskTime | Listen | Measure
Message = Down | Hello | Listening | Output | Report | Status | HostProblem | Exited | Time | Measured | Unreached
CLASSES: dict[str, type[Any]] = {kind.__name__: kind for kind in (
    Serve, Begin, Signal, Beat, AskTime, Listen, Measure, Hello, Listening, Output, Report, Status, HostProblem, Exited,
    Time, Measured, Unreached)}


class Channel:
    """One end of a connection. Any thread may send; one thread receives."""

    def __init__(self, reader: BinaryIO, writer: BinaryIO, connection: socket.socket | None = None) -> None:
        """`connection` is the socket that both use, which stays open while either does; pipes close by themselves."""
        self._reader = reader
        self._writer = writer
        self._connection = connection
        self._sending = threading.Lock()

    def send(self, *messages: Message) -> None:
        """Send messages. The other end may be gone, which `receive` tells."""
        lines = b"".join(_line(message) for message in messages)
        with self._sending, suppress(OSError, ValueError):
            self._writer.write(lines)
            self._writer.flush()

    def receive(self) -> Message | None:
        """Return the next message; None once the other end is gone. Skips lines that are no messages."""
        while True:
            try:
                line = self._reader.readline()
            except (OSError, ValueError):
                return None
            if not line:
                return None
            with suppress(ValueError, TypeError, KeyError):
                name, values = json.loads(line)
                return CLASSES[name](**values)

    def close(self) -> None:
        """Send no more, which the other end hears, and ends."""
        with suppress(OSError):
            if self._connection is not None:
                self._connection.shutdown(socket.SHUT_WR)
        with suppress(OSError, ValueError):
            self._writer.close()

    def close_reader(self) -> None:
        """Close what `receive` reads, in its thread, once the other end is gone."""
        with suppress(OSError, ValueError):
            self._reader.close()


def _line(message: Message) -> bytes:
    values = {each.name: getattr(message, each.name) for each in fields(message)}
    return json.dumps([type(message).__name__, values]).encode() + b"\n"


def answer(secret: str, nonce: bytes) -> bytes:
    """Return the proof that a process has read the job's file, which only the job's user can."""
    return hmac.new(secret.encode(), nonce, "sha256").hexdigest().encode()
