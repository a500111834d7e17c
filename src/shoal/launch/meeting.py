"""How the agents of a job's hosts meet for each attempt: on the hosts, and at the store, that the launcher names.

The launcher has one connection to every host, so it alone decides who takes part: after a failure it has the first host that
is left open a new store, and tells all hosts its address (`Begin`). No election is needed, no half of a cut network goes on
alone, and any host may be lost, that of the store too. Ranks are numbered in the order of the hostfile. Rank 0's address is
one through which the others reached its host. At the store the hosts also learn where they hold connections to each other
(`links.py`).
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta

from torch.distributed import Store, TCPStore  # pyright: ignore[reportPrivateImportUsage]  documented as public
from torch.distributed.elastic.rendezvous import RendezvousHandler
from torch.distributed.elastic.rendezvous.api import RendezvousInfo, RendezvousStoreInfo

from shoal.errors import LaunchError
from shoal.launch.addresses import INTERFACE, address_of, connect, interface_of, own_addresses, resolves
from shoal.launch.job import ClusterJob
from shoal.launch.links import HostLinks, partners
from shoal.launch.protocol import Begin, Listening
from shoal.launch.rendezvous import first_line

__all__ = ["ClusterRendezvous"]

MEET = 600.0
"""Seconds to wait for the other hosts of an attempt."""
WORD = 10.0
"""Seconds of a wait until the user is told of it; then each time after twice as many."""
LOOK = 0.02
"""Seconds between two looks at who has arrived."""
TIMEOUT = timedelta(minutes=5)


class _Wait:
    """A wait for other hosts: tells the user what it is for, rarely, and has an end."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        self._tell = tell
        self._began = time.monotonic()
        self._silent = WORD

    def go_on(self, describe: Callable[[], str]) -> None:
        """Tell what is missing, when that is due. Raises `LaunchError` with it after `MEET` seconds."""
        waited = time.monotonic() - self._began
        if waited > MEET:
            raise LaunchError(describe())
        if waited > self._silent:
            self._silent = 2 * waited
            self._tell(f"waiting, for at most {MEET - waited:.0f} s more: {describe()}")


