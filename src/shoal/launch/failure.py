"""The rank that failed first is the story; the others are one line each.

A rank's exception carries its own time, a rank that died without a word has the time at which its death was seen. Loss
of a connection is what the others feel when one dies, so it comes after everything else; a rank that the launcher stopped
has not failed at all.
"""

from __future__ import annotations

import json
import re
import signal
import socket
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal.launch import rank as bootstrap

__all__ = ["Failure", "describe", "first", "read", "status_code"]

ECHOES = ("torch.distributed.DistBackendError", "torch.distributed.DistNetworkError", "torch.distributed.DistStoreError",
          "torch._C._distributed_c10d.DistBackendError", "builtins.ConnectionError",
          "shoal.errors.CollectiveFailed", "shoal.errors.CollectiveTimeout", "shoal.errors.StageFailed")
ECHO_WORDS = ("gloo/transport", "Connection closed by peer", "Connection reset by peer", "Broken pipe")
WIDTH = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """How one rank ended."""

    rank: int
    local_rank: int
    pid: int
    status: int
    """Exit code, or minus the signal that ended it."""
    time: float
    """Seconds since the epoch: when it raised, or when its death was seen."""
    stopped: bool = False
    """The launcher ended it, because another rank had failed."""
    summary: str = ""
    """`ValueError: text`, if it raised."""
    text: str = ""
    """The traceback, or where each thread was when a fatal signal came."""
    kinds: tuple[str, ...] = ()
    """The classes of the exception."""

    @property
    def echo(self) -> bool:
        """Whether this is what a rank feels when another one dies."""
        return any(kind in ECHOES for kind in self.kinds) or any(word in self.summary for word in ECHO_WORDS)

    @property
    def ending(self) -> str:
        """How it ended, in words."""
        if self.status >= 0:
            return f"exit code {self.status}"
        return f"killed by {signal_name(-self.status)}"

    @property
    def headline(self) -> str:
        """What happened, in one line, without the source file that gloo puts before it."""
        return re.sub(r"\[/\S*/gloo/\S*\] ", "", (self.summary or self.ending).splitlines()[0])


def signal_name(number: int) -> str:
    """Return `SIGKILL` for 9; numbers without a name stay numbers."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def status_code(status: int) -> int:
    """Return the exit code by which shells report `status`: 128 + n for signal n."""
    return status if status >= 0 else 128 - status


def read(path: str, *, rank: int, local_rank: int, pid: int, status: int, time: float, stopped: bool) -> Failure:
    """Join what the launcher saw of a rank's end with what the rank wrote at `path` before it."""
    fact = _json(Path(path))
    if not fact:
        return Failure(rank=rank, local_rank=local_rank, pid=pid, status=status, time=time, stopped=stopped,
                       text=_fault(Path(f"{path}.fault")) if status < 0 else "")
    message, raised = fact["message"], fact.get("time", time)
    return Failure(rank=rank, local_rank=local_rank, pid=pid, status=status, time=raised,
                   stopped=stopped and raised >= time, summary=message["message"],
                   text=message["extraInfo"]["py_callstack"], kinds=tuple(fact.get("kinds", ())))


def first(failures: Iterable[Failure]) -> Failure:
    """Return the failure that caused the others."""
    return min(failures, key=lambda failure: (failure.stopped, failure.echo, failure.time, failure.rank))


def describe(failures: Iterable[Failure], ranks: int, note: str = "") -> str:
    """Return the block that tells a person which rank failed first, where and how, and what became of the others."""
    failures = sorted(failures, key=lambda failure: failure.rank)
    cause = first(failures)
    lines = [_fit(f"---- rank {cause.rank} of {ranks} failed: {cause.headline} ").ljust(WIDTH, "-"),
             f"host {socket.gethostname()}, rank {cause.rank}, local rank {cause.local_rank}, pid {cause.pid}, "
             f"{cause.ending}"]
    if cause.text:
        lines.append(cause.text.rstrip())
    elif cause.status == -signal.SIGKILL:
        lines.append("SIGKILL often means that the machine ran out of memory; the kernel's log tells.")
    lines.extend(_also(failure) for failure in failures if failure is not cause and not failure.stopped)
    if note:
        lines.append(note)
    lines.append("-" * WIDTH)
    return "\n".join(lines)


def _also(failure: Failure) -> str:
    return _fit(f"then rank {failure.rank} (pid {failure.pid}): {failure.headline}")


def _fit(line: str) -> str:
    return line if len(line) <= WIDTH else f"{line[:WIDTH - 3]}..."


def _fault(path: Path) -> str:
    """Return where the threads were, without the bootstrap's own frames and the list of extension modules."""
    lines = _text(path).split("\nExtension modules:")[0].splitlines()
    return "\n".join(line for line in lines if f'"{bootstrap.__file__}"' not in line)


def _json(path: Path) -> dict[str, Any]:
    text = _text(path)
    return json.loads(text) if text else {}


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
