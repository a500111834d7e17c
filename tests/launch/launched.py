"""Start real launches and find what they leave behind, without a sleep and without a fixed port.

`execute` starts any command. `fork` starts `shoal` from a server that has imported torch already, which is all that it
saves: the launch is a process of its own, with ranks of its own.
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

SECONDS = 120.0
TOKEN = "SHOAL_TEST_TOKEN"
RANK_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True, slots=True, kw_only=True)
class Launched:
    """A process whose ranks, and all that they started, are known by a variable in their environment."""

    pid: int
    out: TextIO
    err: TextIO
    token: str
    wait: Callable[[], int]

    def read(self, lines: int) -> list[str]:
        """Wait for that many more lines of standard output."""
        return [self.out.readline().rstrip("\n") for _ in range(lines)]

    def end(self) -> tuple[int, str, str]:
        """Wait for the end; return exit code, the rest of standard output, and standard error."""
        out, err = self.out.read(), self.err.read()
        return self.wait(), out, err

    def family(self) -> list[int]:
        """Return every live process that carries the token."""
        word = f"{TOKEN}={self.token}".encode()
        found: list[int] = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdecimal():
                try:
                    if word in (entry / "environ").read_bytes():  # empty for a zombie
                        found.append(int(entry.name))
                except OSError:
                    continue
        return found

    def wait_until_gone(self) -> None:
        """Wait until nobody of the family is left; fail with their command lines if that does not happen."""
        deadline = time.monotonic() + SECONDS
        while family := self.family():
            assert time.monotonic() < deadline, f"still there: {[command_line(pid) for pid in family]}"
            for pid in family:
                wait(pid, deadline)

    def kill(self) -> None:
        """Clean up, also after a test that failed."""
        for pid in self.family():
            os.kill(pid, 9)
        self.wait()
        self.out.close()
        self.err.close()


def execute(*command: str, **variables: str) -> Launched:
    """Start a command, in a session of its own."""
    token = uuid.uuid4().hex
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                               text=True, start_new_session=True, env=_environment(token, variables))
    assert process.stdout is not None
    assert process.stderr is not None
    return Launched(pid=process.pid, out=process.stdout, err=process.stderr, token=token, wait=process.wait)


def fork(*args: str, folder: str = ".", **variables: str) -> Launched:
    """Start `shoal` with `args` in `folder`, in a session of its own."""
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
    """Two file descriptors that survive the way to another process."""

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
    """Return what process `pid` was started with."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    except OSError:
        return f"(pid {pid}, gone by now)"


def wait(pid: int, deadline: float) -> None:
    """Wait until process `pid`, which need not be a child, has ended or `deadline` has passed."""
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