class ClusterRendezvous(RendezvousHandler):
    """The rendezvous of one host's agent. Its methods are called in the agent's thread, but for `serve` and `begin`."""

    def __init__(self, job: ClusterJob, node: int, endpoint: str | None, links: HostLinks, *,
                 tell: Callable[[str], None]) -> None:
        """`node` is the number of this host; `endpoint` is the HOST:PORT or :PORT that the user gave for the first host.

        `links` are told of the other hosts of each attempt; `tell` gets what the user must know of a long wait.
        """
        self.attempt = 0
        """The number of the attempt whose hosts met last; 0 before the first."""
        self.taken = 0
        """The number of the attempt that the agent has taken up."""
        self._job = job
        self._node = node
        self._links = links
        self._host, _, port = (endpoint or ":0").rpartition(":")
        self._port = int(port)
        self._server: TCPStore | None = None
        self._begun: Begin | None = None
        self._news = threading.Condition()
        self._met: Begin | None = None
        self._tell = tell
        self._store_lost = ""
        """How the store was lost since hosts met last; empty while it was not."""
        self._chooses_interface = INTERFACE not in os.environ

    # Called by the thread that listens to the launcher

    def serve(self) -> Listening:
        """Open the store of the next attempt, and return where it listens.

        Raises `LaunchError` where the port is taken, and at first where the host that the user gave has no address.
        """
        self._server = None  # a given port is free again
        given = self._host and self._node == 0  # the address is the first host's, which may be lost
        if given and self._begun is None and not resolves(self._host):
            raise LaunchError(f"--rendezvous: the name {self._host} has no address on {socket.gethostname()}; correct it, "
                              "or give :PORT alone, with which the other hosts find this one")
        try:
            self._server = TCPStore("0.0.0.0", self._port, is_master=True, wait_for_workers=False, timeout=TIMEOUT)
        except RuntimeError as error:
            raise LaunchError(f"--rendezvous: port {self._port} of {socket.gethostname()} cannot be opened: "
                              f"{first_line(error)}; choose another, or leave it out for a free one") from error
        return Listening(port=self._server.port, addresses=[self._host] if given else own_addresses())

    def begin(self, begun: Begin) -> None:
        """Take the launcher's word for the next attempt."""
        with self._news:
            self._begun = begun
            self._news.notify_all()

    # Called by the agent

    @property
    def lost(self) -> str:
        """The names of the hosts of this attempt that the next one leaves out; empty while none is lost."""
        if self._met is None or self._begun is None:
            return ""
        gone = [number for number in self._met.hosts if number not in self._begun.hosts]
        return " and ".join(self._job.hosts[number].name for number in gone)

    def next_rendezvous(self) -> RendezvousInfo:
        """Meet the other hosts of the next attempt. Raises `LaunchError` where they do not come, or cannot be reached."""
        while True:
            begun = self._next()
            self.taken = begun.attempt
            try:
                met = self._meet(begun)
            except LaunchError:  # a RuntimeError too, after which no other attempt begins
                raise
            except RuntimeError as error:  # the store's host is lost; the launcher notices too, and begins another attempt
                self._store_lost = f"{self._place(begun)}: the store is lost: {first_line(error)}"
                continue
            if met is not None:
                self.attempt, self._met, self._store_lost = begun.attempt, begun, ""
                return met

    def _next(self) -> Begin:
        """Wait for an attempt that is newer than the last one; with a limit each time, so that signals are handled."""
        wait = _Wait(self._tell)
        with self._news:
            while self._begun is None or self._begun.attempt <= self.taken:
                self._news.wait(timeout=1.0)
                if self._store_lost:  # no attempt follows where something else than the store listens at the address
                    wait.go_on(lambda: f"{self._store_lost}; is HOST:PORT of --rendezvous that of the first host?")
            return self._begun

    def _is_over(self, begun: Begin) -> bool:
        """Whether the launcher has begun another attempt instead, because a host was lost meanwhile."""
        return self._begun is not None and self._begun.attempt > begun.attempt

    def _place(self, begun: Begin) -> str:
        """Return the store of an attempt, as text."""
        return f"{self._job.hosts[begun.hosts[0]].name} at {' or '.join(begun.addresses)}, port {begun.port}"

    def _meet(self, begun: Begin) -> RendezvousInfo | None:
        """Meet the hosts of an attempt; None where another has begun instead.

        Raises `LaunchError` where hosts do not come, and another RuntimeError where the store is lost.
        """
        rank, ranks = begun.hosts.index(self._node), len(begun.hosts)
        found = self._connect(begun)
        if found is None:
            return None
        first, own, store = found
        store.set(f"link/{rank}", f"{self._link_address(own if rank else '')} {self._links.port}")
        store.set(f"reached/{rank}", first)
        if not self._all_have_come(begun, store, [f"reached/{each}" for each in range(ranks)]):
            return None
        self._watch_links(begun, store, first)
        if rank == 0 and ranks > 1:
            own = store.get("reached/1").decode()
        os.environ.update(CROSS_RANK=str(rank), CROSS_SIZE=str(ranks))
        if self._chooses_interface and (interface := interface_of(own)) is not None:
            os.environ[INTERFACE] = interface
        where = RendezvousStoreInfo.build(rank, store, local_addr=own)
        return RendezvousInfo(store, rank, ranks, where if rank == 0 else RendezvousStoreInfo(first, where.master_port))

    def _link_address(self, own: str) -> str:
        """Return the address of the interface that the user gave gloo, else `own`."""
        return own if self._chooses_interface else address_of(os.environ[INTERFACE]) or own

    def _watch_links(self, begun: Begin, store: Store, first: str) -> None:
        """Hold connections to other hosts of an attempt: to the first at its address `first`, unless it gives another."""
        addresses: dict[int, tuple[str, int]] = {}
        for place in partners(begun.hosts.index(self._node), len(begun.hosts)):
            address, _, port = store.get(f"link/{place}").decode().rpartition(" ")
            addresses[begun.hosts[place]] = (address or first, int(port))
        self._links.watch(addresses)

    def _connect(self, begun: Begin) -> tuple[str, str, Store] | None:
        """Return the first host's address, this host's, and the store; None where another attempt has begun instead."""
        if begun.hosts[0] == self._node:
            assert self._server is not None
            return begun.addresses[0], begun.addresses[0], self._server
        wait = _Wait(self._tell)
        while (connection := connect(begun.addresses, begun.port, 1.0)) is None:
            if self._is_over(begun):
                return None
            wait.go_on(lambda: f"cannot reach {self._place(begun)}; let hosts connect to each other, or give --rendezvous "
                               "HOST:PORT with an address of the first host that all others reach")
        with connection:
            first, own = connection.getpeername()[0], connection.getsockname()[0]
        return first, own, TCPStore(first, begun.port, is_master=False, wait_for_workers=False, timeout=TIMEOUT)

    def _all_have_come(self, begun: Begin, store: Store, keys: list[str]) -> bool:
        """Wait until all hosts have arrived; False where another attempt has begun instead."""

        def describe() -> str:
            missing = [self._job.hosts[host].name for host, key in zip(begun.hosts, keys, strict=True)
                       if not store.check([key])]
            return f"{' and '.join(missing)} did not come to {self._place(begun)}, to run attempt {begun.attempt}"

        wait = _Wait(self._tell if begun.hosts[0] == self._node else lambda text: None)  # one host tells of those missing
        while not store.check(keys):
            if self._is_over(begun):
                return False
            wait.go_on(describe)
            time.sleep(LOOK)
        return True

    @property
    def use_agent_store(self) -> bool:
        """Return False: the ranks have a store of their own."""
        return False

    def get_backend(self) -> str:
        """Return the name of this backend."""
        return "cluster"

    def is_closed(self) -> bool:
        """Return False: the launcher ends the job."""
        return False

    def set_closed(self) -> None:
        """Do nothing: the launcher ends the job."""

    def num_nodes_waiting(self) -> int:
        """Return 1 where the launcher has begun another attempt, for which the agent ends its ranks; else 0."""
        return int(self._met is not None and self._is_over(self._met))

    def get_run_id(self) -> str:
        """Return the secret name of the job."""
        return self._job.secret

    def shutdown(self) -> bool:
        """Leave the rendezvous; the store stays open for hosts that are not done with it."""
        return True
