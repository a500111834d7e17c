"""A job on several hosts: this process starts Shoal's process on each, shows what ranks write, and ends all together.

Failures of all hosts are collected; once all have ended, the rank that failed first, by this machine's clock, is reported. A
host that fails ends the others. So does one that is lost, unless the job may go on with fewer (`--nodes A:B`). Where hosts
report that they do not reach each other, some of them count as lost (`reachability.py`). This process begins each attempt:
the first host that is left opens a store (`Serve`), and all are told where (`Begin`). If this process dies, the connections
close, and every host ends its ranks.
"""

from __future__ import annotations

import queue
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import FrameType

from shoal.cluster.hostfile import Host
from shoal.cluster.launchers import Launcher
from shoal.errors import LaunchError
from shoal.launch import facts, failure
from shoal.launch.console import Terminal, counted, numbered_ranks
from shoal.launch.facts import Facts
from shoal.launch.failure import Failure
from shoal.launch.job import ClusterJob
from shoal.launch.printing import print_status
from shoal.launch.protocol import (
    Beat,
    Begin,
    Channel,
    Down,
    Exited,
    Hello,
    HostProblem,
    Listening,
    Message,
    Output,
    Report,
    Serve,
    Signal,
    Status,
    Unreached,
)
from shoal.launch.reachability import LostLinks
from shoal.launch.start_errors import Banners, explain, host_of_step, means_failure, names
from shoal.launch.starting import Closed, Connected, Ended, ErrorLine, HostEvent, Starter

__all__ = ["Cluster", "Node", "run_job"]

BEAT = 1.0
"""Seconds between two beats."""
SILENT = 2.5
"""Beats after which a host that has sent none may be lost."""
PAUSE = 3.0
"""Seconds between two looks at the hosts after which this process was stopped."""
START = 120.0
"""Seconds within which hosts have to start."""
LAST = 20.0
"""Seconds beyond the grace period within which hosts have to end, once they were told to."""
AT_START = 3.0
"""Seconds within which hosts have to end where another one did not start: no rank runs yet."""
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(slots=True)
class Node:
    """One host of the job, as this process knows it."""

    host: Host
    channel: Channel | None = None
    facts: Facts | None = None
    offset: float = 0.0
    """Its clock minus this one, in seconds, as far as one message tells."""
    last_heard: float = 0.0
    """When its last message arrived, on the monotonic clock."""
    code: int | None = None
    """Exit code of its ranks, once they have ended."""
    lost: str = ""
    """Why it is lost; empty while it is not."""
    cut_short: bool = False
    """Whether the launcher may have ended it because another host did not start."""
    own_name: str = ""
    """The name under which it reports itself."""
    last_lines: deque[str] = field(default_factory=lambda: deque[str](maxlen=30))
    """The last lines of its error stream."""

    @property
    def name(self) -> str:
        """Its name in the hostfile, else the one that it reports."""
        return self.host.name or self.own_name or "a node"

    @property
    def has_ended(self) -> bool:
        """Whether its ranks have ended, or it is lost: no message of it is awaited."""
        return self.code is not None or bool(self.lost)


