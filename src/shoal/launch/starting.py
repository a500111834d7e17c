"""The processes and connections of a job's hosts. All that comes of them arrives in one queue, in order for each host.

With ssh each host has a process here, whose standard input and output are its connection. With other launchers one process
starts all hosts, and each connects to a port of this machine and proves that it has read the job's file.
"""

from __future__ import annotations

import hmac
import os
import queue
import secrets
import signal
import socket
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO, cast

from shoal.cluster.launchers import Launcher
from shoal.launch.addresses import own_addresses
from shoal.launch.job import ClusterJob
from shoal.launch.protocol import Channel, Hello, Message, answer

__all__ = ["Closed", "Connected", "Ended", "ErrorLine", "HostEvent", "Starter"]

LINGER = 5.0
"""Seconds that a process has to end once its connection has closed."""
HANDSHAKE = 20.0
"""Seconds that a host has to prove that it has read the job."""
EVENTS = 1000
"""Events that wait to be taken; then the connections wait, and with them what the hosts send."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Connected:
    """A host is connected: its messages follow."""

    channel: Channel


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorLine:
    """A line of an error stream."""

    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Closed:
    """The connection of a host has closed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """The process that started all hosts has ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostEvent:
    """An event of one host: a message, a line of its error stream, or a change of its connection."""

    node: int | None
    """The number of the host; None for the process that started all."""
    message: Message | Connected | ErrorLine | Closed | Ended


class Starter:
    """Starts the hosts of a job. `environment` is that of the launcher's processes; a shared job goes to `job_file`."""

    def __init__(self, launcher: Launcher, commands: Sequence[Sequence[str]], environment: Mapping[str, str],
                 job_file: Path | None) -> None:
        self.events: queue.Queue[HostEvent] = queue.Queue(EVENTS)
        self._launcher = launcher
        self._commands = commands
        self._environment = {**environment, **launcher.variables}
        self._job_file = job_file
        self._processes: list[subprocess.Popen[bytes]] = []
        self._listener: socket.socket | None = None

    def start(self, job: ClusterJob) -> None:
        """Start all hosts."""
        if self._job_file is None:
            text = job.encode()
            for node, command in enumerate(self._commands):
                self._start_one(node, command, b"%010d\n" % len(text) + text)
        else:
            self._listener = socket.create_server(("", 0), backlog=1024)
            told = replace(job, addresses=tuple(own_addresses()), port=self._listener.getsockname()[1])
            self._job_file.write_bytes(told.encode())
            self._thread(self._accept, self._listener, job.secret)
            self._start_all(self._commands[0])

    def forget(self) -> None:
        """Remove the job's file and its folder: every host has read it."""
        if self._job_file is not None:
            self._job_file.unlink()
            self._job_file.parent.rmdir()

    def end(self, seconds: float) -> None:
        """End what was started here, after at most some seconds of waiting for it."""
        self._thread(self._discard)  # a process that still writes could not end
        if self._listener is not None:
            self._listener.close()
        for process in self._processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(timeout=seconds)
                continue
            process.terminate()  # mpirun and srun end what they started
        for process in self._processes:
            try:
                process.wait(timeout=LINGER)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()

    def _start_one(self, node: int, command: Sequence[str], text: bytes) -> None:
        process = self._popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        channel = Channel(_stream(process.stdout), _stream(process.stdin))

        def serve() -> None:
            complaints = self._thread(self._read_lines, node, _stream(process.stderr))
            with suppress(OSError):  # it has ended already, and its error stream says why
                _stream(process.stdin).write(text)
                _stream(process.stdin).flush()
            self.events.put(HostEvent(node=node, message=Connected(channel=channel)))
            self._relay(node, channel)
            complaints.join(LINGER)
            self.events.put(HostEvent(node=node, message=Closed()))

        self._thread(serve)

    def _start_all(self, command: Sequence[str]) -> None:
        process = self._popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)

        def serve() -> None:
            self._read_lines(None, _stream(process.stdout))
            process.wait()
            self.events.put(HostEvent(node=None, message=Ended()))

        self._thread(serve)

    def _popen(self, command: Sequence[str], *, stdin: int, stdout: int, stderr: int) -> subprocess.Popen[bytes]:
        """Start a command in a session of its own, so that a Ctrl-C at the terminal reaches this process alone."""
        process = subprocess.Popen(list(command), env=self._environment, start_new_session=True, stdin=stdin, stdout=stdout,
                                   stderr=stderr)
        self._processes.append(process)
        return process

    def _accept(self, listener: socket.socket, secret: str) -> None:
        with suppress(OSError):  # closed at the end
            while True:
                connection, _ = listener.accept()
                self._thread(self._meet, connection, secret)

    def _meet(self, connection: socket.socket, secret: str) -> None:
        """Serve a connection, if it is one of a host of this job."""
        connection.settimeout(HANDSHAKE)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        reader, writer = (cast(BinaryIO, connection.makefile(mode)) for mode in ("rb", "wb"))
        nonce = secrets.token_hex(16).encode()
        try:
            writer.write(nonce + b"\n")
            writer.flush()
            proof = reader.readline(100).strip()
        except OSError:
            proof = b""
        if not hmac.compare_digest(proof, answer(secret, nonce)):
            connection.close()
            return
        with connection:
            connection.settimeout(None)
            channel = Channel(reader, writer, connection)
            if isinstance(hello := channel.receive(), Hello):
                self.events.put(HostEvent(node=hello.node, message=Connected(channel=channel)))
                self.events.put(HostEvent(node=hello.node, message=hello))
                self._relay(hello.node, channel)
                self.events.put(HostEvent(node=hello.node, message=Closed()))

    def _relay(self, node: int, channel: Channel) -> None:
        while (message := channel.receive()) is not None:
            self.events.put(HostEvent(node=node, message=message))
        channel.close_reader()

    def _discard(self) -> None:
        while True:
            self.events.get()

    def _read_lines(self, node: int | None, stream: BinaryIO) -> None:
        with stream:
            for line in stream:
                if text := line.decode(errors="replace").rstrip():
                    self.events.put(HostEvent(node=node, message=ErrorLine(text=text)))

    @staticmethod
    def _thread(serve: Callable[..., None], *args: object) -> threading.Thread:
        thread = threading.Thread(target=serve, args=args, daemon=True)
        thread.start()
        return thread


def _stream(stream: object) -> BinaryIO:
    return cast(BinaryIO, stream)
