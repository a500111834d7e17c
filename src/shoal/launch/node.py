"""Shoal's process on one host of a job: it runs the ranks of the host, and ends them when the launcher is gone.

The launcher is gone when the connection closes, or when nothing has come for `ClusterJob.quiet` seconds. Then the ranks get
SIGTERM, as after Ctrl-C; if the agent does not end them within its grace period, this process kills itself, and the guardian
kills what it had started. The exit code of the ranks travels in a message, and the process itself ends with 0: a launcher
of MPI would otherwise kill the other hosts before they could tell what they know.
"""

from __future__ import annotations

import os
import queue
import secrets
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from dataclasses import asdict, replace
from functools import partial
from typing import TYPE_CHECKING, BinaryIO, cast

from shoal.errors import LaunchError
from shoal.launch import facts, measuring
from shoal.launch.addresses import connect, own_addresses
from shoal.launch.console import Remote
from shoal.launch.cores import restrict
from shoal.launch.job import ClusterJob
from shoal.launch.launch_plan import LaunchPlan, check_target, page_of_killed
from shoal.launch.links import HostLinks
from shoal.launch.orphans import LAST_PAGE, MARK, Guardian, call_within, exit_on_signals, memory_folder, signals_held
from shoal.launch.outbox import Outbox
from shoal.launch.protocol import (
    AskTime,
    Beat,
    Begin,
    Channel,
    Exited,
    Hello,
    HostProblem,
    Listen,
    Listening,
    Measure,
    Measured,
    Serve,
    Signal,
    Status,
    Time,
    answer,
)

if TYPE_CHECKING:
    from shoal.launch.meeting import ClusterRendezvous

__all__ = ["main"]

BEAT = 1.0
"""Seconds between two beats."""
PAUSE = 3.0
"""Seconds between two looks after which this process was stopped; the launcher may have been too."""
CONNECT = 60.0
"""Seconds to reach the launcher."""
LAST = 15.0
"""Seconds beyond the grace period after which an agent is killed that does not end, or begin the next attempt."""


def main(argv: list[str]) -> int:
    """Serve the job in the open file `argv[1]` as host `argv[2]`."""
    exit_on_signals((signal.SIGTERM, signal.SIGINT), also_ignored=True)  # they come from the launcher
    with os.fdopen(int(argv[1]), "rb") as file:
        job = ClusterJob.decode(file.read())
    node = int(argv[2])
    mark = f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"
    folder = tempfile.mkdtemp(prefix="shoal-node-")
    try:
        with Guardian(mark, folder, page_of_killed(job.plan, mark)) as guardian:
            os.environ[MARK] = mark
            link = Link(_channel(job), job, node)
            link.start()
            _serve(link, job, node, guardian)
            return 0
    finally:
        for each in (folder, memory_folder(mark)):
            shutil.rmtree(each, ignore_errors=True)


def _serve(link: Link, job: ClusterJob, node: int, guardian: Guardian) -> None:
    code = 1
    try:
        code = 0 if job.plan is None else _run_ranks(link, job, job.plan, node, guardian)
        if job.plan is None:
            link.wait_for_end()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except LaunchError as error:
        link.outbox.send(HostProblem(text=str(error)))
    except BaseException:
        link.outbox.send(HostProblem(text=traceback.format_exc()))
    finally:
        if link.is_cut_off and job.plan is not None and job.plan.log_dir is not None:
            from shoal.launch.doctor import leave_page  # here: it loads torch, as the ranks' agent has

            cause = (f"{socket.gethostname()} has lost the launcher, which was killed, stopped or cut off, and has ended "
                     f"its ranks")
            call_within(LAST_PAGE, partial(leave_page, job.plan.log_dir, guardian.mark, cause))
        link.outbox.send(Exited(code=code))
        link.outbox.wait(job.quiet)  # a launcher that takes nothing for so long is gone
        link.finished()


