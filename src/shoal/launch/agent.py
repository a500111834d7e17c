"""`Agent` extends torch's elastic agent, which starts, monitors and restarts the ranks of one node.

- The agent records which ranks have exited, or have written the error that ends them, before it stops the others, so that
  the report names the cause. It acts at the error, not only at the exit that follows.
- A stop waits for the ranks, not for their child processes, for at most the user's grace period.
- No process survives an attempt or the launch.
- Each attempt has its own rendezvous store, so that no attempt reads the addresses of an earlier attempt. On a single node
  the launcher serves the store; hosts of a hostfile meet as their launcher says (`meeting.py`); other nodes use torch's
  c10d rendezvous.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import threading
import time
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import cast

from torch.distributed import DistError, Store  # pyright: ignore[reportPrivateImportUsage]  documented as public
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.api import LogsDest, LogsSpecs, PContext, SignalException, SubprocessContext
from torch.distributed.elastic.rendezvous import RendezvousError, RendezvousHandler

from shoal.errors import LaunchError
from shoal.launch import cores, failure, rank
from shoal.launch.clocks import Clocks
from shoal.launch.console import Console, counted
from shoal.launch.doctor import last_page
from shoal.launch.failure import REPORT, Failure
from shoal.launch.heartbeats import Heartbeats
from shoal.launch.job_record import JobRecord, write_record
from shoal.launch.launch_plan import LaunchPlan
from shoal.launch.meeting import ClusterRendezvous
from shoal.launch.orphans import Guardian, exit_on_signals, memory_folder
from shoal.launch.printing import are_full
from shoal.launch.rendezvous import JOIN, SingleNodeRendezvous, describe, multi_node_rendezvous
from shoal.launch.spares import Spare, serves_here
from shoal.launch.streams import RankStreams
from shoal.launch.watching import Reaction, WatchedRank
from shoal.recording.page import PAGES

__all__ = ["Agent", "launch"]

_ENDED, _LEFT = "shoal/ended", "shoal/left"
"""The key of a node in the store of an attempt whose ranks have ended for good."""
MONITOR_INTERVAL = 0.05
"""Seconds between two checks of the ranks."""
ORPHAN_GRACE = 5.0
"""Seconds that orphaned child processes of ranks have to exit after SIGTERM, before SIGKILL."""
CAUSE = 1.0
"""Seconds to wait for the root cause while all errors so far are lost connections."""
EXIT_INTERVAL = 0.5
"""Seconds between two looks of a node whose ranks have ended well at those of the others."""
LEAVE = 5.0
"""Seconds that the node which serves the store waits until the others need it no more."""
EXIT_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
"""The signals that end a launch."""
MEETING = 5.0
"""Seconds at the rendezvous after which an agent says for what it waits."""
LAST_WORDS = 2.0
"""Seconds until an agent that ends at once ends without its last words being read."""


def launch(plan: LaunchPlan, guardian: Guardian, console: Console, cluster: ClusterRendezvous | None = None) -> int:
    """Run the ranks of this node to completion and return the exit code of the launch, whose `guardian` has been entered.

    `cluster` is the rendezvous of a host that a launcher started; otherwise the plan says where the nodes meet.
    """
    if "LOGLEVEL" not in os.environ:
        logging.disable(logging.CRITICAL)  # torch's agent would report the same failures again
    ranks = plan.ranks or _default_ranks(console)
    shares = _shares(plan, ranks, console)
    options = rank.RankOptions(parent=os.getpid(), kind=plan.kind,
                               cores=tuple(share.cores for share in shares) if all(share.cores for share in shares) else (),
                               threads=tuple(share.threads for share in shares), as_deepspeed=plan.as_deepspeed,
                               local_rank_argument=plan.local_rank_argument)
    command = ("-P", rank.__file__, str(options), plan.target, *plan.args)
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = ",".join(_exit_signals())
    files = RankFiles(guardian.folder, console)
    try:
        handler, serves = (cluster, False) if cluster is not None else _rendezvous(plan)
        spec = WorkerSpec(role="rank", local_world_size=ranks, entrypoint=sys.executable, rdzv_handler=handler,
                          args=tuple(word.replace("$", "$$") for word in command),  # torch substitutes ${local_rank}
                          max_restarts=plan.max_restarts, monitor_interval=MONITOR_INTERVAL)
        agent = Agent(spec, files, plan, guardian, console, cluster)
        code = agent.run_ranks()
        handler.shutdown()
        agent.leave(serves)
        return code
    except SignalException as stop:
        console.hurry()
        return 128 + stop.sigval
    except (RendezvousError, DistError) as error:
        raise LaunchError(f"--rendezvous: {describe(error, str(plan.rendezvous), plan.nodes[0])}") from error
    finally:
        files.close()
        exit_on_signals(EXIT_SIGNALS)  # again, in place of torch's handlers: the output may still wait for its reader


def _rendezvous(plan: LaunchPlan) -> tuple[RendezvousHandler, bool]:
    """Return where nodes meet, and whether this one serves the store of the others."""
    if plan.rendezvous is None:
        return SingleNodeRendezvous(plan.job, plan.port), False
    return multi_node_rendezvous(plan.rendezvous, plan.job, plan.nodes, plan.hosts_rendezvous)


class RankFiles(LogsSpecs):
    """The error file of each rank and attempt, and the pipes for its output where the console takes it."""

    def __init__(self, folder: str, console: Console) -> None:
        super().__init__(None)
        self.folder = folder
        self.streams = RankStreams(folder, console.output) if console.takes_output else None
        self.last = LogsDest()
        self._attempt = 0

    def begin_attempt(self, number: int) -> None:
        """Name the next files by this number, from 0; torch's count leaves out the restarts that other nodes asked for."""
        self._attempt = number

    @property
    def root_log_dir(self) -> str:
        """The folder of the files."""
        return self.folder

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Choose the file names of one attempt."""
        errors: dict[int, str] = {}
        outs, errs = dict.fromkeys(envs, ""), dict.fromkeys(envs, "")
        for local, env in envs.items():
            rank, attempt = int(env["RANK"]), self._attempt
            env["TORCHELASTIC_RESTART_COUNT"] = str(attempt)
            errors[local] = env["TORCHELASTIC_ERROR_FILE"] = f"{self.folder}/rank{rank}.{attempt}.json"
            if self.streams is not None:
                outs[local], errs[local] = (self.streams.open(rank, attempt, stream) for stream in ("out", "err"))
        self.last = LogsDest(stdouts=outs, stderrs=errs, tee_stdouts={}, tee_stderrs={}, error_files=errors)
        return self.last

    def close(self) -> None:
        """Wait for the last lines of the ranks."""
        if self.streams is not None:
            self.streams.close()


def close_own_ends(context: PContext | None) -> None:
    """Close this process's ends of the pipes of ranks that have ended: who reads them waits for the end of their output.

    torch closes those of the ranks that it ends itself.
    """
    for handler in context.subprocess_handlers.values() if isinstance(context, SubprocessContext) else ():
        for stream in (handler._stdout, handler._stderr):  # pyright: ignore[reportPrivateUsage]  no public name
            if stream is not None:
                stream.close()


class Agent(LocalElasticAgent):
    """The elastic agent of one node, for one launch."""

    def __init__(self, spec: WorkerSpec, files: RankFiles, plan: LaunchPlan, guardian: Guardian, console: Console,
                 cluster: ClusterRendezvous | None) -> None:
        """The launcher of a `cluster` says that a host is lost; agents without one hear it from each other's heartbeats."""
        super().__init__(spec, files)
        self._cluster = cluster
        self._sends_heartbeats = cluster is None and plan.watch != "off"
        self.plan = plan
        self.guardian = guardian
        self.files = files
        self.console = console
        self.failures: list[Failure] = []
        self._starts = 0
        """How often this agent has started its ranks."""
        self._grace = plan.grace
        self._is_stopping = False
        """Seconds that ranks have to finish after a signal; 0 once a stop has begun."""
        self._exits: dict[int, int] = {}
        """Exit codes, by process id, of the ranks of this attempt that ended before the others were stopped; 1 for those
        that have raised, and are about to end."""
        self._observed = 0.0
        self._lost_peer_since: float | None = None
        """When a rank was first seen to have raised because it lost another one, of which nothing is known yet."""
        memory = self._memory = memory_folder(guardian.mark)
        os.makedirs(memory, mode=0o700, exist_ok=True)
        automatic = "restart" if plan.max_restarts else "report"
        self._reaction = Reaction(memory, console, automatic if plan.watch == "auto" else plan.watch,
                                  whole_job=plan.nodes == (1, 1))
        os.environ[PAGES] = memory
        python = (sys.executable, *map(str, spec.args))
        self._heartbeats: Heartbeats | None = None
        """The heartbeats of the nodes of this attempt; None on a single node."""
        self._ended_with: list[int] = []
        """The nodes whose ranks have ended while this one waited for them, itself included."""
        self._ended_for: set[int | str] = set()
        """The lost nodes for which ranks of this attempt were ended, or that were reported."""
        self._spare = Spare(python, console.status) if plan.spares and plan.kind != "program" and serves_here() else None

    def run_ranks(self) -> int:
        """Run the ranks to completion and return 0, or the exit code of the rank that failed first."""
        try:
            self.run()
        finally:
            self._say_ended()
            self._end_heartbeats()
            close_own_ends(self._pcontext)
            if self._spare is not None:
                self._spare.close()
        return failure.status_code(failure.first(self.failures).status) if self.failures else 0

    def _exit_barrier(self) -> None:
        """Wait until the ranks of every node have ended, whichever way: this node may serve the store that theirs need.

        torch's own is reached only by nodes whose ranks end well, and waits for one that has failed until its timeout.
        """
        self._say_ended()
        store, end = cast(Store, self._worker_group.store), time.monotonic() + self._exit_barrier_timeout
        nodes = range(cast(int, self._worker_group.group_world_size))
        self._in_exit_barrier = True  # torch's health check asks for it
        try:
            while time.monotonic() < end:
                lost = {} if self._heartbeats is None else self._heartbeats.silent_for
                living = [node for node in nodes if node not in lost]
                if store.check([f"{_ENDED}/{node}" for node in living]):  # one message
                    self._ended_with = living
                    return
                time.sleep(EXIT_INTERVAL)
        except RuntimeError:  # the store has ended, and with it the node that served it
            return
        finally:
            self._in_exit_barrier = False

    def leave(self, serves: bool) -> None:
        """Say that this node needs the store no more; one that `serves` it waits until the others have said so.

        torch prints the stack of each call into a store that is gone.
        """
        if len(self._ended_with) < 2 or self._cluster is not None:
            return
        store, end = cast(Store, self._worker_group.store), time.monotonic() + LEAVE
        with suppress(RuntimeError):
            store.set(f"{_LEFT}/{self._worker_group.group_rank}", "")
            while serves and time.monotonic() < end and not store.check([f"{_LEFT}/{node}" for node in self._ended_with]):
                time.sleep(EXIT_INTERVAL / 10)

    def _say_ended(self) -> None:
        """Tell the other nodes that the ranks of this one have ended, and do not start again."""
        if self._worker_group.store is not None:
            with suppress(RuntimeError):
                cast(Store, self._worker_group.store).set(f"{_ENDED}/{self._worker_group.group_rank}", "")

    def _monitor_workers(  # pyright: ignore[reportIncompatibleVariableOverride]  torch's decorator hides the signature
            self, worker_group: WorkerGroup) -> RunResult:
        self._watch()
        self._watch_nodes()
        self._observe()
        ended = self._ended_programs()  # before others end because they are told to
        if any(self._exits.values()):
            self._stop(signal.SIGTERM, self.plan.grace)
        result = cast(RunResult, super()._monitor_workers(worker_group))  # pyright: ignore[reportCallIssue]  as above
        self.failures = failure.with_ended([self._failure(number, fact.local_rank, fact.pid, fact.exitcode)
                                            for number, fact in result.failures.items()], ended)
        if self.failures and failure.first(self.failures).final:
            self._remaining_restarts = 0
        self._report()
        return result

    def _rendezvous(  # pyright: ignore[reportIncompatibleVariableOverride]  torch's decorator hides the signature
            self, worker_group: WorkerGroup) -> None:
        waits = threading.Timer(MEETING, self.console.status, [
            f"shoal run: {socket.gethostname()} waits at {self.plan.rendezvous} for {counted(self.plan.nodes[0], 'node')}, "
            f"at most {JOIN} s"])
        waits.daemon = True
        if self._cluster is None and self.plan.rendezvous is not None:
            waits.start()
        try:
            while True:
                try:
                    return super()._rendezvous(worker_group)  # pyright: ignore[reportCallIssue]  as above
                except DistError:  # the store has ended: a launcher then begins another attempt, without its host
                    if self._cluster is None:
                        raise
        finally:
            waits.cancel()

    def _start_workers(  # pyright: ignore[reportIncompatibleVariableOverride]  torch's decorator hides the signature
            self, worker_group: WorkerGroup) -> dict[int, int]:
        self._starts += 1
        self.files.begin_attempt((self._starts if self._cluster is None else self._cluster.attempt) - 1)
        self._reaction.begin_attempt(worker_group.workers[0].world_size)
        self._end_heartbeats()
        close_own_ends(self._pcontext)
        nodes = cast(int, worker_group.group_world_size)
        if nodes > 1 and self._sends_heartbeats:
            node = cast(int, worker_group.group_rank)
            self._heartbeats = Heartbeats(cast(Store, worker_group.store), node, nodes, self._leave_cut_off,
                                          clocks=Clocks(node, nodes, self.console.status))
        with nullcontext() if self._spare is None else self._spare.starting(self._reaction.threads):
            pids = cast("dict[int, int]", super()._start_workers(worker_group))  # pyright: ignore[reportCallIssue]  as above
        record = JobRecord(
            job=self.plan.job, agent=os.getpid(), attempt=self._attempt, attempts=self.plan.max_restarts + 1,
            began=time.time(), command=[self.plan.target, *self.plan.args], pids=[pids[each] for each in sorted(pids)],
            ranks=[worker.global_rank for worker in worker_group.workers],
            error_files=[self.files.last.error_files[each] for each in sorted(pids)])
        try:
            write_record(self._memory, record)
        except OSError as error:
            self.console.status(f"shoal run: {socket.gethostname()}: the record of this attempt cannot be written in "
                                f"{self._memory}: {error.strerror}. The job goes on, and `shoal doctor` does not find it; "
                                f"make room in {os.path.dirname(self._memory)}")
        return pids

    def _restart_workers(  # pyright: ignore[reportIncompatibleVariableOverride]  torch's decorator hides the signature
            self, worker_group: WorkerGroup) -> None:
        if not self.failures and self._cluster is None:  # of others the report, or the launcher, tells
            self.console.status("shoal run: a node has come, or starts its ranks again: so do all others")
        super()._restart_workers(worker_group)  # pyright: ignore[reportCallIssue]  as above

    @property
    def _attempt(self) -> int:
        return self.plan.max_restarts - self._remaining_restarts

    def _watch(self) -> None:
        """Look for ranks that are stopped or hung, and start the spare once the ranks train."""
        workers = self._worker_group.workers
        self._reaction.poll(self._watched(), held_up=not self.console.takes_output and are_full())
        if self._spare is not None and self._remaining_restarts > 0 and not self._spare.pids and (
                self._reaction.trained(len(workers))):
            self._spare.prepare()

    def _watched(self) -> dict[int, WatchedRank]:
        """Return the ranks of this node by local rank."""
        return {worker.local_rank: WatchedRank(rank=worker.global_rank, pid=worker.id,
                                               error_file=self.files.last.error_files[worker.local_rank])
                for worker in self._worker_group.workers if isinstance(worker.id, int)}

    def _watch_nodes(self) -> None:
        """Look for nodes that are lost: their ranks answer no message, so the attempt ends."""
        if self._cluster is not None and (name := self._cluster.lost) and name not in self._ended_for:
            self._ended_for.add(name)
            for watched in self._watched().values() if self._reaction.restarts else ():
                self._reaction.end(watched, f"ended because {name} is lost")
        if self._heartbeats is None:
            return
        lost = {node: seconds for node, seconds in self._heartbeats.silent_for.items() if node not in self._ended_for}
        if not lost:
            return
        self._ended_for |= lost.keys()
        named = " and ".join(f"node {node} has sent no heartbeat for {seconds:.0f} s" for node, seconds in lost.items())
        if self._reaction.restarts:
            for watched in self._watched().values():
                self._reaction.end(watched, f"ended because {named}")
        else:
            self.console.status(f"shoal run: {named}; ranks that wait for it are not ended, because --watch does not")

    def _leave_cut_off(self, seconds: float) -> None:
        """End this agent, and by that its ranks, where the other nodes have gone on without it."""
        text = f"shoal run: {socket.gethostname()} has not reached the job's store for {seconds:.0f} s"
        if not self._reaction.restarts:
            self.console.status(f"{text}; its ranks are not ended, because --watch does not")
            return
        self.console.status(f"{text}: it is cut off, or the host of the store is lost. Its ranks end; to have it join "
                            "again, start it anew; where that host is lost, start all nodes anew")
        self.console.wait(LAST_WORDS)
        os._exit(1)  # the main thread may wait for the store; the kernel and the guardian end the ranks

    def _end_heartbeats(self) -> None:
        if self._heartbeats is not None:
            self._heartbeats.end()
        self._heartbeats, self._ended_for = None, set()

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 30) -> None:
        grace, self._grace = self._grace, 0.0  # a second signal may interrupt this at any point
        again, self._is_stopping = self._is_stopping, True  # then what the first one has ended is no failure
        if not (self.failures or again):  # a signal came before a failure was reported
            self._observe()
            self.failures = [self._failure(worker.global_rank, worker.local_rank, worker.id, self._exits[worker.id])
                             for worker in self._worker_group.workers
                             if isinstance(worker.id, int) and self._exits.get(worker.id)]
            self._report()
        if (alive := len(self._alive())) and not again:
            self.console.status(f"shoal run: sending {death_sig.name} to {counted(alive, 'rank')}; {grace:g} s are left to "
                                "finish, and a second signal kills at once")
        self._stop(death_sig, grace)
        super()._shutdown(death_sig)
        self.guardian.sweep(ORPHAN_GRACE, set() if self._spare is None else self._spare.pids)
        self._grace, self._exits = self.plan.grace, {}  # for the ranks of the next attempt, if there is one
        self._is_stopping = False
        self._lost_peer_since = None

    def _observe(self) -> None:
        """Note which ranks have ended or raised, once one of them has failed."""
        if any(self._exits.values()):
            return
        self._observed = time.time()
        raised = self._raised()
        exits = {pid: status for pid in self._pids() if (status := exit_status(pid)) is not None}
        if raised and all(raised.values()) and not any(status for pid, status in exits.items() if pid not in raised):
            self._lost_peer_since = self._lost_peer_since or time.monotonic()
            if time.monotonic() - self._lost_peer_since < CAUSE:
                return
        self._exits = {**dict.fromkeys(raised, 1), **exits}

    def _raised(self) -> dict[int, bool]:
        """Return the ranks whose error is written, by process id, and whether it is only that of a lost peer."""
        files = {worker.id: self.files.last.error_files[worker.local_rank] for worker in self._worker_group.workers
                 if isinstance(worker.id, int)}
        return {pid: failure.read(path, rank=0, local_rank=0, pid=pid, status=1, time=0.0, stopped=False).secondary
                for pid, path in files.items() if failure.is_written(path)}

    def _ended_programs(self) -> list[int]:
        """Return the ranks whose programs have ended without an error when another rank is found to have failed."""
        statuses = {pid: exit_status(pid) for pid in self._pids()}
        if not any((*statuses.values(), *self._exits.values())):
            return []
        return [watched.rank for local_rank, watched in self._watched().items() if statuses[watched.pid] == 0
                or (statuses[watched.pid] is None and self._reaction.has_left(local_rank, watched))]

    def _pids(self) -> list[int]:
        return [worker.id for worker in self._worker_group.workers if isinstance(worker.id, int)]

    def _alive(self) -> list[int]:
        return [pid for pid in self._pids() if exit_status(pid) is None]

    def _stop(self, number: signal.Signals, grace: float) -> None:
        """Signal the ranks that do not end by themselves, wait up to `grace` seconds for all, and kill those left."""
        deadline = time.monotonic() + grace
        for pid in set(self._alive()) - self._exits.keys():
            (os.killpg if self.plan.kind == "program" else os.kill)(pid, number)
            os.kill(pid, signal.SIGCONT)  # a stopped process takes the signal only when it goes on
        try:
            while self._alive() and time.monotonic() < deadline:
                time.sleep(0.01)
        finally:  # also if a second signal interrupts the wait
            for pid in self._alive():
                os.killpg(pid, signal.SIGKILL)

    def _failure(self, rank: int, local_rank: int, pid: int, status: int) -> Failure:
        stopped = pid not in self._exits and (bool(self._exits) or status == -signal.SIGTERM)
        return failure.read(self.files.last.error_files[local_rank], rank=rank, local_rank=local_rank, pid=pid,
                            status=status, time=self._observed, stopped=stopped)

    def _report(self) -> None:
        if self.failures:
            note = (f"restarting all ranks: attempt {self._attempt + 2} of {self.plan.max_restarts + 1}"
                    if self._remaining_restarts > 0 else "")
            ranks = self._worker_group.workers[0].world_size
            page = "" if self.plan.log_dir is None else last_page(Path(self._memory))
            self.console.report(self.failures, ranks, note, page)
            if self.plan.log_dir is not None and self._cluster is None:
                node = self._worker_group.group_rank
                path = Path(self.plan.log_dir, REPORT if self.plan.nodes == (1, 1) else f"failure.node{node}.txt")
                try:
                    path.write_text(f"{failure.describe(self.failures, ranks, note)}\n\n{page}\n", encoding="utf-8",
                                    errors="backslashreplace")
                except OSError as error:
                    self.console.status(f"shoal run: {path} cannot be written: {error.strerror}")