class Cluster:
    """The hosts of a job, as a context manager: entering it starts them, leaving it ends them."""

    def __init__(self, starter: Starter, job: ClusterJob, launcher: Launcher,
                 tell: Callable[[str], None] = print_status) -> None:
        """`tell` gets what the user must know."""
        self.job = job
        self.nodes = [Node(host) for host in job.hosts]
        self._starter = starter
        self._launcher = launcher
        self._tell = tell
        self._said: deque[str] = deque(maxlen=100)
        """The last messages of the process that started all hosts."""
        self._banners = Banners() if launcher.banners else None
        self._unnumbered: dict[str, str] = {}
        """Why hosts do not start that Slurm has chosen, by their names: which of the job's they are is not known."""
        self._ticked = time.monotonic()
        self._left = threading.Event()
        self._early: deque[tuple[Node, Message]] = deque()
        """Messages of hosts that came before all had started."""

    def __enter__(self) -> Cluster:
        try:
            self._starter.start(self.job)
            threading.Thread(target=self._send_beats, name="beats", daemon=True).start()
            self._await()
            self._starter.forget()
        except BaseException:
            self._leave(AT_START)
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self._leave(LAST)

    def _leave(self, seconds: float) -> None:
        """End the hosts, and wait so long for the launcher's process where any has started."""
        self._left.set()
        self.send(Signal(number=signal.SIGTERM))
        for node in self.nodes:
            if node.channel is not None:
                node.channel.close()
        started = any(node.facts is not None for node in self.nodes)
        self._starter.end(seconds if started else 0.0)

    @property
    def is_over(self) -> bool:
        """Whether all hosts have ended, and what they said has been received."""
        return not self._early and all(node.has_ended for node in self.nodes)

    def send(self, message: Down, nodes: Sequence[Node] | None = None) -> None:
        """Send a message to hosts that are not over."""
        for node in self.nodes if nodes is None else nodes:
            if node.channel is not None and not node.has_ended:
                node.channel.send(message)

    def receive(self) -> tuple[Node, Message] | None:
        """Return the next message of a host; None where none came for a while, or what came changed a host's state alone."""
        if self._early:
            return self._early.popleft()
        try:
            event = self._starter.events.get(timeout=BEAT / 2)
        except queue.Empty:
            event = None
        self._tick()
        if event is None:
            return None
        if event.node is None:
            self._take_shared(event)
            return None
        return self._take(self.nodes[event.node], event)

    def _take(self, node: Node, event: HostEvent) -> tuple[Node, Message] | None:
        if node.lost and not isinstance(event.message, ErrorLine):
            return None  # it was cut off, and ends when it hears that it is alone
        node.last_heard = time.monotonic()
        match event.message:
            case Connected(channel=channel):
                node.channel = channel
            case ErrorLine(text=text):
                node.last_lines.append(text)
                if node.facts is not None:
                    self._tell(f"[{node.name}] {text}")
            case Closed():
                self._lose(node)
            case Hello():
                node.own_name = event.message.host
                node.facts = Facts(**event.message.facts)
                node.offset = node.facts.clock - time.time()
            case Ended():
                raise AssertionError("only the process that starts all hosts ends")
            case message:
                if isinstance(message, Exited):
                    node.code = message.code
                return node, message
        return None

    def _take_shared(self, event: HostEvent) -> None:
        """Take a line, or the end, of the process that started all hosts."""
        match event.message:
            case ErrorLine(text=text):
                if all(node.facts is not None for node in self.nodes) and not all(node.has_ended for node in self.nodes):
                    self._tell(f"[{self._launcher.name}] {text}")
                self._take_complaint(text if self._banners is None else self._banners.take(text))
            case _:
                self._take_complaint("" if self._banners is None else self._banners.end())
                self._lose_unstarted()

    def _take_complaint(self, text: str) -> None:
        """Take a message of the process that started all hosts, and lose the host that it says does not start."""
        if not text:
            return
        self._said.append(text)
        for node in self.nodes:
            if node.facts is None and names(text, node.name) and means_failure(text):
                node.lost = node.lost or explain([text])  # mpiexec, srun and pdsh wait for the others
        chosen = any(not node.host.name for node in self.nodes)
        if chosen and (host := host_of_step(text)) and means_failure(text):
            self._unnumbered[host] = explain([text])

    def _lose_unstarted(self) -> None:
        """Lose the hosts that have not started when the launcher ends: for their own reasons, else for that of all."""
        self._lose_unnumbered()
        blamed = any(node.facts is None and node.lost for node in self.nodes)
        ended = f"{self._launcher.name} ended before it started"
        for node in self._awaited:
            node.cut_short = blamed  # what the launcher says of it is no failure, else it would be lost
            node.lost = ended if blamed else self._reason(node) or ended

    def _lose_unnumbered(self) -> None:
        """Lose as many hosts as Slurm chose and cannot start: any of those that are awaited, for none has a number yet."""
        for node, (name, reason) in zip(self._awaited, self._unnumbered.items(), strict=False):
            node.own_name, node.lost = name, reason

    def _lose(self, node: Node) -> None:
        if not node.has_ended:
            reason = self._reason(node)
            node.cut_short = node.facts is not None and not self._launcher.survives
            node.lost = ((reason or "the process there ended without output") if node.facts is None else
                         "the connection broke" + (f": {reason}" if reason else ""))

    def _reason(self, node: Node) -> str:
        """Return why a host is lost, by what it said, or by what the launcher said of it or at all."""
        return self._own_reason(node) or explain(self._said)

    def _own_reason(self, node: Node) -> str:
        """Return why a host is lost, by what it said, or by what the launcher said of it alone."""
        return explain(node.last_lines) or explain(line for line in self._said if names(line, node.name))

    def _send_beats(self) -> None:
        """Send beats in a thread of their own: the main one waits for disks, where it writes logs."""
        while not self._left.wait(BEAT):
            self.send(Beat())

    def _tick(self) -> None:
        """Lose the hosts that are silent; none was while this process did not look."""
        now = time.monotonic()
        paused, self._ticked = now - self._ticked > PAUSE, now
        for node in self.nodes:
            if paused:
                node.last_heard = now
            if node.facts is not None and not node.has_ended and now - node.last_heard > self.job.quiet:
                node.lost = f"no message from it for {self.job.quiet:g} s; it is down, stopped, or cut off"

    @property
    def _awaited(self) -> list[Node]:
        """The hosts that have neither started nor been lost."""
        return [node for node in self.nodes if node.facts is None and not node.lost]

    def _problems(self) -> list[str]:
        """Return a line for each reason why hosts do not start, with the names of the hosts, as far as they are known."""
        lost = [node for node in self.nodes if node.lost]
        names_of: dict[str, list[str]] = {}
        for node in [node for node in lost if not node.cut_short] or lost:
            names_of.setdefault(node.lost, []).append(node.name)
        return [f"{_listed(list(dict.fromkeys(names)))}: {reason}" for reason, names in names_of.items()]

    def _await(self) -> None:
        """Wait until every host runs, or can be done without. Raises `LaunchError` with one line for each that does not."""
        deadline = time.monotonic() + START
        early: list[tuple[Node, Message]] = []
        while len(self._awaited) > len(self._unnumbered):
            if (came := self.receive()) is not None:
                early.append(came)
            if time.monotonic() > deadline:
                for node in self.nodes:
                    if node.facts is None:
                        node.lost = node.lost or self._reason(node) or f"it did not start within {START:g} s"
        self._lose_unnumbered()
        self._early.extend(early)
        if self.job.plan is None:  # an examination tells what is wrong with each host
            return
        problems = self._problems()
        if problems and sum(not node.lost for node in self.nodes) >= self.job.least:
            for problem in problems:
                self._tell(f"shoal run: {problem}; the others begin without it")
            problems = []
        here = facts.gather(self.job.folder)
        for node in self.nodes:
            if node.facts is not None and not node.lost:
                problems.extend(facts.disagreements(node.name, node.facts, here))
                for fault in facts.faults(node.name, node.facts, offset=node.offset):
                    self._tell(f"shoal run: {fault}")
        if problems:
            raise LaunchError("\n".join(dict.fromkeys(problems)))


