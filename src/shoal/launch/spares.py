"""Spare interpreters: while ranks train, one process for each of them has imported torch and waits to take its place.

Half of a restart is `import torch`. A spare is started like a rank, with the same command, cores and threads; instead of
running the program it waits at a pipe for the environment of its attempt. It is a child of the agent, as a rank is, and
ends with it. A spare that has died is replaced by a process that starts as the first ones did.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Generator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from typing import Any
from unittest.mock import patch

from torch.distributed.elastic.agent.server import local_elastic_agent
from torch.distributed.elastic.multiprocessing.api import PContext, SubprocessContext
from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

from shoal.launch.rank import SPARE

__all__ = ["Spares"]


class Spare:
    """One waiting interpreter."""

    def __init__(self, command: Sequence[str], local_rank: int) -> None:
        reader, self._pipe = os.pipe()
        variables = {**os.environ, SPARE: str(reader), "LOCAL_RANK": str(local_rank)}
        self.process = subprocess.Popen(command, env=variables, pass_fds=[reader], start_new_session=True)
        os.close(reader)

    def begin(self, variables: dict[str, str], stdout: str | None, stderr: str | None) -> None:
        """Run the program with `variables` as the environment; a path takes the place of a stream."""
        text = json.dumps({"variables": variables, "stdout": stdout, "stderr": stderr}).encode()
        with suppress(BrokenPipeError), os.fdopen(self._pipe, "wb") as pipe:  # one that died now is a rank that fails
            pipe.write(text)

    def end(self) -> None:
        """Kill the process."""
        self.process.kill()
        self.process.wait()
        os.close(self._pipe)


class Spares:
    """The spares of the ranks of one node."""

    def __init__(self, command: Sequence[str], local_ranks: int) -> None:
        self._command = tuple(command)
        self._local_ranks = local_ranks
        self._waiting: dict[int, Spare] = {}

    @property
    def pids(self) -> set[int]:
        """The processes of the spares that wait."""
        return {spare.process.pid for spare in self._waiting.values()}

    def prepare(self) -> None:
        """Start a spare for each rank that has none."""
        for local_rank in range(self._local_ranks):
            if local_rank not in self._waiting:
                self._waiting[local_rank] = Spare(self._command, local_rank)

    def take(self, local_rank: int) -> Spare | None:
        """Return the spare of a rank, None where there is none or it has died."""
        spare = self._waiting.pop(local_rank, None)
        if spare is not None and spare.process.poll() is not None:
            spare.end()
            return None
        return spare

    def close(self) -> None:
        """Kill the spares that wait."""
        while self._waiting:
            self._waiting.popitem()[1].end()

    @contextmanager
    def starting(self) -> Generator[None]:
        """Have torch's agent start ranks from spares within the context."""
        with patch.object(local_elastic_agent, "start_processes", self._start) if self._waiting else nullcontext():
            yield

    def _start(self, *, start_method: str, **given: Any) -> PContext:
        context = _SpareContext(self, **given)
        try:
            context.start()
        except Exception:
            context.close()
            raise
        return context


class _SpareContext(SubprocessContext):
    """Torch's context of the ranks of a node, whose processes may be spares."""

    def __init__(self, spares: Spares, **given: Any) -> None:
        super().__init__(**given)
        self._spares = spares

    def _start(self) -> None:
        for local_rank in range(self.nprocs):
            self.subprocess_handlers[local_rank] = _SpareHandler(
                self._spares.take(local_rank), entrypoint=str(self.entrypoint), args=self.args[local_rank],
                env=self.envs[local_rank], stdout=self.stdouts[local_rank], stderr=self.stderrs[local_rank],
                local_rank_id=local_rank, numa_options=None)


class _SpareHandler(SubprocessHandler):
    """Torch's handler of one rank, which starts a spare if there is one."""

    def __init__(self, spare: Spare | None, *, stdout: str | None, stderr: str | None, **given: Any) -> None:
        self._spare = spare
        self._paths = stdout or None, stderr or None
        super().__init__(stdout=stdout, stderr=stderr, **given)

    def _popen(self, args: tuple[str, ...], env: dict[str, str]) -> subprocess.Popen[Any]:
        if self._spare is None:
            return super()._popen(args, env)
        self._spare.begin(env, *self._paths)
        return self._spare.process
