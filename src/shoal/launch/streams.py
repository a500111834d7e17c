"""The output of ranks, line by line: each rank writes into pipes of its own, and one thread reads them.

A line keeps its bytes. A carriage return ends a line too, so that progress bars show.
"""

from __future__ import annotations

import os
import selectors
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from shoal.launch.protocol import Output

__all__ = ["RankStreams"]

CHUNK = 1 << 16
CLOSING = 2.0
"""Seconds for the last lines of ranks that have ended; a process that still holds their pipes is not waited for."""


@dataclass(slots=True)
class _Pipe:
    rank: int
    attempt: int
    stream: str
    rest: bytes = b""
    returned: bool = False
    """Whether the last byte was a carriage return: the line feed that may follow ends the same line."""


class RankStreams:
    """The pipes of the ranks of this node; `write` gets each line, in the thread that reads."""

    def __init__(self, folder: str, write: Callable[[Output], None]) -> None:
        self._folder = folder
        self._write = write
        self._selector = selectors.DefaultSelector()
        self._thread: threading.Thread | None = None
        self._closing = threading.Event()

    def open(self, rank: int, attempt: int, stream: str) -> str:
        """Return the path of a pipe that a rank may open for writing."""
        path = f"{self._folder}/rank{rank}.{attempt}.{stream}"
        os.mkfifo(path, 0o600)
        pipe = _Pipe(rank=rank, attempt=attempt, stream=stream)
        self._selector.register(os.open(path, os.O_RDONLY | os.O_NONBLOCK), selectors.EVENT_READ, pipe)
        if self._thread is None:
            self._thread = threading.Thread(target=self._read, name="rank output", daemon=True)
            self._thread.start()
        return path

    def close(self) -> None:
        """Wait for the last lines of ranks that have ended."""
        self._closing.set()
        if self._thread is not None:
            self._thread.join(CLOSING + 1)

    def _read(self) -> None:
        deadline = float("inf")
        # between two attempts no pipe is open
        while (self._selector.get_map() or not self._closing.is_set()) and time.monotonic() < deadline:
            for key, _ in self._selector.select(timeout=0.1):
                if (text := os.read(key.fd, CHUNK)):
                    self._lines(key.data, text)
                else:
                    self._selector.unregister(key.fd)
                    os.close(key.fd)
                    self._end(key.data)
            if self._closing.is_set():
                deadline = min(deadline, time.monotonic() + CLOSING)
        for key in list(self._selector.get_map().values()):
            self._end(key.data)

    def _lines(self, pipe: _Pipe, text: bytes) -> None:
        if pipe.returned:
            text = text.removeprefix(b"\n")
        pipe.returned = text.endswith(b"\r")
        *lines, pipe.rest = (pipe.rest + text.replace(b"\r\n", b"\n").replace(b"\r", b"\n")).split(b"\n")
        if len(pipe.rest) > CHUNK:  # a line without end
            lines, pipe.rest = [*lines, pipe.rest], b""
        for line in lines:
            self._write(Output(rank=pipe.rank, attempt=pipe.attempt, stream=pipe.stream, text=os.fsdecode(line)))

    def _end(self, pipe: _Pipe) -> None:
        if pipe.rest:
            self._lines(pipe, b"\n")
