"""The failure report shows the rank that failed first in full, and every other failed rank in one line.

A rank's exception carries its own time. A rank that died without an exception has the time at which the launcher saw it.
A lost connection is a secondary failure, caused by the death of a peer, and ranks after every other failure. A rank that
the launcher stopped has not failed.
"""

from __future__ import annotations

import json
import re
import signal
import socket
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from shoal.launch import rank as rank_module

__all__ = ["REPORT", "Failure", "describe", "first", "is_written", "read", "reports", "status_code", "with_ended"]

REPORT = "failure.txt"
"""The file in the folder of logs that has the last failure."""
_REPORTS = re.compile(r"failure(\.node\d+|\.[^/]+-\d+-[0-9a-f]{8})?\.txt")

CONNECTION_ERRORS = ("torch.distributed.DistBackendError", "torch.distributed.DistNetworkError",
                     "torch.distributed.DistStoreError", "torch._C._distributed_c10d.DistBackendError",
                     "builtins.ConnectionError", "shoal.errors.CollectiveFailed", "shoal.errors.CollectiveTimeout",
                     "shoal.errors.StageFailed")
CONNECTION_ERROR_TEXTS = ("gloo/transport", "Connection closed by peer", "Connection reset by peer", "Broken pipe")
FINAL_ERRORS = ("shoal.errors.GuardError", "shoal.errors.VaultTooLarge", "shoal.resilience.elastic.WorldSizeError")
"""The errors after which no restart follows, and whose message says all; those of their subclasses ask for one."""
FINAL_FAMILIES = ("shoal.errors.ConfigError", "shoal.errors.NotServed")
"""The errors after which no restart follows, with all of their subclasses: a restart reads the same configuration."""
WIDTH = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """The end of one rank."""

    rank: int
    local_rank: int
    host: str
    pid: int
    status: int
    """Exit code, or minus the signal that killed the process."""
    time: float
    """Seconds since the epoch: the time of the exception, or when the launcher saw the exit."""
    stopped: bool = False
    """The launcher stopped this rank because another rank had failed."""
    summary: str = ""
    """`ValueError: text`, if it raised."""
    text: str = ""
    """The traceback of the exception, or of all threads at a fatal signal."""
    kinds: tuple[str, ...] = ()
    """The qualified names of the exception's classes."""

    @property
    def secondary(self) -> bool:
        """Whether this failure is a lost connection, caused by the death of a peer."""
        return (any(kind in CONNECTION_ERRORS for kind in self.kinds)
                or any(text in self.summary for text in CONNECTION_ERROR_TEXTS))

    @property
    def final(self) -> bool:
        """Whether a restart would come to the same failure."""
        return self.says_all or any(kind in FINAL_FAMILIES for kind in self.kinds)

    @property
    def says_all(self) -> bool:
        """Whether the message alone tells the cause: no line of the script is at fault."""
        return bool(self.kinds) and self.kinds[0] in FINAL_ERRORS

    @property
    def ending(self) -> str:
        """The exit code or signal, as text."""
        if self.status >= 0:
            return f"exit code {self.status}"
        return f"killed by {signal_name(-self.status)}"

    @property
    def headline(self) -> str:
        """The failure in one line, without the source location that gloo prefixes."""
        return re.sub(r"\[/\S*/gloo/\S*\] ", "", (self.summary or self.ending).splitlines()[0])


def signal_name(number: int) -> str:
    """Return `SIGKILL` for 9, and `signal N` for a number without a name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def status_code(status: int) -> int:
    """Return the exit code that shells report for `status`: 128 + n for signal n."""
    return status if status >= 0 else 128 - status


def reports(folder: Path) -> list[Path]:
    """Return the reports in a folder of logs: the last one, those of nodes started by hand, and of guardians."""
    return [path for path in folder.glob("failure*.txt") if _REPORTS.fullmatch(path.name)]


def is_written(path: str) -> bool:
    """Return whether the error file at `path` is there, whole, and has an error in torch's format."""
    return _record(Path(path)) is not None


