"""Ranks of one machine read each other's memory: a byte that moves between them is copied once, and by no socket.

A message from one rank to another is a loan, with two words about it over a local socket:

    lender    offers its bytes: where they lie, and how many; it leaves them alone until they are returned
    reader    copies them out of the lender's process (`process_vm_readv` of Linux) when it has a place for them
    reader    returns them, or says that it could not

Each rank has one thread that does the reading, whichever comes second, the offer or the place. Two ranks are neighbours
when they share kernel, network and process numbers, and each has read a word of the other: where the system forbids
that, or the ranks are on two machines, they are none, and messages travel as they always did.
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
from typing import Any

import torch.distributed as dist
from torch import Tensor

from shoal.transport.failure_board import PATIENCE, cause
from shoal.transport.process_memory import allow_siblings, place, read_memory

_Everyone = Callable[[Any], list[Any]]
"""Returns what each rank of the group said; a collective."""

_WORD = struct.Struct("<qqqq")  # what, tag, address, bytes
_OFFER, _RETURN, _REFUSE = range(3)
_PATIENCE = 60.0  # seconds for a neighbour, which has just spoken, to connect
_FAREWELL = 5.0  # seconds at exit for neighbours to read what they were offered
_AGAIN = 0.001  # seconds until a word is sent again that did not fit the socket


@dataclass(frozen=True, slots=True, kw_only=True)
class _Door:
    """How the other ranks find this one, and a word to try to read."""

    place: tuple[str, ...]
    """Equal on ranks that can be neighbours."""
    process: int
    name: str
    word: bytes
    address: int


class PeerTransfer:
    """One message each way between this rank and a neighbour."""

    def __init__(self, lock: threading.Condition, peer: int, lent: Tensor, into: Tensor):
        self.peer = peer
        self.lent = lent
        self.into = into
        self.read = False
        """The neighbour's bytes are here."""
        self.returned = False
        """The neighbour has read ours."""
        self.failure: str | None = None
        self._lock = lock

    def wait(self, timeout: float) -> None:
        """Return when both are done. Raises RuntimeError when the neighbour is gone or has failed, or after `timeout`."""
        end = time.monotonic() + timeout
        while not self._over(min(PATIENCE, timeout)) and cause() is None and time.monotonic() < end:
            continue
        with self._lock:
            if not (self.failure or (self.read and self.returned)):
                missing = "was not offered" if not self.read else "was not read"
                self.failure = f"timed out: a message {missing} by rank {self.peer} of the group"  # nor is it taken later
        if self.failure:
            raise RuntimeError(self.failure)

    def _over(self, seconds: float) -> bool:
        with self._lock:
            return bool(self._lock.wait_for(lambda: self.failure or (self.read and self.returned), seconds))