class Link:
    """The connection to the launcher, served by a thread of its own."""

    def __init__(self, channel: Channel, job: ClusterJob, node: int) -> None:
        self._channel = channel
        self.outbox = Outbox(channel)
        self._job = job
        self._node = node
        self._attempts: queue.SimpleQueue[Serve | Begin] = queue.SimpleQueue()
        """Messages about attempts, kept until the rendezvous takes them: torch takes seconds to load."""
        self._over = threading.Event()
        self._heard = time.monotonic()
        self._ending = False
        self.is_cut_off = False
        """Whether the launcher is gone without having told this host to end."""

    def start(self) -> None:
        """Introduce this host, and begin to listen."""
        self.outbox.send(Hello(node=self._node, host=socket.gethostname(), pid=os.getpid(),
                                facts=asdict(facts.gather(self._job.folder))))
        for serve in (self._receive, self._beat):
            threading.Thread(target=serve, name=serve.__name__, daemon=True).start()

    def serve(self, rendezvous: ClusterRendezvous) -> None:
        """Begin to give the rendezvous what the launcher says of attempts."""
        threading.Thread(target=self._serve, args=(rendezvous,), name="rendezvous", daemon=True).start()

    def wait_for_end(self) -> None:
        """Wait until the launcher ends the examination."""
        self._over.wait()

    def finished(self) -> None:
        """The ranks have ended: what comes now is of no matter."""
        self._over.set()

    def _receive(self) -> None:
        while (message := self._channel.receive()) is not None:
            self._heard = time.monotonic()
            match message:
                case Serve() | Begin():
                    self._attempts.put(message)
                case Signal(number=number):
                    self._end(number)
                case AskTime():
                    self.outbox.send(Time(now=time.time()))
                case Listen():
                    port = measuring.receive()
                    self.outbox.send(Listening(port=port, addresses=own_addresses()))
                case Measure():
                    self.outbox.send(Measured(rate=measuring.send(message.addresses, message.port, message.seconds)))
                case _:
                    pass
        self._cut_off()

    def _serve(self, rendezvous: ClusterRendezvous) -> None:
        while True:
            match self._attempts.get():
                case Serve():
                    try:
                        self.outbox.send(rendezvous.serve())
                    except LaunchError as error:
                        self.outbox.send(HostProblem(text=str(error)))
                case Begin() as begun:
                    rendezvous.begin(begun)
                    threading.Thread(target=self._kill_stuck, args=(rendezvous, begun.attempt), daemon=True).start()

    def _kill_stuck(self, rendezvous: ClusterRendezvous, attempt: int) -> None:
        """Kill this process if its agent does not take up an attempt: it waits for a store whose host is lost."""
        if not self._over.wait(self._grace + LAST) and rendezvous.taken < attempt:
            self.outbox.send(Status(text=f"the agent did not begin attempt {attempt} in time, and is killed"))
            self.outbox.wait(BEAT)
            os.kill(os.getpid(), signal.SIGKILL)

    @property
    def _grace(self) -> float:
        return self._job.plan.grace if self._job.plan else 0.0

    def _beat(self) -> None:
        """Send beats, and end the ranks where the launcher is silent; while this process was stopped, it was not."""
        looked = time.monotonic()
        while not self._over.wait(BEAT):
            self.outbox.send(Beat())
            before, looked = looked, time.monotonic()
            if looked - before > PAUSE:
                self._heard = looked
            if looked - self._heard > self._job.quiet and not self._ending:
                self.outbox.give_up()
                self.outbox.send(Status(text=f"nothing came from the launcher for {self._job.quiet:g} s: the ranks end"))
                self._cut_off()

    def _cut_off(self) -> None:
        """End the ranks, because the launcher is gone."""
        self.is_cut_off |= not (self._ending or self._over.is_set())
        self._end(signal.SIGTERM)

    def _end(self, number: int) -> None:
        """Signal the agent, in the main thread; kill this process if that does not end it."""
        if self._job.plan is None:
            self._over.set()
        if self._over.is_set() or (self._ending and number == signal.SIGTERM):
            return
        os.kill(os.getpid(), number)
        if not self._ending:
            self._ending = True
            threading.Thread(target=self._kill_late, name="deadline", daemon=True).start()

    def _kill_late(self) -> None:
        if not self._over.wait(self._grace + LAST):
            os.kill(os.getpid(), signal.SIGKILL)


def _channel(job: ClusterJob) -> Channel:
    """Return the connection to the launcher, and keep it from the ranks."""
    if job.addresses:
        return _dial(job)
    reader, writer = os.dup(0), os.dup(1)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(2, 1)  # what is printed here is no message
    return Channel(os.fdopen(reader, "rb"), os.fdopen(writer, "wb"))


def _dial(job: ClusterJob) -> Channel:
    connection = connect(job.addresses, job.port, CONNECT)
    if connection is None:
        sys.exit(f"shoal: {socket.gethostname()}: cannot reach the launcher at any of {', '.join(job.addresses)}, port "
                 f"{job.port}; open the port between the hosts, or use --launcher ssh")
    connection.settimeout(None)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    file = cast(BinaryIO, connection.makefile("rwb"))
    file.write(answer(job.secret, file.readline().strip()) + b"\n")
    file.flush()
    return Channel(file, cast(BinaryIO, connection.makefile("wb")))


def _run_ranks(link: Link, job: ClusterJob, plan: LaunchPlan, node: int, guardian: Guardian) -> int:
    """Run the ranks of this host to their end, and return their exit code."""
    check_target(plan)
    slots = job.hosts[node].slots
    os.environ.update(LOCAL_SIZE=str(len(slots)), CROSS_RANK=str(node), CROSS_SIZE=str(len(job.hosts)))
    restrict(plan.core_list)
    with signals_held():
        from shoal.device import VISIBLE_DEVICES  # torch may start threads, so after the guardian's fork
        from shoal.launch.agent import launch
        from shoal.launch.meeting import ClusterRendezvous

    os.environ[VISIBLE_DEVICES] = ",".join(map(str, slots))
    with HostLinks(job.quiet, link.outbox.send) as links:
        rendezvous = ClusterRendezvous(job, node, plan.rendezvous, links,
                                       tell=lambda text: link.outbox.send(Status(text=text)))
        link.serve(rendezvous)
        local = replace(plan, ranks=len(slots), nodes=(len(job.hosts), len(job.hosts)))
        return launch(local, guardian, Remote(link.outbox, lambda: rendezvous.attempt), rendezvous)


if __name__ == "__main__":
    sys.exit(main(sys.argv))