def read(path: str, *, rank: int, local_rank: int, pid: int, status: int, time: float, stopped: bool) -> Failure:
    """Combine the exit that the launcher saw with the error file that the rank wrote at `path`."""
    record = _record(Path(path))
    if record is None:
        return Failure(rank=rank, local_rank=local_rank, host=socket.gethostname(), pid=pid, status=status,
                       time=time, stopped=stopped, text=_fault_traceback(Path(f"{path}.fault")) if status < 0 else "")
    summary, text, raised = record["message"]["message"], record["message"]["extraInfo"]["py_callstack"], record.get("time")
    raised = raised if isinstance(raised, float) else time
    return Failure(rank=rank, local_rank=local_rank, host=socket.gethostname(), pid=pid, status=status, time=raised,
                   stopped=stopped and raised >= time, summary=summary, text=text, kinds=tuple(record.get("kinds", ())))


def first(failures: Iterable[Failure]) -> Failure:
    """Return the failure that caused the others."""
    return min(failures, key=lambda failure: (failure.stopped, failure.secondary, failure.time, failure.rank))


def with_ended(failures: list[Failure], ended: Sequence[int]) -> list[Failure]:
    """Return the failures; where the first is a lost connection, its text names the ranks whose programs ended before."""
    if not failures or not ended or not (cause := first(failures)).secondary:
        return failures
    named = f"program of rank {ended[0]}" if len(ended) == 1 else f"programs of ranks {', '.join(map(str, ended))}"
    told = replace(cause, text=f"{cause.text.rstrip()}\nBefore, the {named} had ended without an error.".lstrip())
    return [told if each is cause else each for each in failures]


def describe(failures: Iterable[Failure], ranks: int, note: str = "") -> str:
    """Return the report: the rank that failed first, where and how, then one line for each other failed rank."""
    failures = sorted(failures, key=lambda failure: failure.rank)
    cause = first(failures)
    lines = [_truncate(f"---- rank {cause.rank} of {ranks} failed: {cause.headline} ").ljust(WIDTH, "-"),
             f"host {cause.host}, rank {cause.rank}, local rank {cause.local_rank}, pid {cause.pid}, "
             f"{cause.ending}"]
    if cause.says_all:
        lines.append(cause.summary)
    elif cause.text:
        lines.append(cause.text.rstrip())
    elif cause.status == -signal.SIGKILL and not cause.summary:  # one that the agent killed has its reason
        lines.append("SIGKILL often means that the machine ran out of memory; see the kernel log.")
    lines.extend(_secondary_line(failure) for failure in failures if failure is not cause and not failure.stopped)
    if note:
        lines.append(note)
    lines.append("-" * WIDTH)
    return "\n".join(lines)


def _secondary_line(failure: Failure) -> str:
    return _truncate(f"then rank {failure.rank} (host {failure.host}, pid {failure.pid}): {failure.headline}")


def _truncate(line: str) -> str:
    return line if len(line) <= WIDTH else f"{line[:WIDTH - 3]}..."


def _fault_traceback(path: Path) -> str:
    """Return the threads' tracebacks at a fatal signal, without frames of rank.py and the list of extension modules."""
    lines = _text(path).split("\nExtension modules:")[0].splitlines()
    return "\n".join(line for line in lines if f'"{rank_module.__file__}"' not in line)


def _record(path: Path) -> dict[str, Any] | None:
    """Return what an error file has: None where it is missing, half written, or of a program with another format."""
    with suppress(ValueError, KeyError, TypeError):
        record = json.loads(_text(path))
        message = record["message"]
        texts = message["message"], message["extraInfo"]["py_callstack"], *record.get("kinds", ())
        if all(isinstance(each, str) for each in texts):
            return record
    return None


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
