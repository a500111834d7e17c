"""The ranks of a checkpoint talk over a group of their own, one conversation at a time, in the order of the program.

Their own group, because a save talks from a thread while training talks from the main one, and two threads of one group
may pair their messages differently on each rank. One conversation at a time, because a load may begin while a save is
still talking: `turn` is taken in program order on every rank, and a save hands it back from its thread.

What travels is bytes (JSON), never pickles.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist

from shoal.checkpoint.tensor_file import memory
from shoal.errors import CheckpointError, ShoalError

__all__ = ["Ranks"]

T = TypeVar("T")


class Ranks:
    """The ranks that write or read a checkpoint together."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        """Take a gloo group that nothing else uses; None means one rank alone.

        Use `Ranks.join` to create the group.
        """
        self._group = group
        self.rank = 0 if group is None else group.rank()
        self.count = 1 if group is None else group.size()
        self.turn = threading.Lock()

    @classmethod
    def join(cls, group: dist.ProcessGroup | None = None, timeout: timedelta = timedelta(hours=2)) -> Ranks:
        """Create the own group for the ranks of `group` (None: all ranks of the job); a collective call of these ranks.

        `timeout` bounds how long ranks wait for the slowest writer. Without an initialised process group the
        checkpoint has one rank.
        """
        if not dist.is_initialized():
            return cls()
        members = dist.get_process_group_ranks(group or dist.group.WORLD)
        alone = len(members) < dist.get_world_size()  # named by how many groups a member has made: must be equal on all
        own = dist.new_group(members, timeout=timeout, backend="gloo", use_local_synchronization=alone)
        assert isinstance(own, dist.ProcessGroup), "this rank is no member of the group that it asked to join"
        return cls(own)

    def exchange(self, message: bytes) -> list[bytes]:
        """Return the messages of all ranks, on all ranks, by rank."""
        if self._group is None:
            return [message]
        sizes = self._sizes(message)
        width = max(1, *sizes)
        received = [torch.empty(width, dtype=torch.uint8) for _ in sizes]
        # the group's methods and not dist.all_gather: that one refuses once the default group is destroyed
        self._finish(self._group.allgather([received], [_padded(message, width)]))
        return [_bytes(data, size) for data, size in zip(received, sizes, strict=True)]

    def gather(self, message: bytes) -> list[bytes]:
        """Return the messages of all ranks on rank 0, by rank, and nothing elsewhere."""
        if self._group is None:
            return [message]
        sizes = self._sizes(message)
        width = max(1, *sizes)
        received = [torch.empty(width, dtype=torch.uint8) for _ in sizes] if self.rank == 0 else []
        options = dist.GatherOptions()
        options.rootRank = 0
        self._finish(self._group.gather([received] if received else [], [_padded(message, width)], options))
        return [_bytes(data, size) for data, size in zip(received, sizes, strict=False)]

    def together(self, doing: str, action: Callable[[], T]) -> T:
        """Return `action()` when it succeeds on every rank; otherwise raise on every rank, naming who failed and why.

        A collective call. Raises CheckpointError; `doing` begins its message.
        """
        result: list[T] = []
        cause: Exception | None = None
        try:
            result.append(action())
        except Exception as error:  # whatever it was, the other ranks wait for this one's word
            cause = error
        said = self.exchange(b"" if cause is None else (_text(cause) or "?").encode())
        if any(said):
            raise CheckpointError(f"{doing}: {_who_said(said)}") from cause
        return result[0]

    def _sizes(self, message: bytes) -> list[int]:
        assert self._group is not None
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.count)]
        self._finish(self._group.allgather([sizes], [torch.tensor([len(message)])]))
        return [int(size) for size in sizes]

    def _finish(self, work: dist.Work) -> None:
        try:
            work.wait()
        except RuntimeError as error:
            raise CheckpointError(
                f"rank {self.rank} lost another rank during a checkpoint ({str(error).splitlines()[0]}); "
                "see the log of the rank that left first"
            ) from error


def _padded(message: bytes, size: int) -> torch.Tensor:
    data = torch.zeros(size, dtype=torch.uint8)
    if message:
        data[: len(message)] = torch.frombuffer(bytearray(message), dtype=torch.uint8)
    return data


def _bytes(data: torch.Tensor, size: int) -> bytes:
    return bytes(memory(data)[:size])


def _text(error: Exception) -> str:
    return str(error) if isinstance(error, ShoalError | OSError) else f"{type(error).__name__}: {error}"


def _who_said(messages: list[bytes]) -> str:
    """Join the failures of the ranks; one that all met is said once."""
    if len(set(messages)) == 1:
        return messages[0].decode()
    faults = [f"rank {rank}: {message.decode()}" for rank, message in enumerate(messages) if message]
    return faults[0] if len(faults) == 1 else "\n  ".join(["", *faults])
