"""The spare of a node: one interpreter that has imported torch, from which ranks of the next attempt are forked.

Half of a restart is `import torch`. The spare is started like a rank, with the same command; instead of running the program
it waits for orders, and forks a rank in a few milliseconds for each. So the import costs its processor time once, while the
first ranks train, and ranks share the memory of what it imported. Forked ranks are children of the agent, as others are:
the agent is the subreaper of its descendants. The spare ends with the agent. Where it has died, ranks start as the first
ones did.
"""

from __future__ import annotations

import json
import os
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from typing import Any
from unittest.mock import patch

from torch.distributed.elastic.agent.server import local_elastic_agent
from torch.distributed.elastic.multiprocessing.api import PContext, SubprocessContext
from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

from shoal.launch.rank import SPARE
from shoal.recording.page import THREADS
from shoal.resilience.processes import process, processes

__all__ = ["Spare", "serves_here"]

_IMPORTS = 60.0
"""Seconds within which a spare must have imported torch and forked a rank."""
_POLL = 0.2
"""Seconds between looks at whether a spare that does not answer was stopped."""


def serves_here() -> bool:
    """Whether the system gives orphans to a subreaper, so that forked ranks are children of the agent."""
    return sys.platform == "linux"


class Spare:
    """The spare interpreter of one node."""

    def __init__(self, command: Sequence[str], tell: Callable[[str], None]) -> None:
        """Take the command of a rank; `tell` gets what the user must know."""
        self._command = tuple(command)
        self._tell = tell
        self._process: subprocess.Popen[bytes] | None = None
        self._orders: socket.socket | None = None
        self._threads: Mapping[int, int] = {}
        """Compute threads of the last attempt, by local rank."""

    @property
    def pids(self) -> set[int]:
        """The process of the spare, while it waits."""
        return set() if self._process is None else {self._process.pid}

    def prepare(self) -> None:
        """Start the spare, unless it waits already."""
        if self._process is not None:
            return
        self._orders, theirs = socket.socketpair()
        with theirs:
            variables = {**os.environ, SPARE: str(theirs.fileno()), "LOCAL_RANK": "0"}
            self._process = subprocess.Popen(self._command, env=variables, pass_fds=[theirs.fileno()],
                                             start_new_session=True)

    def fork(self, command: Sequence[str], variables: dict[str, str], stdout: str | None,
             stderr: str | None) -> subprocess.Popen[bytes] | None:
        """Return a rank that runs the program with `variables` as its environment; None where the spare does not answer.

        A path takes the place of a stream.
        """
        if self._process is None or self._orders is None:
            return None
        if threads := self._threads.get(int(variables["LOCAL_RANK"])):
            variables = {**variables, THREADS: str(threads)}
        order = json.dumps({"variables": variables, "stdout": stdout, "stderr": stderr})
        try:
            self._orders.settimeout(_IMPORTS)
            self._orders.sendall(f"{order}\n".encode())
            self._await(self._orders, self._process.pid)
            with self._orders.makefile("rb") as answers:
                return _ForkedRank(int(answers.readline()), command)
        except (OSError, ValueError) as error:
            why = str(error) if isinstance(error, TimeoutError) else "it has died"
            self._tell(f"shoal run: the spare interpreter of this node does not serve: {why}. Ranks start without it, and "
                       "import torch anew")
            self.close()
            return None

    @staticmethod
    def _await(orders: socket.socket, pid: int) -> None:
        """Wait for an answer. Raises `TimeoutError` where the spare was stopped, or takes too long."""
        deadline = time.monotonic() + _IMPORTS
        answer = select.poll()
        answer.register(orders, select.POLLIN)
        while not answer.poll(_POLL * 1000):
            if (facts := process(pid)) is not None and facts.state in "Tt":
                raise TimeoutError(f"process {pid} is stopped (state {facts.state}, as by SIGSTOP)")
            if time.monotonic() > deadline:
                raise TimeoutError(f"process {pid} has not answered for {_IMPORTS:g} s")

    def close(self) -> None:
        """Kill the spare."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
        if self._orders is not None:
            self._orders.close()
            self._orders = None

    @contextmanager
    def starting(self, threads: Mapping[int, int]) -> Generator[None]:
        """Have torch's agent fork ranks from the spare within the context; `threads` are those of the last attempt.

        A script may set OMP_NUM_THREADS before it imports torch, which the spare has done without that.
        """
        _reap_orphans(self.pids)
        self._threads = threads
        with patch.object(local_elastic_agent, "start_processes", self._start) if self._process else nullcontext():
            yield

    def _start(self, *, start_method: str, **given: Any) -> PContext:
        context = _SpareContext(self, **given)
        try:
            context.start()
        except Exception:
            context.close()
            raise
        return context


class _ForkedRank(subprocess.Popen[bytes]):
    """A child of this process that it has not started itself."""

    def __init__(self, pid: int, command: Sequence[str]) -> None:
        self.args, self.pid = command, pid
        self.stdin = self.stdout = self.stderr = None
        self.returncode: int | None = None
        self._child_created, self._waitpid_lock = True, threading.Lock()  # the state of a Popen that runs


class _SpareContext(SubprocessContext):
    """Torch's context of the ranks of a node, which are forked from a spare."""

    def __init__(self, spare: Spare, **given: Any) -> None:
        super().__init__(**given)
        self._spare = spare

    def _start(self) -> None:
        for local_rank in range(self.nprocs):
            self.subprocess_handlers[local_rank] = _SpareHandler(
                self._spare, entrypoint=str(self.entrypoint), args=self.args[local_rank], env=self.envs[local_rank],
                stdout=self.stdouts[local_rank], stderr=self.stderrs[local_rank], local_rank_id=local_rank,
                numa_options=None)


class _SpareHandler(SubprocessHandler):
    """Torch's handler of one rank, which is forked from the spare if that answers."""

    def __init__(self, spare: Spare, *, stdout: str | None, stderr: str | None, **given: Any) -> None:
        self._spare = spare
        self._paths = stdout or None, stderr or None
        super().__init__(stdout=stdout, stderr=stderr, **given)

    def _popen(self, args: tuple[str, ...], env: dict[str, str]) -> subprocess.Popen[Any]:
        return self._spare.fork(args, env, *self._paths) or super()._popen(args, env)


def _reap_orphans(waited: set[int]) -> None:
    """Let the kernel forget the processes of earlier ranks that have ended: a subreaper is their parent."""
    for pid, facts in processes().items():
        if facts.state == "Z" and facts.parent == os.getpid() and pid not in waited:
            with suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