class PeerMemory:
    """The ranks of a group that can read each other's memory, and the thread that reads."""

    def __init__(self, group: dist.ProcessGroup, everyone: _Everyone):
        self._lock = threading.Condition()
        self._places: dict[tuple[int, int], deque[PeerTransfer]] = defaultdict(deque)  # by (peer, tag): waiting for an offer
        self._lent: dict[tuple[int, int], deque[PeerTransfer]] = defaultdict(deque)  # waiting to be returned
        self._offers: dict[tuple[int, int], deque[tuple[int, int]]] = defaultdict(deque)  # waiting for a place
        self._ready: deque[tuple[PeerTransfer, int, int, int]] = deque()  # placed after the offer had come
        self._gone: dict[int, str] = {}
        self._unsaid: dict[int, deque[bytes]] = defaultdict(deque)  # words that did not fit the socket
        self._processes, self._sockets = _meet(dist.get_rank(group), everyone)
        self._wake, self._woken = socket.socketpair()
        if self._sockets:
            _everybody.add(self)
            threading.Thread(target=self._run, name="shoal-neighbours", daemon=True).start()

    def __contains__(self, peer: int) -> bool:
        return peer in self._sockets

    def exchange(self, peer: int, tag: int, lend: Tensor, into: Tensor) -> PeerTransfer:
        """Lend the contiguous `lend` to `peer`, and read what it lends under the same `tag` into `into` (same bytes)."""
        loan = PeerTransfer(self._lock, peer, lend, into)
        key = peer, tag
        with self._lock:
            loan.failure = self._gone.get(peer)
            self._lent[key].append(loan)
            offered = self._offers[key].popleft() if self._offers[key] else None
            if offered is None:
                self._places[key].append(loan)
            else:
                self._ready.append((loan, tag, *offered))
        if offered is not None:
            self._wake.send(b"!")
        self._say(peer, _OFFER, tag, lend.data_ptr(), lend.numel() * lend.element_size())
        return loan

    def close(self) -> None:
        """End the thread and the connections, once the neighbours have read what was offered to them."""
        with self._lock:
            self._lock.wait_for(lambda: self._gone or not any(self._lent.values()), _FAREWELL)
        self._wake.close()

    def forget(self) -> None:
        """Close the descriptors that a forked child inherited: the neighbours must feel this rank's end, not the child's."""
        for connection in (*self._sockets.values(), self._wake, self._woken):
            connection.close()

    def _say(self, peer: int, what: int, tag: int, address: int = 0, size: int = 0) -> None:
        with suppress(OSError):  # the neighbour is gone: the thread finds out, and whoever waits is told
            self._sockets[peer].send(_WORD.pack(what, tag, address, size))

    def _answer(self, peer: int, what: int, tag: int, address: int) -> None:
        """Say a word from the thread, which must not wait: whoever does not listen may wait for it to listen."""
        self._unsaid[peer].append(_WORD.pack(what, tag, address, 0))
        self._speak()

    def _speak(self) -> bool:
        """Say what is unsaid, as far as it goes; return whether that was all."""
        for peer, words in self._unsaid.items():
            with suppress(OSError):
                while words:
                    self._sockets[peer].send(words[0], socket.MSG_DONTWAIT)
                    words.popleft()
            if peer in self._gone:
                words.clear()
        return not any(self._unsaid.values())

    def _run(self) -> None:
        try:
            self._serve()
        finally:  # whoever waits is told, here and there, also when this ends by a fault of its own
            for peer, connection in self._sockets.items():
                self._lose(peer)
                connection.close()

    def _serve(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._woken, selectors.EVENT_READ, -1)
            for peer, connection in self._sockets.items():
                selector.register(connection, selectors.EVENT_READ, peer)
            while True:
                for key, _ in selector.select(None if self._speak() else _AGAIN):
                    if key.data >= 0:
                        if not self._listen(key.data):
                            selector.unregister(key.fileobj)
                    elif not self._woken.recv(64):
                        return
                    while self._ready:
                        self._read(*self._ready.popleft())

    def _listen(self, peer: int) -> bool:
        """Hear one word of `peer`; return whether it is there still."""
        try:
            word = self._sockets[peer].recv(_WORD.size)
        except OSError:
            word = b""
        if not word:
            self._lose(peer)
            return False
        what, tag, address, size = _WORD.unpack(word)
        key = peer, tag
        with self._lock:
            if what in (_RETURN, _REFUSE):
                self._take_back(key, address, refused=what == _REFUSE)
                return True
            if not self._places[key]:
                self._offers[key].append((address, size))
                return True
            loan = self._places[key].popleft()
        self._read(loan, tag, address, size)
        return True

    def _take_back(self, key: tuple[int, int], address: int, *, refused: bool) -> None:
        loan = next((loan for loan in self._lent[key] if loan.lent.data_ptr() == address), None)
        if loan is None:
            return
        self._lent[key].remove(loan)
        loan.returned = True
        if refused:
            loan.failure = loan.failure or f"rank {loan.peer} of the group could not read this rank's memory"
        self._lock.notify_all()

    def _read(self, loan: PeerTransfer, tag: int, address: int, size: int) -> None:
        failure = loan.failure or self._gone.get(loan.peer)
        try:
            if failure is not None:
                raise OSError(failure)
            if size != (wanted := loan.into.numel() * loan.into.element_size()):
                raise OSError(f"{size} bytes were offered where {wanted} are expected")
            read_memory(self._processes[loan.peer], address, loan.into.data_ptr(), size)
            self._answer(loan.peer, _RETURN, tag, address)
        except OSError as error:
            self._answer(loan.peer, _REFUSE, tag, address)
            failure = failure or f"memory of rank {loan.peer} of the group could not be read: {error}"
        with self._lock:
            loan.read, loan.failure = True, loan.failure or failure
            self._lock.notify_all()

    def _lose(self, peer: int) -> None:
        with self._lock:
            self._gone[peer] = f"rank {peer} of the group closed its connection"
            for waiting in (self._places, self._lent):
                for (other, _), loans in waiting.items():
                    if other == peer:
                        for loan in loans:
                            loan.failure = loan.failure or self._gone[peer]
                        loans.clear()
            self._lock.notify_all()


