"""torch's elastic agent starts, watches and restarts the ranks of a node; this adds what it leaves out.

The first death is noted before anybody is stopped, so the report names the cause; stopping waits for the ranks, not for
their helpers, and lasts as long as the user allows; nothing is left behind between attempts or at the end.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import cast

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.api import LogsDest, LogsSpecs, SignalException
from torch.distributed.elastic.rendezvous import RendezvousError

from shoal.errors import LaunchError
from shoal.launch import cores, failure, rank
from shoal.launch.failure import Failure
from shoal.launch.orphans import sweep
from shoal.launch.rendezvous import OneNode, several_nodes
from shoal.launch.run import LaunchPlan, say

__all__ = ["Agent", "launch"]

WATCH = 0.05
"""Seconds between two looks at the ranks."""
STRAGGLERS = 5.0
"""Seconds that processes which ranks left behind get to end by themselves."""


def launch(plan: LaunchPlan, mark: str, folder: str) -> int:
    """Run the ranks of this node to their end and return the exit code that tells how it went."""
    if "LOGLEVEL" not in os.environ:
        logging.disable(logging.CRITICAL)  # torch's agent reports in its own way what is reported here
    ranks = plan.ranks or _default_ranks()
    shares = _shares(plan, ranks)
    order = rank.Order(parent=os.getpid(), kind=plan.kind,
                       cores=tuple(share.cores for share in shares) if all(share.cores for share in shares) else (),
                       threads=tuple(share.threads for share in shares))
    command = ("-P", rank.__file__, str(order), plan.target, *plan.args)
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = ",".join(_heeded())
    try:
        meeting = (OneNode(plan.job) if plan.rendezvous is None else
                   several_nodes(plan.rendezvous, plan.job, plan.nodes, plan.hosts_rendezvous))
        spec = WorkerSpec(role="rank", local_world_size=ranks, entrypoint=sys.executable, rdzv_handler=meeting,
                          args=tuple(word.replace("$", "$$") for word in command),  # torch substitutes ${local_rank}
                          max_restarts=plan.max_restarts, monitor_interval=WATCH)
        code = Agent(spec, Files(folder, plan.log_dir), plan, mark).code()
        meeting.shutdown()
        return code
    except SignalException as stop:
        return 128 + stop.sigval
    except RendezvousError as error:
        raise LaunchError(f"the nodes did not meet at {plan.rendezvous}: {error}") from error


class Files(LogsSpecs):
    """Where each rank of each attempt writes what ended it, and, if asked, what it prints."""

    def __init__(self, folder: str, log_dir: str | None) -> None:
        super().__init__(log_dir)
        self.folder = folder
        self.log_dir = log_dir
        self.last = LogsDest()

    @property
    def root_log_dir(self) -> str:
        """The folder of the files."""
        return self.folder

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Name the files of one attempt."""
        errors: dict[int, str] = {}
        outs, errs = dict.fromkeys(envs, ""), dict.fromkeys(envs, "")
        for local, env in envs.items():
            attempt = env["TORCHELASTIC_RESTART_COUNT"]
            errors[local] = env["TORCHELASTIC_ERROR_FILE"] = f"{self.folder}/rank{env['RANK']}.{attempt}.json"
            if self.log_dir is not None:
                Path(self.log_dir).mkdir(parents=True, exist_ok=True)
                stem = f"{self.log_dir}/rank{env['RANK']}" + (f".attempt{attempt}" if int(attempt) else "")
                outs[local], errs[local] = f"{stem}.out", f"{stem}.err"
        shown = self.log_dir is not None
        self.last = LogsDest(stdouts=outs, stderrs=errs, tee_stdouts=outs if shown else {},
                             tee_stderrs=errs if shown else {}, error_files=errors)
        return self.last


