"""One order of samples per epoch, whatever the ranks: a global step takes the next samples of it, and ranks share them.

    order      0 1 2 3 4 5 6 7 | 8 9 . .          10 samples, 2 ranks, microbatches of 4
    rank 0     0 1 2 3         | 8
    rank 1             4 5 6 7 |   9

The order depends on the seed and the epoch alone, so a count of delivered samples is the whole position: any number of
ranks, with any batch size, can go on from it. The last step of an epoch may have fewer samples than a global batch. It is
dropped, or dealt in equal shares, so that every rank has as many batches, of one size, as every other; where the shares
do not come out even, the step's first samples fill them up, at most `ranks - 1` of them, and count once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Deal", "Position", "generator", "permutation"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """Where training stands: in which epoch, and how many of its samples all ranks together have been given."""

    epoch: int = 0
    samples: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Deal:
    """How `rank` of `ranks` takes its part of each step: `size` samples, or an equal share of a short last step."""

    size: int
    rank: int
    ranks: int
    drop_last: bool

    @property
    def step(self) -> int:
        """Samples of a whole step, over all ranks."""
        return self.size * self.ranks

    def steps(self, samples: int) -> int:
        """Return how many steps `samples` make."""
        return samples // self.step if self.drop_last else -(-samples // self.step)

    def taken(self, samples: int) -> Iterator[int]:
        """Yield how many of `samples` each step takes."""
        for step in range(self.steps(samples)):
            yield min(self.step, samples - step * self.step)

    def share(self, samples: int) -> Sequence[int]:
        """Return which of a step's `samples` are this rank's; none when the step is short and dropped."""
        if samples >= self.step:
            return range(self.rank * self.size, (self.rank + 1) * self.size)
        if self.drop_last or samples == 0:
            return ()
        share = -(-samples // self.ranks)
        return [place % samples for place in range(self.rank * share, (self.rank + 1) * share)]


def generator(seed: int, epoch: int, rank: int = 0) -> torch.Generator:
    """Return random numbers that belong to this seed, epoch and rank, and leave the process's own alone."""
    mixed = ((seed * 1_000_003 + epoch) * 1_000_003 + rank) % 2**63
    return torch.Generator().manual_seed(mixed)


def permutation(samples: int, seed: int, epoch: int, *, shuffle: bool) -> Tensor:
    """Return the epoch's order of sample indices, 1-D of `samples` integers; 4 bytes a sample below 2**31 samples."""
    dtype = torch.int32 if samples < 2**31 else torch.int64
    if not shuffle:
        return torch.arange(samples, dtype=dtype)
    return torch.randperm(samples, generator=generator(seed, epoch), dtype=dtype)
