"""Ranks of one machine read each other's memory: a byte that moves between them is copied once, and crosses no socket.

A transfer from one rank to another needs two messages over a local socket:

    sender    offers its bytes (address and size) and leaves them unchanged until they are acknowledged
    receiver  copies them out of the sender's process (`process_vm_readv` of Linux) once it has a destination
    receiver  acknowledges the copy, or refuses it

One thread on each rank copies as soon as it has both the offer and the destination, in whatever order they come. Two ranks
are connected if they share kernel, network and process namespaces and each has read a test value of the other. Where the
system forbids that, or the ranks are on two machines, they are not connected, and messages use the backend.
"""

from __future__ import annotations

import ctypes
import os
import secrets
import selectors
import socket
import struct
import threading
import time
import weakref
from collections import defaultdict, deque
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor

from shoal.transport.failure_board import POLL_AFTER, published_failure

__all__ = ["PeerMemory", "PeerTransfer", "allow_siblings", "namespaces", "peer_memory_of", "read_memory"]

_AllGather = Callable[[Any], list[Any]]
"""Returns the value of each rank of the group, by rank; a collective."""

_MESSAGE = struct.Struct("<qqqq")  # kind, tag, address, bytes
_OFFER, _ACK, _REFUSE = range(3)
_CONNECT_TIMEOUT = 60.0  # seconds for a peer that has just answered to connect
_CLOSE_TIMEOUT = 5.0  # seconds at exit for peers to copy what was offered to them
_RETRY = 0.001  # seconds until a message is sent again that did not fit into the socket
_READ_BYTES = 256 << 20  # bytes of one read: the system has a limit of 2 GiB
_SET_PTRACER = 0x59616D61  # linux/prctl.h: which process may read this one, where only ancestors may


@dataclass(frozen=True, slots=True, kw_only=True)
class _Endpoint:
    """The address at which the other ranks connect to this one, and a test value for them to read."""

    namespaces: tuple[str, ...]
    """Equal on ranks that may be able to read each other; empty where that is impossible."""
    process: int
    name: str
    test_value: bytes
    address: int


class PeerTransfer:
    """One message each way between this rank and a peer."""

    def __init__(self, lock: threading.Condition, peer: int, source: Tensor, into: Tensor):
        self.peer = peer
        self.source = source
        self.into = into
        self.received = False
        """Whether the peer's bytes are in `into`."""
        self.acknowledged = False
        """Whether the peer has copied `source`."""
        self.failure: str | None = None
        self._lock = lock

    def wait(self, timeout: float) -> None:
        """Return when both are done. Raises RuntimeError when the peer is gone or has failed, or after `timeout` seconds."""
        end = time.monotonic() + timeout
        while not self._done(min(POLL_AFTER, timeout)) and published_failure() is None and time.monotonic() < end:
            continue
        with self._lock:
            if not (self.failure or (self.received and self.acknowledged)):
                missing = "was not offered" if not self.received else "was not read"
                self.failure = f"timed out: a message {missing} by rank {self.peer} of the group"  # a later offer is refused
        if self.failure:
            raise RuntimeError(self.failure)

    def _done(self, seconds: float) -> bool:
        with self._lock:
            return bool(self._lock.wait_for(lambda: self.failure or (self.received and self.acknowledged), seconds))


