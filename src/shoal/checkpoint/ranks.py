"""The ranks of a checkpoint communicate over a dedicated gloo group, one save or load at a time, in program order.

The group is dedicated because a save communicates from a background thread while training communicates from the main
thread. Two threads that share a group can pair their messages differently on each rank.

Operations are serialized by `lock`, because a load can begin while a save is still running. Every rank acquires the lock in
program order, and the thread of a save releases it.

Messages are bytes (JSON), never pickles.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.checkpoint.tensor_file import memory
from shoal.errors import CheckpointDamaged, CheckpointError, ShoalError

__all__ = ["Ranks"]

SHORT = 120
"""Bytes of a message that travel with its size; most messages say that nothing failed, and are empty."""

DAMAGE = b"\0"
"""The first byte of an error that is a `CheckpointDamaged`."""

T = TypeVar("T")


class Ranks:
    """The ranks that write or read a checkpoint together."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        """Use `group`, a gloo group without other users; None means a single rank. `Ranks.join` creates the group."""
        self._group = group
        self.rank = 0 if group is None else group.rank()
        self.count = 1 if group is None else group.size()
        self.lock = threading.Lock()

    @classmethod
    def join(cls, group: dist.ProcessGroup | None = None, timeout: timedelta = timedelta(hours=2)) -> Ranks:
        """Create a dedicated group for the ranks of `group` (None: all ranks). A collective call of these ranks.

        `timeout` bounds the time that ranks wait for the slowest writer. Without an initialized process group the
        checkpoint has one rank.
        """
        if not dist.is_initialized():
            return cls()
        members = dist.get_process_group_ranks(group or dist.group.WORLD)
        # With local synchronization torch names the group by a per-rank counter, which must be equal on all members.
        subgroup = len(members) < dist.get_world_size()
        own = dist.new_group(members, timeout=timeout, backend="gloo", use_local_synchronization=subgroup)
        assert isinstance(own, dist.ProcessGroup), "this rank is not a member of the group"
        return cls(own)

    def all_gather(self, message: bytes) -> list[bytes]:
        """Return the messages of all ranks, in rank order, on all ranks."""
        if self._group is None:
            return [message]
        sizes, begins = self._first_exchange(message)
        width = max(sizes) - SHORT
        if width <= 0:
            return begins
        received = [torch.empty(width, dtype=torch.uint8, device="cpu") for _ in sizes]
        # group methods, because dist.all_gather fails once the default group is destroyed
        self._wait(self._group.allgather([received], [_padded(message[SHORT:], width)]))
        return [begin + _bytes(data, max(0, size - SHORT))
                for begin, data, size in zip(begins, received, sizes, strict=True)]

    def gather(self, message: bytes) -> list[bytes]:
        """Return the messages of all ranks, in rank order, on rank 0, and an empty list on other ranks."""
        if self._group is None:
            return [message]
        sizes, _ = self._first_exchange(message)
        width = max(1, *sizes)
        received = [torch.empty(width, dtype=torch.uint8, device="cpu") for _ in sizes] if self.rank == 0 else []
        options = dist.GatherOptions()
        options.rootRank = 0
        self._wait(self._group.gather([received] if received else [], [_padded(message, width)], options))
        return [_bytes(data, size) for data, size in zip(received, sizes, strict=False)]

    def exchange(self, *, sent: Sequence[tuple[Tensor, int]] = (), received: Sequence[tuple[Tensor, int]] = ()) -> None:
        """Send tensors of bytes to ranks, and fill tensors with what ranks send here; both ends of a message must take part.

        The messages from one rank to another keep their order.
        """
        assert self._group is not None or not (sent or received)
        if self._group is not None:
            works = [self._group.recv([data], rank, 0) for data, rank in received]
            works += [self._group.send([data], rank, 0) for data, rank in sent]
            for work in works:
                self._wait(work)

    def run_collectively(self, failure: str, action: Callable[[], T]) -> T:
        """Return `action()` if it succeeds on every rank; otherwise raise on every rank, with the ranks and causes.

        A collective call. Raises CheckpointError; its message begins with `failure`. It is a CheckpointDamaged, on every
        rank, where no rank failed for another reason.
        """
        result: list[T] = []
        cause: Exception | None = None
        try:
            result.append(action())
        except Exception as error:  # any error: the other ranks wait for this rank's result
            cause = error
        mark = DAMAGE if isinstance(cause, CheckpointDamaged) else b""
        errors = self.all_gather(b"" if cause is None else mark + (_text(cause) or "?").encode())
        if any(errors):
            kind = CheckpointDamaged if all(each.startswith(DAMAGE) for each in errors if each) else CheckpointError
            raise kind(f"{failure}: {_joined([each.removeprefix(DAMAGE) for each in errors])}") from cause
        return result[0]

    def _first_exchange(self, message: bytes) -> tuple[list[int], list[bytes]]:
        """Return the sizes of the messages of all ranks, and up to `SHORT` bytes of each."""
        assert self._group is not None
        record = _padded(len(message).to_bytes(8, "little") + message[:SHORT], 8 + SHORT)
        received = [torch.empty_like(record) for _ in range(self.count)]
        self._wait(self._group.allgather([received], [record]))
        records = [bytes(memory(each)) for each in received]
        sizes = [int.from_bytes(each[:8], "little") for each in records]
        return sizes, [each[8:8 + min(size, SHORT)] for each, size in zip(records, sizes, strict=True)]

    def _wait(self, work: dist.Work) -> None:
        try:
            work.wait()
        except RuntimeError as error:
            raise CheckpointError(
                f"rank {self.rank} lost its connection to another rank during a checkpoint ({str(error).splitlines()[0]}); "
                "see the log of the rank that failed first"
            ) from error


def _padded(message: bytes, size: int) -> torch.Tensor:
    data = torch.zeros(size, dtype=torch.uint8, device="cpu")
    if message:
        data[: len(message)] = torch.frombuffer(bytearray(message), dtype=torch.uint8)
    return data


def _bytes(data: torch.Tensor, size: int) -> bytes:
    return bytes(memory(data)[:size])


def _text(error: Exception) -> str:
    return str(error) if isinstance(error, ShoalError | OSError) else f"{type(error).__name__}: {error}"


def _joined(messages: list[bytes]) -> str:
    """Join the error messages of the ranks; if all are equal, return one."""
    if len(set(messages)) == 1:
        return messages[0].decode()
    faults = [f"rank {rank}: {message.decode()}" for rank, message in enumerate(messages) if message]
    return faults[0] if len(faults) == 1 else "\n  ".join(["", *faults])
