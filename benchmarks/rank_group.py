"""Ranks that stand and fall together: when one dies the others are ended, and what each of them said is shown."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LINES = 20  # of a rank's last words


class RankFailed(RuntimeError):
    """A rank ended badly or in no time; the message holds the last words of every rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rank:
    """A process, where it runs, and the files of its output; none where it writes to the terminal."""

    host: int
    process: subprocess.Popen[Any]
    output: Path | None = None
    errors: Path | None = None

    def results(self) -> list[dict[str, Any]]:
        """Return the JSON objects among the lines of its output."""
        found: list[dict[str, Any]] = []
        for line in self.output.read_text(errors="replace").splitlines() if self.output else ():
            if line.startswith("{"):
                try:
                    found.append(json.loads(line))
                except json.JSONDecodeError:
                    continue  # what a library prints is no result
        return found

    def last_words(self) -> str:
        """Return the end of what it said, indented."""
        lines: list[str] = []
        for file in (self.output, self.errors):
            lines += file.read_text(errors="replace").splitlines()[-LINES:] if file else ()
        return "\n".join(f"    {line}" for line in lines) or "    (it said nothing)"


def finish(ranks: Sequence[Rank], seconds: float) -> None:
    """Wait until all ranks have ended well. Raises `RankFailed` when one has not, or after `seconds`; then none lives."""
    deadline = time.monotonic() + seconds
    try:
        while True:
            ends = [rank.process.poll() for rank in ranks]
            if bad := [number for number, end in enumerate(ends) if end]:
                raise RankFailed(_report(ranks, f"rank {bad[0]} {_how(ends[bad[0]])}"))
            if all(end == 0 for end in ends):
                return
            if time.monotonic() > deadline:
                waiting = [number for number, end in enumerate(ends) if end is None]
                raise RankFailed(_report(ranks, f"ranks {waiting} did not end within {seconds:g} s"))
            time.sleep(0.01)
    finally:
        end(ranks)


def end(ranks: Sequence[Rank]) -> None:
    """Kill those that live."""
    for rank in ranks:
        rank.process.kill()
        rank.process.wait()


def _how(status: int | None) -> str:
    assert status is not None
    return f"was ended by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"


def _report(ranks: Sequence[Rank], what: str) -> str:
    said = [f"  rank {number} on host {rank.host}:\n{rank.last_words()}" for number, rank in enumerate(ranks) if rank.output]
    return "\n".join([what, *said])