def exit_status(pid: int) -> int | None:
    """Return the exit code of child `pid`, minus the signal that killed it, or None if it runs. Does not reap it.

    A child that torch's agent has reaped counts as 0: the agent reports its failure itself.
    """
    try:
        fact = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return 0
    if fact is None:
        return None
    return fact.si_status if fact.si_code == os.CLD_EXITED else -fact.si_status


def _exit_signals() -> list[str]:
    """Return the signals that end a launch, without those that the parent (nohup, a shell's `&`) has set to ignored."""
    return [number.name for number in EXIT_SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]


def _default_ranks(console: Console) -> int:
    from shoal.device import device_count

    gpus = device_count()
    usable = len(cores.physical_cores(cores.usable()))
    ranks = gpus or max(1, usable // 2)
    basis = f"one per GPU ({gpus})" if gpus else f"half of {counted(usable, 'core')}"
    console.status(f"shoal run: {counted(ranks, 'rank')}, {basis}; set --ranks N to change it")
    return ranks


def _shares(plan: LaunchPlan, ranks: int, console: Console) -> list[cores.CoreShare]:
    groups = cores.physical_cores(plan.core_list or cores.usable())
    if ranks > len(groups):
        console.status(f"shoal run: {counted(ranks, 'rank')} on {counted(len(groups), 'core')}: ranks are not bound to "
                       "cores, and each uses one thread")
    shares = cores.shares(ranks, groups, cores.gpu_nodes(ranks, os.environ.get("CUDA_VISIBLE_DEVICES")))
    return shares if plan.bind_cores else [cores.CoreShare(cores=(), threads=share.threads) for share in shares]
