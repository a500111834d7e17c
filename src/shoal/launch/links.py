"""The hosts of a job hold connections to each other, and tell the launcher which host they no longer reach.

A link may be lost between two hosts that both reach the launcher: then their ranks wait for each other without end. So each
agent connects to others at the addresses that the ranks use. The kernel probes these connections once a second, and answers
the probes of others (TCP keepalive): that costs no step, and a host that is slow, or whose agent is stopped, still answers.
Once `quiet` seconds less `MARGIN` have brought no answer, the connection breaks. Then the agent connects again, once a
second; after `DIALS` failures in a row it reports the host as unreached, until it is reached again.

Hosts dial those after them in a ring, at most `MOST` each: all pairs of up to 2 * `MOST` + 1 hosts. A pair that never had a
connection is not reported, because the network may carry its ranks elsewhere; gloo's own error tells of such a pair.
"""

from __future__ import annotations

import errno
import queue
import selectors
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from shoal.launch.protocol import Unreached

__all__ = ["HostLinks", "partners"]

MOST = 128
"""The most connections that a host dials."""
MARGIN = 4
"""Seconds before `quiet` at which a connection without an answer breaks, to connect again, and to choose, within `quiet`."""
PROBE = 1
"""Seconds without traffic before the first probe of the kernel."""
MOST_PROBES, MOST_SECONDS = 127, 32767
"""The most probes, and seconds between two of them, that Linux takes."""
DIAL = 1.0
"""Seconds until an attempt to connect has failed, and the next begins."""
DIALS = 2
"""Failed attempts in a row after which a host is unreached."""
BACKLOG = 1024
"""Connections that the kernel accepts while the agent is stopped."""