class Agent(LocalElasticAgent):
    """The elastic agent of one node, for one launch."""

    def __init__(self, spec: WorkerSpec, files: Files, plan: LaunchPlan, mark: str) -> None:
        super().__init__(spec, files, log_line_prefix_template="[rank ${rank}] " if plan.log_dir else None)
        self.plan = plan
        self.mark = mark
        self.files = files
        self.failures: list[Failure] = []
        self._grace = plan.grace
        """Seconds that ranks still get to finish when they are asked to end."""

    def code(self) -> int:
        """Run the ranks to their end and return 0, or the exit code of the rank that failed first."""
        self.run()
        return failure.status_code(failure.first(self.failures).status) if self.failures else 0

    def _monitor_workers(  # pyright: ignore[reportIncompatibleVariableOverride]  torch's decorator loses the signature
            self, worker_group: WorkerGroup) -> RunResult:
        deaths = {pid: status for pid in self._pids() if (status := peek(pid)) is not None}
        seen = time.time()
        if any(deaths.values()):
            self._stop(signal.SIGTERM, self.plan.grace)
        result = cast(RunResult, super()._monitor_workers(worker_group))  # pyright: ignore[reportCallIssue]  as above
        self.failures = self._failures(result, deaths, seen)
        if self.failures:
            self._report(worker_group.workers[0].world_size)
        return result

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 30) -> None:
        grace, self._grace = self._grace, 0.0  # for a second signal, wherever it interrupts this
        if alive := len(self._alive()):
            say(f"shoal run: {death_sig.name} goes to {_count(alive)}, with {grace:g} s to finish; "
                "a second signal kills at once")
        self._stop(death_sig, grace)
        super()._shutdown(death_sig)
        sweep(self.mark, STRAGGLERS)
        self._grace = self.plan.grace  # of the ranks that are started after these, if any are

    def _pids(self) -> list[int]:
        return [worker.id for worker in self._worker_group.workers if isinstance(worker.id, int)]

    def _alive(self) -> list[int]:
        return [pid for pid in self._pids() if peek(pid) is None]

    def _stop(self, number: signal.Signals, grace: float) -> None:
        """Ask the ranks to end, wait for them up to `grace` seconds, then kill those that stay."""
        deadline = time.monotonic() + grace
        for pid in self._alive():
            (os.killpg if self.plan.kind == "program" else os.kill)(pid, number)
        try:
            while self._alive() and time.monotonic() < deadline:
                time.sleep(0.01)
        finally:  # also when a second signal interrupts the wait
            for pid in self._alive():
                os.killpg(pid, signal.SIGKILL)

    def _failures(self, result: RunResult, deaths: Mapping[int, int], seen: float) -> list[Failure]:
        return [failure.read(self.files.last.error_files[fact.local_rank], rank=number, local_rank=fact.local_rank,
                             pid=fact.pid, status=fact.exitcode, time=seen,
                             stopped=fact.pid not in deaths and (bool(deaths) or fact.exitcode == -signal.SIGTERM))
                for number, fact in result.failures.items()]

    def _report(self, ranks: int) -> None:
        attempt = self.plan.max_restarts - self._remaining_restarts
        note = (f"starting all ranks again: attempt {attempt + 2} of {self.plan.max_restarts + 1}"
                if self._remaining_restarts > 0 else "")
        say(failure.describe(self.failures, ranks, note))


def peek(pid: int) -> int | None:
    """Return how child `pid` ended (its exit code, or minus a signal), or None; whoever waits for it still can."""
    try:
        fact = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:  # it ended, and was waited for
        return 0
    if fact is None:
        return None
    return fact.si_status if fact.si_code == os.CLD_EXITED else -fact.si_status


def _heeded() -> list[str]:
    """Name the signals that end a launch: those that whoever started it (nohup, a shell's `&`) did not have ignored."""
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
    return [number.name for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]


def _default_ranks() -> int:
    import torch

    gpus = torch.cuda.device_count()
    usable = len(cores.physical_cores(cores.usable()))
    ranks = gpus or max(1, usable // 2)
    say(f"shoal run: {_count(ranks)}, " + (f"one per GPU ({gpus})" if gpus else f"half of {usable} cores") +
        "; --ranks N chooses otherwise")
    return ranks


def _count(ranks: int) -> str:
    return "1 rank" if ranks == 1 else f"{ranks} ranks"


def _shares(plan: LaunchPlan, ranks: int) -> list[cores.CoreShare]:
    groups = cores.physical_cores(cores.usable())
    if ranks > len(groups):
        say(f"shoal run: {_count(ranks)} on {len(groups)} cores: none is bound, and each computes on one thread")
    shares = cores.shares(ranks, groups)
    return shares if plan.bind_cores else [cores.CoreShare(cores=(), threads=share.threads) for share in shares]
