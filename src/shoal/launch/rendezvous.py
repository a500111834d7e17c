"""Where the ranks of a launch meet: each attempt has a store of its own, so no attempt sees another's addresses.

On one node the launcher itself serves the store, at a port that the system chooses. Several nodes meet through torch's
c10d rendezvous, with its store kept apart from the ranks' store for the same reason.
"""

from __future__ import annotations

import ipaddress
import os
from datetime import timedelta

from torch.distributed import HashStore, TCPStore  # pyright: ignore[reportPrivateImportUsage]  documented as public
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousParameters
from torch.distributed.elastic.rendezvous.api import RendezvousInfo, RendezvousStoreInfo
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import create_backend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler

__all__ = ["OneNode", "several_nodes"]

LOOPBACK = "127.0.0.1"


class OneNode(RendezvousHandler):
    """The rendezvous of a node with itself: immediate, and a fresh store for the ranks of every attempt."""

    def __init__(self, job: str) -> None:
        self.job = job
        self._server: TCPStore | None = None

    def next_rendezvous(self) -> RendezvousInfo:
        """Open the next attempt's store."""
        self._server = TCPStore(LOOPBACK, 0, is_master=True, wait_for_workers=False, timeout=timedelta(minutes=5))
        return RendezvousInfo(HashStore(), 0, 1, RendezvousStoreInfo(LOOPBACK, self._server.port))

    @property
    def use_agent_store(self) -> bool:
        """The ranks are clients of the launcher's store."""
        return True

    def get_backend(self) -> str:
        """Name the kind of rendezvous."""
        return "one-node"

    def is_closed(self) -> bool:
        """It never closes."""
        return False

    def set_closed(self) -> None:
        """It never closes."""

    def num_nodes_waiting(self) -> int:
        """Nobody else can join."""
        return 0

    def get_run_id(self) -> str:
        """Name the job."""
        return self.job

    def shutdown(self) -> bool:
        """Stop serving."""
        self._server = None
        return True


def several_nodes(endpoint: str, job: str, nodes: tuple[int, int], hosts: bool | None) -> RendezvousHandler:
    """Join the nodes that meet at `endpoint` (host:port) for `job`.

    `hosts` says whether this node serves the meeting; None lets torch decide by the host's name and addresses.
    """
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    host = endpoint.rpartition(":")[0]
    options = {} if hosts is None else {"is_host": hosts}
    parameters = RendezvousParameters(backend="c10d", endpoint=endpoint, run_id=job, min_nodes=nodes[0],
                                      max_nodes=nodes[1], local_addr=LOOPBACK if _is_loopback(host) else None, **options)
    backend, store = create_backend(parameters)
    return create_handler(store, backend, parameters)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"
