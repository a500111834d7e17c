"""`shoal doctor` shows in one page what a job on this host does, or died of: phases, waits, stacks, memory, disk, versions.

It reads the pages of the ranks and /proc. Only for stacks it asks a rank: by py-spy where that is installed, else by the
signal at which `rank.py` dumps them, which a script does not notice. Of a job that has ended it shows the report that the
agent left in the folder of its logs (`shoal run --log-dir`), or the guardian of an agent that was killed.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
import shlex
import shutil
import socket
import time
from contextlib import suppress
from pathlib import Path

from shoal.config.sizes import format_bytes
from shoal.errors import UsageError
from shoal.launch.failure import REPORT, reports
from shoal.launch.job_record import JobRecord, read_record
from shoal.launch.orphans import is_abandoned, memory_folder
from shoal.launch.watching import stacks
from shoal.recording.page import Reading, read
from shoal.resilience.processes import Process, process
from shoal.version import __version__

__all__ = ["add_arguments", "jobs", "last_page", "leave_page", "main", "page_of"]

_PID_DIGITS = 20
"""No number of a process has as many."""
VAULT = "vault*/*"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `shoal doctor`."""
    parser.add_argument("target", nargs="?", metavar="JOB|PID|FOLDER",
                        help="the name of a job, the process of its agent or of a rank, or the folder of its logs (write "
                             "./NAME where a job has that name too); default: the only job on this host")
    parser.add_argument("--stacks", action=argparse.BooleanOptionalAction, default=True, help="show the stacks of the ranks")


def main(args: argparse.Namespace) -> int:
    """Print the page; return 0. Raises `UsageError` where there is no such job, with those that there are."""
    found = _matching(args.target)
    if not found and args.target and os.path.isdir(args.target):
        print(_report(Path(args.target)))
        return 0
    folder, record = _only(args.target, found)
    try:
        page = page_of(folder, record, with_stacks=args.stacks)
    except FileNotFoundError:
        raise UsageError(f"the job {record.job} has ended meanwhile; give the folder of its logs (shoal run --log-dir)"
                         ) from None
    print(page, flush=True)
    from shoal.nn.probe import recorded  # here: it loads torch's compiler, which agents, who import this file, do without

    for line in recorded():
        print(f"kernels.linear 'auto': {line}")
    return 0


def jobs() -> dict[Path, JobRecord]:
    """Return the jobs on this host, by the folder of their pages."""
    root = Path(memory_folder("")).parent
    found = {folder: read_record(folder) for folder in sorted(root.glob("shoal-*")) if not is_abandoned(folder)}
    return {folder: record for folder, record in found.items() if record is not None}


def last_page(folder: Path) -> str:
    """Return the page without stacks of an attempt that ends; empty where its record or the working folder is gone."""
    record = read_record(folder)
    with suppress(OSError):
        return "" if record is None else page_of(folder, record, with_stacks=False)
    return ""


def leave_page(log_dir: str, mark: str, cause: str) -> None:
    """Write the page of the launch `mark`, with what ended it, into the folder of its logs; nothing if there is none here.

    A report that is there already stays.
    """
    text = f"---- {cause}\n\n{last_page(Path(memory_folder(mark)))}\n"
    with suppress(OSError):
        Path(log_dir, f"failure.{mark}.txt").write_text(text, encoding="utf-8", errors="backslashreplace")


def page_of(folder: Path, record: JobRecord, *, with_stacks: bool) -> str:
    """Return the page of a job whose pages lie in `folder`."""
    lines = [f"job {record.job}, attempt {record.attempt + 1} of {record.attempts}, for {time.time() - record.began:.0f} s; "
             f"agent {record.agent} {'runs' if process(record.agent) else 'has ended'}",
             f"command: {shlex.join(record.command)}", *_machine(folder), ""]
    readings = [read(str(folder / f"rank{local_rank}")) for local_rank in range(len(record.pids))]
    lines += [f"{'rank':>4} {'pid':>8} {'state':<8} {'steps':>8} {'last call':<12} {'ago':>8} {'cpu s':>8} {'memory':>9}  "
              "waits for"]
    for rank, pid, reading in zip(record.ranks, record.pids, readings, strict=True):
        lines.append(_row(rank, pid, reading, process(pid)))
    for rank, reading in zip(record.ranks, readings, strict=True):
        if reading is not None and reading.trail:
            lines.append(f"rank {rank} waited lately for: {'; '.join(sorted(set(reading.trail)))}")
    if copies := [path for path in folder.glob(VAULT) if path.is_dir() and not path.name.startswith(".")]:
        copies.sort(key=lambda path: (path.parent, len(path.name), path.name))  # step8 before step10
        lines.append("copies in memory: " + ", ".join(f"{path.name} ({format_bytes(_bytes(path))})" for path in copies))
    for rank, pid, error_file in zip(record.ranks, record.pids, record.error_files, strict=True) if with_stacks else ():
        facts = process(pid)
        if facts is not None and facts.state != "Z":
            text = stacks(pid, error_file, stopped=facts.state == "T")
            lines += ["", f"stacks of rank {rank}:", text.rstrip() or "none: the process is stopped, or does not answer"]
    return "\n".join(lines)


