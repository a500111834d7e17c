"""A thread writes what a launch shows to the standard streams: a reader that pauses delays neither ranks nor agents.

Output that is not read yet waits in memory, up to `KEPT` bytes of each source. Of a source that has more, what follows is
left out until what waits has been written; a line in its place says how much is missing. A stream that cannot be written
(its reader is gone, its disk is full) leads nowhere from then on; stderr says so once, and the job goes on.
"""

from __future__ import annotations

import os
import select
import sys
import threading
from collections import defaultdict, deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TextIO

from shoal.config.sizes import format_bytes

__all__ = ["KEPT", "Printer", "are_full", "print_status"]

KEPT = 4 << 20
"""Bytes of a source that wait to be written to a stream."""
OVERHEAD = 200
"""Bytes that a waiting line takes in memory beside its text."""
BATCH = 1 << 16
"""Bytes of lines after which a write begins."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Text:
    """Lines of one source for one stream."""

    source: str
    stream: str
    data: bytes

    @property
    def size(self) -> int:
        """The bytes that it takes in memory."""
        return len(self.data) + OVERHEAD


@dataclass(slots=True)
class _Waiting:
    """The text of one source for one stream that is not written yet."""

    size: int = 0
    texts_left_out: int = 0
    bytes_left_out: int = 0


class Printer:
    """Writes texts in the order in which they come."""

    def __init__(self, remedy: str) -> None:
        """`remedy` says where the lines that are left out may be found."""
        self._remedy = remedy
        self._texts: deque[_Text] = deque()
        self._waiting: defaultdict[tuple[str, str], _Waiting] = defaultdict(_Waiting)
        self._news = threading.Condition()
        self._closed = False
        self._thread: threading.Thread | None = None

    def put(self, source: str, stream: str, data: bytes) -> None:
        """Have whole lines of a source written to the stream `out` or `err`, unless too much of it waits."""
        text = _Text(source=source, stream=stream, data=data)
        with self._news:
            waiting = self._waiting[source, stream]
            if waiting.size and (waiting.texts_left_out or waiting.size + text.size > KEPT):
                waiting.texts_left_out += 1
                waiting.bytes_left_out += len(data)
            else:
                self._append(text)
            if self._thread is None:
                self._thread = threading.Thread(target=self._write, name="output", daemon=True)
                self._thread.start()

    def wait(self, seconds: float) -> None:
        """Wait until all is written, at most so long."""
        with self._news:
            self._news.wait_for(lambda: not any(each.size for each in self._waiting.values()), seconds)

    def close(self, seconds: float | None) -> None:
        """Wait until all is written, at most so long; an exception that a signal raises ends the wait."""
        with self._news:
            self._closed = True
            self._news.notify_all()
        if self._thread is not None:
            self._thread.join(seconds)

    def _append(self, text: _Text) -> None:
        self._texts.append(text)
        self._waiting[text.source, text.stream].size += text.size
        self._news.notify_all()

    def _write(self) -> None:
        while batch := self._next():
            _write(sys.stdout if batch[0].stream == "out" else sys.stderr, b"".join(text.data for text in batch))
            with self._news:
                for text in batch:
                    self._forget(text)

    def _next(self) -> Sequence[_Text]:
        """Return the next texts, all for one stream; none once this is closed and nothing waits."""
        batch: list[_Text] = []
        with self._news:
            self._news.wait_for(lambda: self._texts or self._closed)
            size = 0
            while self._texts and size < BATCH and (not batch or self._texts[0].stream == batch[0].stream):
                batch.append(self._texts.popleft())
                size += len(batch[-1].data)
        return batch

    def _forget(self, text: _Text) -> None:
        """Note that a text is written; where it was the last before some were left out, say how many."""
        waiting = self._waiting[text.source, text.stream]
        waiting.size -= text.size
        if not waiting.size and waiting.texts_left_out:
            missing = (f"{text.source}shoal run: {waiting.texts_left_out:,} lines ({format_bytes(waiting.bytes_left_out)}) "
                       f"are left out here, for at most {format_bytes(KEPT)} of a rank wait for a reader of this output; "
                       f"{self._remedy}\n")
            waiting.texts_left_out = waiting.bytes_left_out = 0
            self._append(_Text(source=text.source, stream=text.stream, data=os.fsencode(missing)))
        self._news.notify_all()


def are_full(streams: Sequence[int] = (1, 2)) -> bool:
    """Whether a stream takes nothing for now, because its reader pauses: who writes to it waits."""
    poll = select.poll()
    for stream in streams:
        poll.register(stream, select.POLLOUT)
    return len(poll.poll(0)) < len(streams)  # one that nobody reads any more counts as ready: a write fails at once


def print_status(text: str) -> None:
    """Write one message to stderr in a single write."""
    _write(sys.stderr, f"{text}\n".encode(errors="backslashreplace"))


def _write(stream: TextIO | None, data: bytes) -> None:
    """Write all to a stream, past its buffer, whose lock a write that waits would keep at the exit of the process."""
    if stream is None:  # it was closed when this process began
        return
    descriptor = stream.fileno()
    try:
        stream.flush()
        rest = memoryview(data)
        while rest:
            try:
                rest = rest[os.write(descriptor, rest):]
            except BlockingIOError:  # another process has set the terminal so
                os.set_blocking(descriptor, True)
    except OSError as error:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, descriptor)
        os.close(null)
        with suppress(OSError):  # what the stream still holds goes there too
            stream.flush()
        if stream is sys.stdout:
            print_status(f"shoal run: the standard output cannot be written: {error.strerror}. It is lost from now on; the "
                         "job goes on, and --log-dir keeps what ranks write")