def _meet(rank: int, everyone: _Everyone) -> tuple[dict[int, int], dict[int, socket.socket]]:
    """Return the process and the connection of each neighbour, by rank. Every rank calls it."""
    word = ctypes.create_string_buffer(secrets.token_bytes(16), 16)
    mine = _Door(place=(), process=os.getpid(), name=f"\0shoal-{secrets.token_hex(16)}", word=word.raw,
                 address=ctypes.addressof(word))
    with ExitStack() as stack:
        door: socket.socket | None = None
        with suppress(OSError, AttributeError):  # no Linux: no neighbours
            here = place()
            allow_siblings()
            door = stack.enter_context(_socket())
            door.bind(mine.name)
            door.listen(1024)
            mine = replace(mine, place=here)
        doors: list[_Door] = everyone(mine)
        readable: list[set[int]] = everyone({other for other, it in enumerate(doors) if other != rank and _try(mine, it)})
        neighbours = {other for other in readable[rank] if rank in readable[other]}
        connections: dict[int, socket.socket] = {}
        for other in sorted(neighbours):
            if other < rank:
                with suppress(OSError):
                    connection = _socket()
                    connection.connect(doors[other].name)
                    connection.send(mine.word)
                    connections[other] = connection
        words = {doors[other].word: other for other in neighbours if other > rank}
        with suppress(OSError):  # whoever does not come is no neighbour
            while words and door is not None:
                connection, _ = door.accept()
                connection.settimeout(_PATIENCE)
                if (other := words.pop(connection.recv(16), None)) is not None:
                    connections[other] = connection
        connected: list[set[int]] = everyone(set(connections))
        connections = {other: it for other, it in connections.items() if rank in connected[other]}
        for connection in connections.values():
            connection.settimeout(None)
        return {other: doors[other].process for other in connections}, connections


def _socket() -> socket.socket:
    """Return a local socket that keeps words apart and in order."""
    made = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    made.settimeout(_PATIENCE)
    return made


def _try(mine: _Door, other: _Door) -> bool:
    """Whether the word of `other` can be read from here."""
    if not mine.place or mine.place != other.place:
        return False
    found = ctypes.create_string_buffer(len(other.word))
    try:
        read_memory(other.process, other.address, ctypes.addressof(found), len(other.word))
    except OSError:
        return False
    return found.raw == other.word


_everybody: weakref.WeakSet[PeerMemory] = weakref.WeakSet()


def _forget_all() -> None:
    for known in _everybody:
        known.forget()


os.register_at_fork(after_in_child=_forget_all)

_known: weakref.WeakKeyDictionary[dist.ProcessGroup, PeerMemory] = weakref.WeakKeyDictionary()


def neighbours_of(group: dist.ProcessGroup, everyone: _Everyone) -> PeerMemory:
    """Return the neighbours within `group`. The first call for a group is a collective."""
    if group not in _known:
        _known[group] = PeerMemory(group, everyone)
        weakref.finalize(group, _known[group].close)
    return _known[group]
