"""Start real launches and find the processes that they leave behind, without sleeps and fixed ports.

`execute` starts any command. `fork` starts `shoal` from a forkserver that has imported torch, which only saves the import
time: the launch is a separate process with its own ranks.
"""

from __future__ import annotations

import io
import multiprocessing
import os
import select
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing.reduction import DupFd
from pathlib import Path
from typing import TextIO

SECONDS = 300.0
TOKEN = "SHOAL_TEST_TOKEN"
RANK_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True, slots=True, kw_only=True)
class Launched:
    """A launch whose processes are identified by a variable in their environment."""

    pid: int
    out: TextIO
    err: TextIO
    token: str
    wait: Callable[[], int]

    def read(self, lines: int) -> list[str]:
        """Wait for the next `lines` lines of standard output."""
        return [self.out.readline().rstrip("\n") for _ in range(lines)]

    def end(self) -> tuple[int, str, str]:
        """Wait for the exit; return the exit code, the rest of standard output, and standard error."""
        out, err = self.out.read(), self.err.read()
        return self.wait(), out, err

    def family(self) -> list[int]:
        """Return every live process with the token in its environment."""
        word = f"{TOKEN}={self.token}".encode()
        pids: list[int] = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdecimal():
                try:
                    if word in (entry / "environ").read_bytes():  # empty for a zombie
                        pids.append(int(entry.name))
                except OSError:
                    continue
        return pids

    def wait_until_gone(self) -> None:
        """Wait until no process of the launch is left; fail with the command lines of those that remain."""
        deadline = time.monotonic() + SECONDS
        while family := self.family():
            assert time.monotonic() < deadline, f"still there: {[command_line(pid) for pid in family]}"
            for pid in family:
                wait(pid, deadline)

    def kill(self) -> None:
        """Kill and clean up all processes of the launch."""
        for pid in self.family():
            os.kill(pid, 9)
        self.wait()
        self.out.close()
        self.err.close()


def execute(*command: str, **variables: str) -> Launched:
    """Start a command in a new session."""
    token = uuid.uuid4().hex
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                               text=True, start_new_session=True, env=_environment(token, variables))
    assert process.stdout is not None
    assert process.stderr is not None
    return Launched(pid=process.pid, out=process.stdout, err=process.stderr, token=token, wait=process.wait)


def fork(*args: str, folder: str = ".", **variables: str) -> Launched:
    """Start `shoal` with `args` in `folder`, in a new session."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed", "shoal.testing"])
    token = uuid.uuid4().hex
    (out, out_end), (err, err_end) = os.pipe(), os.pipe()
    ends = _Ends(out=out_end, err=err_end)
    process = context.Process(target=_serve, args=(args, folder, _environment(token, variables), ends))
    process.start()
    os.close(out_end)
    os.close(err_end)
    assert process.pid is not None

    def wait() -> int:
        process.join(SECONDS)
        assert process.exitcode is not None, "the launch did not end"
        return process.exitcode

    return Launched(pid=process.pid, out=os.fdopen(out), err=os.fdopen(err), token=token, wait=wait)


@dataclass(frozen=True)
class _Ends:
    """Two file descriptors that can be sent to another process."""

    out: int
    err: int

    def __reduce__(self) -> tuple[type, tuple[object, object]]:
        return _Received, (DupFd(self.out), DupFd(self.err))


class _Received:
    def __init__(self, out: DupFd, err: DupFd) -> None:
        self.out, self.err = out.detach(), err.detach()


def _serve(args: tuple[str, ...], folder: str, variables: dict[str, str], ends: _Received) -> None:
    from shoal.launch.cli import main

    os.setsid()
    os.chdir(folder)
    for stream, end in ((1, ends.out), (2, ends.err)):
        os.dup2(end, stream)
        os.close(end)
    sys.stderr = io.TextIOWrapper(os.fdopen(2, "wb", buffering=0, closefd=False), write_through=True)
    os.environ.clear()
    os.environ.update(variables)
    sys.exit(main(args))


def _environment(token: str, variables: Mapping[str, str]) -> dict[str, str]:
    clean = {name: value for name, value in os.environ.items() if name not in RANK_VARIABLES}
    return {**clean, "OMP_NUM_THREADS": "1", TOKEN: token, **variables}


def command_line(pid: int) -> str:
    """Return the command line of process `pid`."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    except OSError:
        return f"(pid {pid}, has exited)"


def wait(pid: int, deadline: float) -> None:
    """Wait until process `pid` (any process, not only a child) has exited or `deadline` has passed."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        poll = select.poll()
        poll.register(handle, select.POLLIN)
        poll.poll(max(0.0, deadline - time.monotonic()) * 1000)
    finally:
        os.close(handle)