def _machine(folder: Path) -> list[str]:
    memory = _meminfo()
    left, whole = (format_bytes(1024 * memory.get(name, 0)) for name in ("MemAvailable", "MemTotal"))
    shared, disk = (format_bytes(shutil.disk_usage(place).free) for place in (folder, "."))
    return [f"host {socket.gethostname()}: memory {left} of {whole} available, {shared} free in {folder.parent}, {disk} in "
            f"{os.getcwd()}; load {os.getloadavg()[0]:.1f} on {os.cpu_count()} processors",
            f"Python {platform.python_version()}, torch {importlib.metadata.version('torch')}, Shoal {__version__}"]


def _row(rank: int, pid: int, reading: Reading | None, facts: Process | None) -> str:
    states = {"R": "runs", "S": "sleeps", "D": "disk", "T": "stopped", "t": "traced", "Z": "ended"}
    state = "ended" if facts is None else states.get(facts.state, facts.state)
    cpu, resident = (0.0, "") if facts is None else (facts.cpu, format_bytes(_resident(pid)))
    call, since, steps, waits = "(no engine)", "", "", ""
    if reading is not None:
        call, steps = reading.phase.name.lower().replace("_", " "), str(reading.steps)
        since = f"{time.monotonic() - reading.since:.1f} s"
        waits = f"{reading.waits_for}, {time.monotonic() - reading.waits_since:.1f} s" if reading.waits else ""
    return f"{rank:>4} {pid:>8} {state:<8} {steps:>8} {call:<12} {since:>8} {cpu:>8.1f} {resident:>9}  {waits}".rstrip()


def _resident(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def _meminfo() -> dict[str, int]:
    """Return the system's memory in KiB."""
    try:
        return {line.split(":")[0]: int(line.split()[1]) for line in Path("/proc/meminfo").read_text().splitlines()}
    except OSError:
        return {}


def _bytes(folder: Path) -> int:
    """Return the bytes of a folder's files, without those that the job removes meanwhile."""
    total = 0
    with suppress(FileNotFoundError):
        for path in folder.iterdir():
            with suppress(FileNotFoundError):
                total += path.stat().st_size
    return total


def _report(folder: Path) -> str:
    """Return the reports of a job that has ended, the earliest first. Raises `UsageError` where the folder has none."""
    found = sorted(reports(folder), key=os.path.getmtime)  # the cause is likely to be the first
    if not found:
        raise UsageError(f"{folder}: has no {REPORT}: the job with these logs runs still, has ended well or by a signal, or "
                         "its launcher was killed together with its guardian; give the name or a process of a job that "
                         f"runs: {_known()}")
    try:
        return "\n".join(report.read_text(encoding="utf-8", errors="replace") for report in found)
    except OSError as error:
        raise UsageError(f"{error.filename}: cannot be read: {error.strerror}; give the folder of a job's logs") from None


def _matching(target: str | None) -> list[tuple[Path, JobRecord]]:
    """Return the jobs on this host that a name or a process means; None: all."""
    pid = int(target) if target is not None and target.isdecimal() and len(target) < _PID_DIGITS else None
    return [(folder, record) for folder, record in jobs().items()
            if target in (None, record.job, folder.name) or pid in (record.agent, *record.pids)]


def _only(target: str | None, found: list[tuple[Path, JobRecord]]) -> tuple[Path, JobRecord]:
    """Return the one job that `target` means. Raises `UsageError` where that is none or several."""
    match found:
        case [one]:
            return one
        case []:
            wanted = "no job" if target is None else f"no job, process or folder {target!r}"
            raise UsageError(f"{wanted} on {socket.gethostname()}: {_known()}; of a job that has ended, give the folder of "
                             f"its logs (shoal run --log-dir)")
        case _:
            raise UsageError(f"{len(found)} jobs fit; give the process of an agent: "
                             f"{', '.join(str(record.agent) for _, record in found)}")


def _known() -> str:
    names = [f"{record.job} (agent {record.agent})" for record in jobs().values()]
    return f"there are {', '.join(names)}" if names else "none runs here under `shoal run`"