class PeerMemory:
    """The peers of a group that this rank exchanges memory with, and the thread that copies."""

    def __init__(self, group: dist.ProcessGroup, all_gather: _AllGather):
        self._lock = threading.Condition()
        # By (peer, tag):
        self._receiving: dict[tuple[int, int], deque[PeerTransfer]] = defaultdict(deque)  # waiting for an offer
        self._sending: dict[tuple[int, int], deque[PeerTransfer]] = defaultdict(deque)  # waiting for an acknowledgement
        self._offers: dict[tuple[int, int], deque[tuple[int, int]]] = defaultdict(deque)  # waiting for a destination
        self._ready: deque[tuple[PeerTransfer, int, int, int]] = deque()  # the destination came after the offer
        self._lost: dict[int, str] = {}
        self._outbox: dict[int, deque[bytes]] = defaultdict(deque)  # messages that did not fit into the socket
        self._processes, self._sockets = _connect(dist.get_rank(group), all_gather)
        self._wake, self._woken = socket.socketpair()
        if self._sockets:
            _instances.add(self)
            threading.Thread(target=self._run, name="shoal-peer-memory", daemon=True).start()

    def __contains__(self, peer: int) -> bool:
        return peer in self._sockets

    def exchange(self, peer: int, tag: int, source: Tensor, into: Tensor) -> PeerTransfer:
        """Offer the contiguous `source` to `peer`, and copy what it offers under the same `tag` to `into` (same bytes)."""
        transfer = PeerTransfer(self._lock, peer, source, into)
        key = peer, tag
        with self._lock:
            transfer.failure = self._lost.get(peer)
            self._sending[key].append(transfer)
            offer = self._offers[key].popleft() if self._offers[key] else None
            if offer is None:
                self._receiving[key].append(transfer)
            else:
                self._ready.append((transfer, tag, *offer))
        if offer is not None:
            self._wake.send(b"!")
        with suppress(OSError):  # the peer is gone: the thread notices it, and fails the transfer
            self._sockets[peer].send(_MESSAGE.pack(_OFFER, tag, source.data_ptr(), source.numel() * source.element_size()))
        return transfer

    def close(self) -> None:
        """End the thread and the connections, once the peers have copied what was offered to them."""
        with self._lock:
            self._lock.wait_for(lambda: self._lost or not any(self._sending.values()), _CLOSE_TIMEOUT)
        self._wake.close()

    def close_inherited(self) -> None:
        """Close the descriptors that a forked child inherited: peers must notice the end of this rank, not of the child."""
        for connection in (*self._sockets.values(), self._wake, self._woken):
            connection.close()

    def _answer(self, peer: int, kind: int, tag: int, address: int) -> None:
        """Send a message from the thread, which must never block: the peer's thread may be blocked on this one."""
        self._outbox[peer].append(_MESSAGE.pack(kind, tag, address, 0))
        self._flush()

    def _flush(self) -> bool:
        """Send what the sockets take of the outbox; return whether it is empty."""
        for peer, messages in self._outbox.items():
            with suppress(OSError):
                while messages:
                    self._sockets[peer].send(messages[0], socket.MSG_DONTWAIT)
                    messages.popleft()
            if peer in self._lost:
                messages.clear()
        return not any(self._outbox.values())

    def _run(self) -> None:
        try:
            self._serve()
        finally:  # fail all transfers, here and at the peers, also when the thread ends by an error of its own
            for peer, connection in self._sockets.items():
                self._lose(peer)
                connection.close()

    def _serve(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._woken, selectors.EVENT_READ, -1)
            for peer, connection in self._sockets.items():
                selector.register(connection, selectors.EVENT_READ, peer)
            while True:
                for key, _ in selector.select(None if self._flush() else _RETRY):
                    if key.data >= 0:
                        if not self._receive(key.data):
                            selector.unregister(key.fileobj)
                    elif not self._woken.recv(64):
                        return
                    while self._ready:
                        self._copy(*self._ready.popleft())

    def _receive(self, peer: int) -> bool:
        """Handle one message of `peer`; return whether it is connected still."""
        try:
            message = self._sockets[peer].recv(_MESSAGE.size)
        except OSError:
            message = b""
        if not message:
            self._lose(peer)
            return False
        kind, tag, address, size = _MESSAGE.unpack(message)
        key = peer, tag
        with self._lock:
            if kind in (_ACK, _REFUSE):
                self._finish_sending(key, address, refused=kind == _REFUSE)
                return True
            if not self._receiving[key]:
                self._offers[key].append((address, size))
                return True
            transfer = self._receiving[key].popleft()
        self._copy(transfer, tag, address, size)
        return True

    def _finish_sending(self, key: tuple[int, int], address: int, *, refused: bool) -> None:
        transfer = next((each for each in self._sending[key] if each.source.data_ptr() == address), None)
        if transfer is None:
            return
        self._sending[key].remove(transfer)
        transfer.acknowledged = True
        if refused:
            transfer.failure = transfer.failure or f"rank {transfer.peer} of the group could not read this rank's memory"
        self._lock.notify_all()

    def _copy(self, transfer: PeerTransfer, tag: int, address: int, size: int) -> None:
        failure = transfer.failure or self._lost.get(transfer.peer)
        try:
            if failure is not None:
                raise OSError(failure)
            if size != (expected := transfer.into.numel() * transfer.into.element_size()):
                raise OSError(f"{size} bytes were offered where {expected} are expected")
            read_memory(self._processes[transfer.peer], address, transfer.into.data_ptr(), size)
            self._answer(transfer.peer, _ACK, tag, address)
        except OSError as error:
            self._answer(transfer.peer, _REFUSE, tag, address)
            failure = failure or f"memory of rank {transfer.peer} of the group could not be read: {error}"
        with self._lock:
            transfer.received, transfer.failure = True, transfer.failure or failure
            self._lock.notify_all()

    def _lose(self, peer: int) -> None:
        with self._lock:
            self._lost[peer] = f"rank {peer} of the group closed its connection"
            for pending in (self._receiving, self._sending):
                for (other, _), transfers in pending.items():
                    if other == peer:
                        for transfer in transfers:
                            transfer.failure = transfer.failure or self._lost[peer]
                        transfers.clear()
            self._lock.notify_all()


def peer_memory_of(group: dist.ProcessGroup, all_gather: _AllGather) -> PeerMemory:
    """Return the connected peers within `group`. The first call for a group is a collective."""
    if group not in _by_group:
        _by_group[group] = PeerMemory(group, all_gather)
        weakref.finalize(group, _by_group[group].close)
    return _by_group[group]


