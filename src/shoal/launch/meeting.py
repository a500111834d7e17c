"""How the agents of a job's hosts meet: at a store of the first host, with ranks in the order of the hostfile.

Torch's c10d rendezvous counts the agents and restarts them together. It orders them by their addresses, so
`OrderedRendezvous` gives them the numbers of their hosts instead, and says where rank 0 is: at an address through which the
others reached it.
"""

from __future__ import annotations

import json
import os
import socket
from datetime import timedelta

from torch.distributed import PrefixStore, TCPStore  # pyright: ignore[reportPrivateImportUsage]  documented as public
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousParameters
from torch.distributed.elastic.rendezvous.api import RendezvousInfo, RendezvousStoreInfo
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler

from shoal.errors import LaunchError
from shoal.launch.addresses import connect, interface_of
from shoal.launch.job import ClusterJob
from shoal.launch.launch_plan import LaunchPlan
from shoal.launch.protocol import Begin

__all__ = ["Meeting", "OrderedRendezvous"]

REACH = 60.0
"""Seconds to reach the first host's store."""
TIMEOUT = timedelta(minutes=5)


class Meeting:
    """The store of one job, at its first host."""

    def __init__(self, job: ClusterJob, plan: LaunchPlan, node: int) -> None:
        self._job = job
        self._plan = plan
        self._node = node
        self._server: TCPStore | None = None
        host, _, port = (plan.rendezvous or ":0").rpartition(":")
        self.address = host
        """The address that the user gave; empty: it is found."""
        self._port = int(port)

    def serve(self) -> int:
        """Open the store, and return its port."""
        try:
            self._server = TCPStore("0.0.0.0", self._port, is_master=True, wait_for_workers=False, timeout=TIMEOUT)
        except RuntimeError as error:
            raise LaunchError(f"port {self._port} of {socket.gethostname()} cannot be opened: {error}; choose another, "
                              "or leave it out for a free one") from error
        return self._server.port

    def join(self, begun: Begin) -> RendezvousHandler:
        """Return the rendezvous of the job's agents. Raises `LaunchError` where the first host cannot be reached."""
        os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"  # a store of its own for the ranks of each attempt
        first, own, store = self._connect(begun)
        parameters = RendezvousParameters(backend="c10d", endpoint=f"{first}:{begun.port}", run_id=self._job.secret,
                                          min_nodes=len(self._job.hosts), max_nodes=len(self._job.hosts), local_addr=own)
        handler = create_handler(store, C10dRendezvousBackend(store, self._job.secret), parameters)
        return OrderedRendezvous(handler, self._node, first, own)

    def _connect(self, begun: Begin) -> tuple[str, str, TCPStore]:
        """Return the first host's address, this host's, and the store."""
        if self._server is not None:
            address = begun.addresses[0]
            return address, address, self._server
        connection = connect(begun.addresses, begun.port, REACH)
        if connection is None:
            raise LaunchError(f"{socket.gethostname()} cannot reach the first host at any of "
                              f"{', '.join(begun.addresses)}, port {begun.port}; let hosts connect to each other, or give "
                              "--rendezvous HOST:PORT")
        with connection:
            first, own = connection.getpeername()[0], connection.getsockname()[0]
        return first, own, TCPStore(first, begun.port, is_master=False, wait_for_workers=False, timeout=TIMEOUT)


class OrderedRendezvous(RendezvousHandler):
    """A rendezvous whose numbers are those of the hosts. `first` is the address of the first host, `own` of this one."""

    def __init__(self, handler: RendezvousHandler, node: int, first: str, own: str) -> None:
        self._handler = handler
        self._node = node
        self._first = first
        self._own = own

    def next_rendezvous(self) -> RendezvousInfo:
        """Meet the other agents, exchange the numbers of the hosts, and have gloo use the interface that reaches them."""
        met = self._handler.next_rendezvous()
        store = PrefixStore("ordered", met.store)
        store.set(str(met.rank), json.dumps([self._node, self._first]))
        others: list[tuple[int, str]] = sorted(tuple(json.loads(store.get(str(each)))) for each in range(met.world_size))
        rank = [node for node, _ in others].index(self._node)
        if rank == 0 and self._node == 0 and len(others) > 1:
            self._first = self._own = others[1][1]  # by which the others reached this host
        if (interface := interface_of(self._own)) is not None:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        where = RendezvousStoreInfo.build(rank, store, local_addr=self._own)
        if self._node != 0 and others[0][0] == 0:
            where = RendezvousStoreInfo(self._first, where.master_port)
        return RendezvousInfo(store, rank, met.world_size, where)

    @property
    def use_agent_store(self) -> bool:
        """The ranks have a store of their own."""
        return self._handler.use_agent_store

    def get_backend(self) -> str:
        """Return the name of torch's rendezvous."""
        return self._handler.get_backend()

    def is_closed(self) -> bool:
        """Return whether no agent can join any more."""
        return self._handler.is_closed()

    def set_closed(self) -> None:
        """Let no agent join any more."""
        self._handler.set_closed()

    def num_nodes_waiting(self) -> int:
        """Return the number of agents that wait to join."""
        return self._handler.num_nodes_waiting()

    def get_run_id(self) -> str:
        """Return the name of the job."""
        return self._handler.get_run_id()

    def shutdown(self) -> bool:
        """Leave the rendezvous."""
        return self._handler.shutdown()
