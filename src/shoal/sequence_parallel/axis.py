"""The ranks that hold the parts of one sequence: rank r of N has positions r n to (r + 1) n of a sequence of N n.

What goes between them is planned once for each kind of call, and compared between the ranks then: they exchange only what
all have planned alike. Messages of different plans have different tags, so that ranks that make different calls later, when
one of them knows its call already and compares nothing, time out, and never take one message for another.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self
from weakref import ref

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.errors import RanksDisagree, UsageError
from shoal.recording.call import Handle
from shoal.transport.collectives import Communicator, Label

__all__ = ["SequenceAxis"]

_TIMEOUT = 600.0
"""Seconds that a rank waits for others, where no configuration says."""


class SequenceAxis:
    """The ranks of a process group that share sequences: `mesh.group("sequence")`, or `engine.sequence`."""

    def __init__(self, group: dist.ProcessGroup | Communicator):
        """Take the group, or the engine's communicator of it. Every rank of the group does so."""
        self.communicator = group if isinstance(group, Communicator) else Communicator(group, timeout=_TIMEOUT)
        self.rank, self.ranks = self.communicator.rank, self.communicator.ranks
        self._numbers: dict[str, int] = {}
        self._joined: tuple[ref[Tensor], int, Tensor] | None = None

    def __deepcopy__(self, memo: object) -> Self:
        return self  # a copied model is split over the same ranks

    def __repr__(self) -> str:
        return f"SequenceAxis(rank {self.rank} of {self.ranks})"

    def agree(self, facts: str) -> int:
        """Return the number of a kind of call, after all ranks have said the same `facts` of it; blocks the first time.

        Raises `RanksDisagree` on every rank where one said others.
        """
        if facts not in self._numbers:
            said = self.communicator.gather_objects(facts)
            for rank, theirs in enumerate(said):
                if theirs != said[0]:
                    raise RanksDisagree(f"sequence axis: ranks call different things: rank 0 has {said[0]}, rank {rank} has "
                                        f"{theirs}; give every rank an equal part of the sequence (split_batch), and the "
                                        f"same layout and heads")
            self._numbers[facts] = self.communicator.register()
        return self._numbers[facts]

    def swap(self, kind: str, facts: str, send: Sequence[Tensor], sizes: Sequence[int]) -> PeerMessages:
        """Start to send each rank a 1-D tensor of bytes, and to receive `sizes` bytes of each; one's own are empty."""
        receive = [send[self.rank].new_empty(size) for size in sizes]
        label = Label(kind=kind, unit=f"attention of {facts}", index=self.agree(facts))
        return PeerMessages(self.communicator.all_to_all(send, receive, label), receive)

    def sum(self, values: Tensor) -> Tensor:
        """Return the sum over the ranks of a few numbers (n,), in fp64, in rank order and hence alike on all."""
        words = values.detach().to(torch.float64).contiguous().view(torch.int64)
        return self.communicator.gather_words(words, "a sum over the parts of a sequence").view(torch.float64).sum(0)

    def join(self, part: Tensor) -> Tensor:
        """Return the whole of a tensor of which each rank has a part (batch, n, ...); without gradients.

        A tensor that is given again, as one mask is to every layer, is not sent again. Raises `UsageError` for one that was
        written to since: whether to send it cannot be decided by one rank.
        """
        version = -1 if part.is_inference() else part._version  # an inference tensor counts no writes
        if self._joined is not None and self._joined[0]() is part:
            if self._joined[1] != version:
                raise UsageError(f"join: this tensor {tuple(part.shape)} was written to since it was joined; give a new one "
                                 f"on every rank, such as part.clone()")
            return self._joined[2]
        facts = f"a tensor {tuple(part.shape)} {part.dtype}".replace("torch.", "")
        flat = part.detach().contiguous().view(-1).view(torch.uint8)
        empty = flat[:0]
        swap = self.swap("sequence exchange", facts, [empty if rank == self.rank else flat for rank in range(self.ranks)],
                         [0 if rank == self.rank else flat.numel() for rank in range(self.ranks)])
        received = swap.wait()
        parts = [part.detach() if rank == self.rank else received[rank].view(part.dtype).view(part.shape)
                 for rank in range(self.ranks)]
        whole = torch.cat(parts, dim=1)
        self._joined = ref(part), version, whole
        return whole

    def part(self, length: int, what: str = "sequence") -> slice:
        """Return this rank's positions of a sequence of `length`. Raises `UsageError` where the ranks do not divide it."""
        if length % self.ranks:
            raise UsageError(f"{what}: length {length} is not divided by the {self.ranks} sequence ranks; pad it to "
                             f"{length + -length % self.ranks}, or change mesh.sequence")
        size = length // self.ranks
        return slice(self.rank * size, (self.rank + 1) * size)


class PeerMessages:
    """Messages under way."""

    def __init__(self, handle: Handle, received: list[Tensor]):
        self._handle = handle
        self._received = received

    def wait(self) -> list[Tensor]:
        """Return the values that the ranks sent, by rank."""
        self._handle.wait()
        return self._received
