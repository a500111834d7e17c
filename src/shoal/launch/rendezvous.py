"""The rendezvous of nodes: where the agents of a launch meet, and which store the ranks of an attempt get.

A single node meets nobody: its launcher serves the store. Nodes that are started by hand meet by torch's c10d rendezvous.
Hosts of a hostfile meet as their launcher says (`meeting.py`).
"""

from __future__ import annotations

import math
import os
import socket
from datetime import timedelta

from torch.distributed import HashStore, TCPStore  # pyright: ignore[reportPrivateImportUsage]  documented as public
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousError,
    RendezvousHandler,
    RendezvousParameters,
    RendezvousTimeoutError,
)
from torch.distributed.elastic.rendezvous.api import RendezvousInfo, RendezvousStoreInfo
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import create_backend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler

from shoal.errors import LaunchError
from shoal.launch.addresses import INTERFACE, facing, interface_of
from shoal.launch.console import counted

__all__ = ["JOIN", "SingleNodeRendezvous", "describe", "first_line", "multi_node_rendezvous"]

LOOPBACK = "127.0.0.1"
KEEP_ALIVE = {"keep_alive_interval": 1, "keep_alive_max_attempt": 6}
"""A node is lost when its agent has sent no heartbeat for so many seconds, times so many. Agents compare the time of
a heartbeat with their own clocks, so the clocks of nodes must not differ by more."""
LAST_CALL = 3
"""Seconds to wait for more nodes once the least number has joined. A node that joins later restarts the rendezvous."""
JOIN = 600
"""Seconds to wait for the least number of nodes."""


class SingleNodeRendezvous(RendezvousHandler):
    """The rendezvous of a single node. It completes at once and gives the ranks of every attempt a new store."""

    def __init__(self, job: str, port: int = 0) -> None:
        self.job = job
        self.port = port
        self._server: TCPStore | None = None

    def next_rendezvous(self) -> RendezvousInfo:
        """Open the store of the next attempt, on the given port or one that the system chooses."""
        self._server = None  # a given port is free again for the next attempt
        try:
            self._server = TCPStore(LOOPBACK, self.port, is_master=True, wait_for_workers=False,
                                    timeout=timedelta(minutes=5))
        except RuntimeError as error:
            raise LaunchError(f"--port: port {self.port} of {socket.gethostname()} cannot be opened: {first_line(error)}; "
                              "choose another, or leave it out for a free one") from error
        return RendezvousInfo(HashStore(), 0, 1, RendezvousStoreInfo(LOOPBACK, self._server.port))

    @property
    def use_agent_store(self) -> bool:
        """The ranks are clients of the launcher's store."""
        return True

    def get_backend(self) -> str:
        """Return the name of this backend."""
        return "one-node"

    def is_closed(self) -> bool:
        """Return False: this rendezvous never closes."""
        return False

    def set_closed(self) -> None:
        """Do nothing: this rendezvous never closes."""

    def num_nodes_waiting(self) -> int:
        """Return 0: no other node can join."""
        return 0

    def get_run_id(self) -> str:
        """Return the job name."""
        return self.job

    def shutdown(self) -> bool:
        """Close the store."""
        self._server = None
        return True


def multi_node_rendezvous(endpoint: str, job: str, nodes: tuple[int, int],
                          hosts: bool | None) -> tuple[RendezvousHandler, bool]:
    """Return torch's c10d rendezvous of the nodes of `job` at `endpoint` (host:port), and whether its store is here.

    `hosts` says whether this node serves the rendezvous store; None: it does if the address is one of its own, and the
    first there. Other nodes reach it at that address, and any other node at the one with which it reaches the store, so that
    no name of a node has to resolve. The ranks use a separate store, so that no attempt reads the addresses of an earlier
    attempt.
    """
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    host = endpoint.rpartition(":")[0].strip("[]")
    try:
        own, is_here = facing(host)
    except OSError as error:
        raise LaunchError(f"--rendezvous {endpoint}: {socket.gethostname()} cannot reach {host}: {error.strerror}; give an "
                          "address of the node that hosts it") from error
    if INTERFACE not in os.environ and (interface := interface_of(own)) is not None:
        os.environ[INTERFACE] = interface

    def create(is_host: bool) -> tuple[RendezvousHandler, bool]:
        parameters = RendezvousParameters(backend="c10d", endpoint=endpoint, run_id=job, min_nodes=nodes[0],
                                          max_nodes=nodes[1], local_addr=host if is_host else own, is_host=is_host,
                                          last_call_timeout=LAST_CALL, join_timeout=JOIN, **KEEP_ALIVE)
        backend, store = create_backend(parameters)
        return create_handler(store, backend, parameters), is_host

    try:
        return create(is_here if hosts is None else hosts)
    except RendezvousError:
        if hosts is not None or not is_here:
            raise
        return create(False)  # another agent on this host serves it


def describe(error: Exception, endpoint: str, least: int) -> str:
    """Return what a failed rendezvous of `least` nodes or more means, and what helps."""
    match error:
        case RendezvousTimeoutError():
            return (f"fewer than {counted(least, 'node')} came to {endpoint} within {JOIN} s; start the same command on the "
                    f"others: --rendezvous and --job are the same on each, and clocks do not differ by more than "
                    f"{math.prod(KEEP_ALIVE.values())} s")
        case RendezvousClosedError():
            return f"the job at {endpoint} has ended, or ends; start all of its nodes again, or give another --job"
        case _:
            cause = error.__cause__ if isinstance(error.__cause__, Exception) else error
            if "failed to listen" in str(cause):
                return (f"the port of {endpoint} cannot be opened on {socket.gethostname()}: {first_line(cause)}; choose "
                        "another, the same on each node")
            return (f"{socket.gethostname()} does not reach the store at {endpoint}: {first_line(cause)}; see that the node "
                    f"which hosts it is up and lets others connect to that port. If it was lost, start all nodes again")


def first_line(error: Exception) -> str:
    """Return what an error of torch says, without the stack of its libraries."""
    return str(error).partition("Exception raised from")[0].strip().partition("\n")[0]