def _connect(rank: int, all_gather: _AllGather) -> tuple[dict[int, int], dict[int, socket.socket]]:
    """Return the process id and the connection of each peer that this rank can exchange memory with, by rank.

    A collective call.
    """
    value = ctypes.create_string_buffer(secrets.token_bytes(16), 16)
    own = _Endpoint(namespaces=(), process=os.getpid(), name=f"\0shoal-{secrets.token_hex(16)}", test_value=value.raw,
                    address=ctypes.addressof(value))
    with ExitStack() as stack:
        listener: socket.socket | None = None
        with suppress(OSError, AttributeError):  # other systems than Linux: no peers
            own_namespaces = namespaces()
            allow_siblings()
            listener = stack.enter_context(_socket())
            listener.bind(own.name)
            listener.listen(1024)
            own = replace(own, namespaces=own_namespaces)
        endpoints: list[_Endpoint] = all_gather(own)
        readable: list[set[int]] = all_gather({other for other, endpoint in enumerate(endpoints)
                                               if other != rank and _can_read(own, endpoint)})
        peers = {other for other in readable[rank] if rank in readable[other]}
        connections: dict[int, socket.socket] = {}
        for other in sorted(peers):
            if other < rank:
                with suppress(OSError):
                    connection = _socket()
                    connection.connect(endpoints[other].name)
                    connection.send(own.test_value)
                    connections[other] = connection
        expected = {endpoints[other].test_value: other for other in peers if other > rank}
        with suppress(OSError):  # a rank that does not connect in time is no peer
            while expected and listener is not None:
                connection, _ = listener.accept()
                connection.settimeout(_CONNECT_TIMEOUT)
                if (other := expected.pop(connection.recv(16), None)) is not None:
                    connections[other] = connection
        connected: list[set[int]] = all_gather(set(connections))
        connections = {other: connection for other, connection in connections.items() if rank in connected[other]}
        for connection in connections.values():
            connection.settimeout(None)
        return {other: endpoints[other].process for other in connections}, connections


def _socket() -> socket.socket:
    """Return a local socket that keeps message boundaries and order."""
    made = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    made.settimeout(_CONNECT_TIMEOUT)
    return made


def _can_read(own: _Endpoint, other: _Endpoint) -> bool:
    """Return whether this rank can read the test value of `other`."""
    if not own.namespaces or own.namespaces != other.namespaces:
        return False
    value = ctypes.create_string_buffer(len(other.test_value))
    try:
        read_memory(other.process, other.address, ctypes.addressof(value), len(other.test_value))
    except OSError:
        return False
    return value.raw == other.test_value


_instances: weakref.WeakSet[PeerMemory] = weakref.WeakSet()
_by_group: weakref.WeakKeyDictionary[dist.ProcessGroup, PeerMemory] = weakref.WeakKeyDictionary()


def _after_fork_in_child() -> None:
    for instance in _instances:
        instance.close_inherited()


os.register_at_fork(after_in_child=_after_fork_in_child)


# Linux


class _IoVec(ctypes.Structure):
    """`struct iovec`."""

    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


def read_memory(process: int, source: int, target: int, size: int) -> None:
    """Copy `size` bytes at `source` of `process` to `target` of this one. Raises OSError where that is not possible."""
    if (read := _c_function("process_vm_readv")) is None:
        raise OSError("this system has no process_vm_readv")
    for start in range(0, size, _READ_BYTES):
        length = min(_READ_BYTES, size - start)
        local, remote = _IoVec(target + start, length), _IoVec(source + start, length)
        count = read(process, ctypes.byref(local), 1, ctypes.byref(remote), 1, 0)
        if count != length:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number) if count < 0 else f"only {count} of {length} bytes were read")


def namespaces() -> tuple[str, str, str]:
    """Return the running kernel, the network and the process namespace of this process. Raises OSError but on Linux.

    Ranks of equal kernel and network are on one machine; two network namespaces on one machine count as two machines.
    """
    return (Path("/proc/sys/kernel/random/boot_id").read_text(), os.readlink("/proc/self/ns/net"),
            os.readlink("/proc/self/ns/pid"))


def allow_siblings() -> None:
    """Let the other ranks, descendants of the same launcher, read this process where Yama allows it to ancestors only."""
    scope = Path("/proc/sys/kernel/yama/ptrace_scope")
    if not scope.exists() or scope.read_text().strip() != "1" or os.getppid() <= 1:
        return
    if (prctl := _c_function("prctl")) is not None:
        prctl(_SET_PTRACER, ctypes.c_ulong(os.getppid()), 0, 0, 0)


@cache
def _c_function(name: str) -> Callable[..., int] | None:
    """Return a function of the C library, None where it has none of that name."""
    function = getattr(ctypes.CDLL(None, use_errno=True), name, None)
    if function is not None:
        function.restype = ctypes.c_ssize_t
    return function
