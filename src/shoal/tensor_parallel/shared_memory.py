"""Ranks of one machine exchange small tensors through ring buffers in shared memory.

    put    copy the tensor into the next slot of this rank's ring, then write its sequence number
    get    wait until the slot of another rank shows the sequence number, copy the tensor, then acknowledge it
    reuse  a slot is written again once every other rank has acknowledged its tensor

Between two ranks that compute at the same pace this costs a few microseconds, where a socket costs a hundred, because no
thread has to be woken. A rank that waits longer yields its core, then sleeps. Each rank holds a lock on one byte of the
file, which the system releases with the process, so that a dead rank is told from a slow one. A sequence number is written
after the data that it announces; processors of the x86 family show writes in that order, and on others there is no ring.
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

SLOT_BYTES = 1 << 20
"""The largest tensor that goes through shared memory."""

SLOTS = 3
"""Slots of a ring. A put waits until the tensor before the last two has been acknowledged."""

_LINE = 64  # bytes of a cache line: two ranks never write to one line
_WORDS = _LINE // 8
_SPINS = 300  # reads of a word before the core is yielded: some 30 microseconds
_YIELDS = 2000  # yields before sleeping
_NAP = 50e-6  # seconds of one sleep
_CHECK_INTERVAL = 0.1  # seconds of sleeping between checks that the other rank lives
_FOLDER = Path("/dev/shm")

_AllGather = Callable[[Any], list[Any]]
"""Returns the value of each rank of the group, by rank; a collective."""


class SharedMemoryRing:
    """A ring of slots for each rank of a group, in one file that all of them map."""

    def __init__(self, file: int, rank: int, ranks: int, timeout: float):
        self.rank = rank
        self.ranks = ranks
        self._file = file
        self._timeout = timeout
        self._memory = mmap.mmap(file, _file_size(ranks))
        header = ranks * SLOTS * (1 + ranks) * _LINE
        self._words = memoryview(self._memory)[:header].cast("q")
        self._slots = torch.frombuffer(self._memory, dtype=torch.uint8, offset=header).view(ranks, SLOTS, SLOT_BYTES)
        self._sequence = 0

    def put(self, tensor: Tensor) -> int:
        """Copy the contiguous `tensor` into this rank's ring and return its sequence number.

        All ranks make the same number of puts.
        """
        self._sequence = number = self._sequence + 1
        slot = number % SLOTS
        for peer in range(self.ranks):
            if peer != self.rank:
                self._await(self._ack_word(self.rank, slot, peer), number - SLOTS, peer)
        self._view(self.rank, slot, 0, tensor).copy_(tensor.view(-1))
        word = self._sequence_word(self.rank, slot)
        self._words[word + 1] = tensor.numel() * tensor.element_size()
        self._words[word] = number
        return number

    def peek(self, peer: int, number: int, like: Tensor, offset: int = 0, sent: Tensor | None = None) -> Tensor:
        """Wait for tensor `number` of `peer`; return a flat view of as many of its elements as `like` has, from `offset` on.

        `sent` has as many bytes as the peer put (by default those of `like`). Raises RuntimeError if the peer put another
        number of bytes.
        """
        word = self._sequence_word(peer, number % SLOTS)
        self._await(word, number, peer)
        expected = like if sent is None else sent
        if self._words[word + 1] != expected.numel() * expected.element_size():
            raise RuntimeError(f"rank {peer} of the group sent {self._words[word + 1]} bytes, and "
                               f"{expected.numel() * expected.element_size()} were expected")
        return self._view(peer, number % SLOTS, offset, like)

    def ack(self, peer: int, number: int) -> None:
        """Let `peer` write again into the slot of `number`."""
        self._words[self._ack_word(peer, number % SLOTS, self.rank)] = number

    def get(self, peer: int, number: int, into: Tensor, offset: int = 0, sent: Tensor | None = None) -> None:
        """Copy tensor `number` of `peer`, from `offset` on, into the contiguous `into`, and acknowledge it; see `peek`."""
        into.view(-1).copy_(self.peek(peer, number, into, offset, sent))
        self.ack(peer, number)

    def _view(self, rank: int, slot: int, offset: int, like: Tensor) -> Tensor:
        width = like.element_size()
        return self._slots[rank, slot, offset * width:(offset + like.numel()) * width].view(like.dtype)

    def _sequence_word(self, rank: int, slot: int) -> int:
        """Return the index of the word with the slot's sequence number; the next word has the tensor's bytes."""
        return (rank * SLOTS + slot) * (1 + self.ranks) * _WORDS

    def _ack_word(self, rank: int, slot: int, reader: int) -> int:
        return self._sequence_word(rank, slot) + (1 + reader) * _WORDS

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
            if now - checked > _CHECK_INTERVAL:
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


def open_ring(rank: int, ranks: int, timeout: float, all_gather: _AllGather) -> SharedMemoryRing | None:
    """Return the ring if all ranks are on one machine and can map one file, else None. A collective call."""
    file, path, token, here = -1, "", secrets.token_hex(16), ()
    ring: SharedMemoryRing | None = None
    with suppress(OSError):  # other systems than Linux: no ring
        here = namespaces()[:2] if platform.machine() in ("x86_64", "AMD64") else ()
        if rank == 0 and here:
            file, path = tempfile.mkstemp(prefix="shoal-", dir=_FOLDER)
            os.posix_fallocate(file, 0, _file_size(ranks))  # a full file system fails here, and not by a signal later
            os.pwrite(file, token.encode(), 0)
    try:
        path, token, there = all_gather((path, token, here))[0]
        if rank != 0 and path and here == there:
            with suppress(OSError):
                file = os.open(path, os.O_RDWR)
        if not all(all_gather(file >= 0 and os.pread(file, len(token), 0) == token.encode())):
            return None
        if rank == 0:
            os.pwrite(file, bytes(len(token)), 0)
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, rank)
        all_gather(None)  # the token is erased before any rank reads a sequence number, and every rank holds its lock
        ring = SharedMemoryRing(file, rank, ranks, timeout)
        weakref.finalize(ring, os.close, file)
        return ring
    finally:
        if rank == 0 and path:
            with suppress(OSError):
                os.unlink(path)
        if ring is None and file >= 0:
            os.close(file)


def _file_size(ranks: int) -> int:
    return ranks * SLOTS * ((1 + ranks) * _LINE + SLOT_BYTES)