def _listed(names: Sequence[str]) -> str:
    """Return "a", "a and b", or "a, b and 6 more"."""
    shown = names if len(names) <= 3 else names[:2]
    more = [] if len(names) <= 3 else [f"{len(names) - 2} more"]
    *first, last = [*shown, *more]
    return f"{', '.join(first)} and {last}" if first else last


class _JobMonitor:
    """The events of a job so far, on hosts that have started."""

    def __init__(self, cluster: Cluster, terminal: Terminal, grace: float) -> None:
        self.cluster = cluster
        self.hosts = [number for number, node in enumerate(cluster.nodes) if not node.lost]
        """The numbers of the hosts that take part."""
        self._attempt = 0
        self._serving: int | None = None
        """The host that opens the store of the next attempt."""
        self._links = LostLinks()
        self.terminal = terminal
        self.grace = grace
        self.failures: list[Failure] = []
        self._pages: dict[str, str] = {}
        """The page of each host whose ranks failed last, by the name of the host."""
        self.problems: list[str] = []
        self.deadline = float("inf")
        """When hosts that have not ended are given up."""
        self.signals: queue.SimpleQueue[int] = queue.SimpleQueue()
        self.caught = 0
        """The first signal that this process got."""

    def begin_attempt(self) -> None:
        """Have the first host that takes part open the store of the next attempt; it begins when that is open.

        Where the ranks of a host have ended, it cannot take part, and the job ends.
        """
        nodes = [self.cluster.nodes[number] for number in self.hosts]
        if over := [node.name for node in nodes if node.code is not None]:
            if self._attempt:
                self.terminal.status(f"shoal run: no other attempt follows, for the ranks of {' and '.join(over)} have "
                                     "ended")
            self.end(signal.SIGTERM)
            return
        self._serving = self.hosts[0]
        self.cluster.send(Serve(), [self.cluster.nodes[self._serving]])

    def take(self, node: Node, message: Message) -> None:
        """Take a message of a host."""
        match message:
            case Output():
                self.terminal.output(message, node.name)
            case Status(text=text):
                self.terminal.status(f"[{node.name}] {text}")
            case HostProblem(text=text):
                self.problems.append(f"{node.name}: {text}")
                self.end(signal.SIGTERM)
            case Listening(port=port, addresses=addresses):
                self._attempt, self._serving = self._attempt + 1, None
                self.cluster.send(Begin(attempt=self._attempt, hosts=self.hosts, port=port, addresses=addresses),
                                  [self.cluster.nodes[number] for number in self.hosts])
            case Unreached(hosts=hosts):
                self._links.report(self.cluster.nodes.index(node), hosts)
            case Report():
                failures = [replace(each, host=node.name, time=each.time - node.offset) for each in message.read()]
                self._pages[node.name] = message.page
                if message.note:
                    self._report([failure.describe(failures, message.ranks, message.note)])
                    if message.attempt == self._attempt and self._serving is None:  # the first to tell of its end
                        self.begin_attempt()
                else:
                    self.failures += failures
                    self.end(signal.SIGTERM, ending=node)
            case _:
                pass

    def end(self, number: int, *, ending: Node | None = None) -> None:
        """Have the ranks of all hosts end, by one message; later calls send none. The host that is `ending` gets none."""
        if self.deadline == float("inf"):
            self.deadline = time.monotonic() + self.grace + LAST
            self.cluster.send(Signal(number=number), [node for node in self.cluster.nodes if node is not ending])

    def heed(self) -> None:
        """Pass on signals that this process got, and end a job of which a host is lost."""
        while not self.signals.empty():
            number = self.signals.get()
            self.caught = self.caught or number
            self.terminal.hurry()
            self.deadline = min(self.deadline, time.monotonic() + self.grace + LAST)
            self.cluster.send(Signal(number=number))
        self._leave_out_unreached()
        if lost := [number for number in self.hosts if self.cluster.nodes[number].lost]:
            self._lose(lost)
        if any(self.cluster.nodes[number].code for number in self.hosts):
            self.end(signal.SIGTERM)
        if time.monotonic() > self.deadline:
            for node in self.cluster.nodes:
                if not node.has_ended:
                    node.lost = "it did not end in time, and is left to end by itself"

    def _leave_out_unreached(self) -> None:
        """Lose the hosts that others, with which the job goes on, do not reach."""
        nodes, now = self.cluster.nodes, time.monotonic()
        living = [number for number in self.hosts if not nodes[number].has_ended]
        silent = [number for number in living if now - nodes[number].last_heard > SILENT * BEAT]
        for number, others in self._links.leave_out(living, silent).items():
            names = [nodes[other].name for other in others]
            nodes[number].lost = (f"host{'s' if names[1:] else ''} {' and '.join(names)} cannot reach host "
                                  f"{nodes[number].name}, though this machine reaches them; see to the network between them")
            if (channel := nodes[number].channel) is not None:
                channel.send(Signal(number=signal.SIGTERM))  # it is left out, and has not lost this process
                channel.close()

    def _lose(self, lost: list[int]) -> None:
        """Begin an attempt without hosts that are lost, if the job may go on; else end it."""
        nodes = self.cluster.nodes
        left = [number for number in self.hosts if number not in lost]
        goes_on = len(left) >= self.cluster.job.least and self.deadline == float("inf")
        if not goes_on:
            self.end(signal.SIGTERM)
            return
        for number in lost:
            self.terminal.status(f"{self._describe_loss(number)}; the job goes on with {counted(len(left), 'host')}")
            if (channel := nodes[number].channel) is not None:
                channel.close()
        self.hosts = left
        if self._serving is None or self._serving in lost:
            self.begin_attempt()

    def _describe_loss(self, number: int) -> str:
        slots = [len(self.cluster.nodes[each].host.slots) for each in self.hosts]
        place = self.hosts.index(number)
        node, first = self.cluster.nodes[number], sum(slots[:place])
        return f"shoal run: {node.name} is lost: {node.lost}; it ran {numbered_ranks(range(first, first + slots[place]))}"

    def _report(self, lines: Sequence[str]) -> None:
        """Show what failed, and leave it in the folder of logs."""
        for line in lines:
            self.terminal.status(line)
        if lines:
            self.terminal.leave_report("\n\n".join(["\n".join(lines), *filter(None, self._pages.values())]))
        self._pages.clear()

    def finish(self) -> int:
        """Report, and return the exit code of the job."""
        nodes = [self.cluster.nodes[number] for number in self.hosts]
        lines = [self._describe_loss(number) for number in self.hosts if self.cluster.nodes[number].lost]
        lines += [f"shoal run: {problem}" for problem in dict.fromkeys(self.problems)]
        if self.failures:
            lines.append(failure.describe(self.failures, sum(len(node.host.slots) for node in nodes)))
        self._report(lines)
        if self.caught:
            return 128 + self.caught
        if self.failures:
            return failure.status_code(failure.first(self.failures).status)
        if self.problems:
            return 2
        if any(node.lost for node in nodes):
            return 1
        return next((node.code for node in nodes if node.code), 0)


def run_job(cluster: Cluster, terminal: Terminal, grace: float) -> int:
    """Run the ranks of a job to their end; return 0, the exit code of the rank that failed first, or 128 + signal number."""
    with cluster:
        monitor = _JobMonitor(cluster, terminal, grace)
        with _signals_to(monitor.signals.put):
            monitor.begin_attempt()
            while not cluster.is_over:
                if (came := cluster.receive()) is not None:
                    monitor.take(*came)
                monitor.heed()
            return monitor.finish()


@contextmanager
def _signals_to(take: Callable[[int], None]) -> Generator[None]:
    """Give the signals that end a process to `take` meanwhile; those that are ignored stay so."""

    def handle(number: int, frame: FrameType | None) -> None:
        take(number)

    before = {number: signal.getsignal(number) for number in SIGNALS}
    try:
        for number, handler in before.items():
            if handler is not signal.SIG_IGN:
                signal.signal(number, handle)
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