def partners(place: int, places: int) -> list[int]:
    """Return the places in the ring of hosts that the one at `place` dials."""
    return [(place + step) % places for step in range(1, min(places // 2, MOST) + 1)]


@dataclass(slots=True)
class _Partner:
    """A host that this one dials."""

    address: tuple[str, int]
    known: bool
    """Whether there has been a connection to this address."""
    connection: socket.socket | None = None
    is_connected: bool = False
    dialed: float = 0.0
    """When the last attempt to connect began."""
    failed: int = 0
    """Failed attempts in a row since a connection broke."""


class HostLinks:
    """The connections of one host, in a thread of their own, as a context manager."""

    def __init__(self, quiet: float, report: Callable[[Unreached], None]) -> None:
        """`quiet` is the job's, in seconds; `report` is called, in a thread, when other hosts are unreached than before."""
        seconds = max(1, round(quiet) - MARGIN)
        self._interval = min(-(-seconds // MOST_PROBES), MOST_SECONDS)
        self._probes = min(-(-seconds // self._interval), MOST_PROBES)
        self._report = report
        self._reported: list[int] = []
        self._partners: dict[int, _Partner] = {}
        self._incoming = set[socket.socket]()
        self._known = set[tuple[str, int]]()
        """Addresses to which there has been a connection."""
        self._attempts: queue.SimpleQueue[Mapping[int, tuple[str, int]]] = queue.SimpleQueue()
        self._closed = False
        self._listener = _listen()
        self.port: int = self._listener.getsockname()[1]
        """Where the other hosts connect."""
        self._woken, self._waker = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        for receiver, take in ((self._listener, self._accept), (self._woken, partial(self._woken.recv, 4096))):
            receiver.setblocking(False)
            self._selector.register(receiver, selectors.EVENT_READ, take)
        self._thread = threading.Thread(target=self._run, name="links", daemon=True)

    def __enter__(self) -> HostLinks:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._closed = True
        self._wake()
        self._thread.join()
        for each in (self._woken, self._waker):  # here: the thread, woken by another host, may end before it is woken to
            each.close()

    def watch(self, addresses: Mapping[int, tuple[str, int]]) -> None:
        """Hold connections to these hosts, by their numbers in the job, in place of those before."""
        self._attempts.put(addresses)
        self._wake()

    def _wake(self) -> None:
        with suppress(BlockingIOError):  # it is about to wake
            self._waker.send(b"\0")

    # In the thread

    def _run(self) -> None:
        while not self._closed:
            due = [each.dialed + DIAL for each in self._partners.values() if not each.is_connected]
            for key, _ in self._selector.select(max(0.0, min(due) - time.monotonic()) if due else None):
                key.data()
            while not self._attempts.empty():
                self._set_partners(self._attempts.get())
            for partner in self._partners.values():
                if not partner.is_connected and time.monotonic() - partner.dialed >= DIAL:
                    partner.failed += partner.known and partner.dialed > 0.0
                    self._dial(partner)
            unreached = [number for number, each in self._partners.items() if each.failed >= DIALS]
            if unreached != self._reported:
                self._reported = unreached
                self._report(Unreached(hosts=unreached))
        for each in (*self._incoming, self._listener):
            each.close()
        for partner in self._partners.values():
            self._hang_up(partner)
        self._selector.close()

    def _set_partners(self, addresses: Mapping[int, tuple[str, int]]) -> None:
        """Dial the hosts of another attempt, and keep the connections that there are."""
        before, self._partners = self._partners, {}
        for number, address in sorted(addresses.items()):
            kept = before.get(number)
            if kept is not None and kept.address == address:
                self._partners[number] = before.pop(number)
            else:
                self._partners[number] = _Partner(address=address, known=address in self._known)
        for partner in before.values():
            self._hang_up(partner)

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:  # it is gone again, or there are too many open files
            time.sleep(DIAL / 4)
            return
        self._prepare(connection)
        self._incoming.add(connection)
        self._selector.register(connection, selectors.EVENT_READ, partial(self._take_end, connection))

    def _take_end(self, connection: socket.socket) -> None:
        """Close a connection of another host where it has ended."""
        if _has_ended(connection):
            self._incoming.remove(connection)
            self._selector.unregister(connection)
            connection.close()

    def _dial(self, partner: _Partner) -> None:
        """Begin a new attempt to connect."""
        self._hang_up(partner)
        partner.dialed = time.monotonic()
        try:
            connection = socket.socket(socket.AF_INET6 if ":" in partner.address[0] else socket.AF_INET)
        except OSError:  # too many open files: that says nothing about the partner
            partner.failed = 0
            return
        self._prepare(connection)
        partner.connection = connection
        if connection.connect_ex(partner.address) in (0, errno.EINPROGRESS):
            self._selector.register(connection, selectors.EVENT_WRITE, partial(self._take_answer, partner, connection))
        else:
            connection.close()
            partner.connection = None

    def _take_answer(self, partner: _Partner, connection: socket.socket) -> None:
        if connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self._hang_up(partner)  # the next attempt begins when this one would have been given up
            return
        self._known.add(partner.address)
        partner.is_connected, partner.known, partner.failed = True, True, 0
        self._selector.modify(connection, selectors.EVENT_READ, partial(self._take_loss, partner, connection))

    def _take_loss(self, partner: _Partner, connection: socket.socket) -> None:
        if _has_ended(connection):
            self._hang_up(partner)
            self._dial(partner)

    def _hang_up(self, partner: _Partner) -> None:
        if partner.connection is not None:
            self._selector.unregister(partner.connection)
            partner.connection.close()
        partner.connection, partner.is_connected = None, False

    def _prepare(self, connection: socket.socket) -> None:
        """Have the kernel probe a connection."""
        connection.setblocking(False)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if sys.platform == "linux":
            for option, value in ((socket.TCP_KEEPIDLE, PROBE), (socket.TCP_KEEPINTVL, self._interval),
                                  (socket.TCP_KEEPCNT, self._probes)):
                connection.setsockopt(socket.IPPROTO_TCP, option, value)


def _listen() -> socket.socket:
    """Return a socket that takes connections at all addresses of this host."""
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", 0), family=socket.AF_INET6, backlog=BACKLOG, dualstack_ipv6=True)
    return socket.create_server(("", 0), backlog=BACKLOG)


def _has_ended(connection: socket.socket) -> bool:
    """Whether a connection that may be read is at its end, or broken; what it brings is of no matter."""
    try:
        return not connection.recv(4096)
    except BlockingIOError:
        return False
    except OSError:
        return True
