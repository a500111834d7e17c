"""The record of a running job that its agent keeps beside the pages of its ranks, for `shoal doctor`."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

__all__ = ["JobRecord", "read_record", "write_record"]

RECORD = "job.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRecord:
    """One attempt of a job, on one host."""

    job: str
    agent: int
    """The process of the agent."""
    attempt: int
    attempts: int
    began: float
    """Seconds since the epoch when the attempt began."""
    command: list[str]
    ranks: list[int]
    """The rank of each local rank."""
    pids: list[int]
    error_files: list[str]


def write_record(folder: str, record: JobRecord) -> None:
    """Write the record into the memory folder of the launch, in place of the one before.

    Raises OSError where there is no room for it; then there is no record, for that of another attempt has other processes.
    """
    path, draft = Path(folder, RECORD), Path(folder, f"{RECORD}.part")
    try:
        draft.write_text(json.dumps(asdict(record)))
        os.replace(draft, path)
    except OSError:
        for each in (draft, path):
            each.unlink(missing_ok=True)
        raise


def read_record(folder: Path) -> JobRecord | None:
    """Return the record in `folder`, None where there is none."""
    try:
        return JobRecord(**json.loads((folder / RECORD).read_text()))
    except (OSError, ValueError, TypeError):
        return None
