"""Ranks of one machine lay small tensors on shelves in shared memory, and take what the others laid there.

    lay    write the tensor to this rank's next place, then its number to the place's label
    take   wait until another rank's label shows the number, read the tensor, then sign the place's slip
    again  a place is written again once everyone has signed for what lay there

Between two ranks that compute at the same pace this costs a few microseconds, where a socket costs a hundred: nobody is
woken. A rank that waits longer yields its core, then sleeps. Each rank holds a lock on one byte of the file, which the
system gives up with the process: so a dead rank is told from a slow one. Numbers are written after what they announce,
and processors of the x86 family show writes in that order; on others there are no shelves.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import platform
import secrets
import tempfile
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shoal.transport.failure_board import POLL_AFTER, published_failure
from shoal.transport.peer_memory import namespaces

PLACE_BYTES = 1 << 20
"""The largest tensor that is laid on a shelf."""

PLACES = 3
"""How many tensors of a rank may lie there at once; to lay one more waits until the oldest has been taken."""

_LINE = 64  # bytes of a cache line: two ranks never write to one
_WORDS = _LINE // 8
_SPINS = 300  # looks at a label before yielding the core: some 30 microseconds
_YIELDS = 2000  # looks between yields before sleeping
_NAP = 50e-6  # seconds
_CHECK = 0.1  # seconds of napping between looks after the other rank's life
_FOLDER = Path("/dev/shm")

_Everyone = Callable[[Any], list[Any]]
"""Returns what each rank of the group said; a collective."""


class SharedMemoryRing:
    """A shelf for each rank of a group, in memory that all of them share."""

    def __init__(self, file: int, rank: int, ranks: int, timeout: float):
        self.rank = rank
        self.ranks = ranks
        self._file = file
        self._timeout = timeout
        self._memory = mmap.mmap(file, _size(ranks))
        labels = ranks * PLACES * (1 + ranks) * _LINE
        self._words = memoryview(self._memory)[:labels].cast("q")
        self._places = torch.frombuffer(self._memory, dtype=torch.uint8, offset=labels).view(ranks, PLACES, PLACE_BYTES)
        self._laid = 0

    def lay(self, tensor: Tensor) -> int:
        """Put a copy of the contiguous `tensor` on this rank's shelf and return its number. Everyone lays equally often."""
        self._laid = number = self._laid + 1
        slot = number % PLACES
        for peer in range(self.ranks):
            if peer != self.rank:
                self._await(self._slip(self.rank, slot, peer), number - PLACES, peer)
        self._place(self.rank, slot, 0, tensor).copy_(tensor.view(-1))
        label = self._label(self.rank, slot)
        self._words[label + 1] = tensor.numel() * tensor.element_size()
        self._words[label] = number
        return number

    def look(self, peer: int, number: int, like: Tensor, offset: int = 0, laid: Tensor | None = None) -> Tensor:
        """Wait for what `peer` laid under `number`; return as many elements of it as `like` has, from `offset` on, flat.

        `laid` has as many bytes as lie there (by default those of `like`). Raises RuntimeError if they are others.
        """
        label = self._label(peer, number % PLACES)
        self._await(label, number, peer)
        wanted = like if laid is None else laid
        if self._words[label + 1] != wanted.numel() * wanted.element_size():
            raise RuntimeError(f"rank {peer} of the group sent {self._words[label + 1]} bytes, and "
                               f"{wanted.numel() * wanted.element_size()} were expected")
        return self._place(peer, number % PLACES, offset, like)

    def sign(self, peer: int, number: int) -> None:
        """Let `peer` write again where `number` lies."""
        self._words[self._slip(peer, number % PLACES, self.rank)] = number

    def take(self, peer: int, number: int, into: Tensor, offset: int = 0, laid: Tensor | None = None) -> None:
        """Copy what `peer` laid under `number`, from `offset` on, into the contiguous `into`."""
        into.view(-1).copy_(self.look(peer, number, into, offset, laid))
        self.sign(peer, number)

    def _place(self, rank: int, slot: int, offset: int, like: Tensor) -> Tensor:
        width = like.element_size()
        return self._places[rank, slot, offset * width:(offset + like.numel()) * width].view(like.dtype)

    def _label(self, rank: int, slot: int) -> int:
        """Return where the number of what lies in a place stands, with its bytes behind it."""
        return (rank * PLACES + slot) * (1 + self.ranks) * _WORDS

    def _slip(self, rank: int, slot: int, reader: int) -> int:
        return self._label(rank, slot) + (1 + reader) * _WORDS

    def _await(self, word: int, number: int, peer: int) -> None:
        words = self._words
        for _ in range(_SPINS):
            if words[word] >= number:
                return
        for _ in range(_YIELDS):
            os.sched_yield()
            if words[word] >= number:
                return
        start = checked = time.monotonic()
        while words[word] < number:
            time.sleep(_NAP)
            now = time.monotonic()
            if now - checked > _CHECK:
                checked = now
                if self._is_gone(peer) and words[word] < number:
                    raise RuntimeError(f"rank {peer} of the group is gone")
                if now - start > POLL_AFTER and published_failure() is not None:
                    raise RuntimeError("another rank failed")
            if now - start > self._timeout:
                raise RuntimeError(f"timed out after {self._timeout:g} s of waiting for rank {peer} of the group")

    def _is_gone(self, peer: int) -> bool:
        with suppress(OSError):
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, peer)
            fcntl.lockf(self._file, fcntl.LOCK_UN, 1, peer)
            return True
        return False


def open_shelves(rank: int, ranks: int, timeout: float, everyone: _Everyone) -> SharedMemoryRing | None:
    """Return shelves if all ranks are on one machine and share its memory, else None. Every rank calls it."""
    file, path, word, here = -1, "", secrets.token_hex(16), ()
    shelves: SharedMemoryRing | None = None
    with suppress(OSError):  # no Linux: no shelves
        here = namespaces()[:2] if platform.machine() in ("x86_64", "AMD64") else ()
        if rank == 0 and here:
            file, path = tempfile.mkstemp(prefix="shoal-", dir=_FOLDER)
            os.posix_fallocate(file, 0, _size(ranks))  # a full file system says so here, and not by a signal later
            os.pwrite(file, word.encode(), 0)
    try:
        path, word, there = everyone((path, word, here))[0]
        if rank != 0 and path and here == there:
            with suppress(OSError):
                file = os.open(path, os.O_RDWR)
        if not all(everyone(file >= 0 and os.pread(file, len(word), 0) == word.encode())):
            return None
        if rank == 0:
            os.pwrite(file, bytes(len(word)), 0)
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, rank)
        everyone(None)  # the word is gone before anybody reads a label there, and everyone holds a lock
        shelves = SharedMemoryRing(file, rank, ranks, timeout)
        weakref.finalize(shelves, os.close, file)
        return shelves
    finally:
        if rank == 0 and path:
            with suppress(OSError):
                os.unlink(path)
        if shelves is None and file >= 0:
            os.close(file)


def _size(ranks: int) -> int:
    return ranks * PLACES * ((1 + ranks) * _LINE + PLACE_BYTES)
