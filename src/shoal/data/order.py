"""Each epoch has one global sample order; each step takes its next samples and divides them over the data ranks.

    order      0 1 2 3 4 5 6 7 | 8 9 . .          10 samples, 2 ranks, microbatches of 4
    rank 0     0 1 2 3         | 8
    rank 1             4 5 6 7 |   9

The order depends on the seed and the epoch only. The number of delivered samples is therefore the whole position, and
any number of ranks with any batch size can resume from it. The last step of an epoch may have fewer samples than a global
batch. It is dropped, or divided into equal shares, so that all ranks have the same number of batches of the same size.
When the samples do not divide evenly, at most `ranks - 1` of the step's first samples are repeated as padding; each
sample counts once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Position", "SampleRange", "StepSplit", "generator", "permutation"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """The epoch, and the number of its samples that have been delivered over all ranks."""

    epoch: int = 0
    samples: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleRange:
    """Samples of an epoch's order, without those that are left out."""

    epoch: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSplit:
    """The share of each step that `rank` takes: `size` samples, or an equal share of a short last step."""

    size: int
    rank: int
    ranks: int
    drop_last: bool

    @property
    def step_samples(self) -> int:
        """Samples of a full step, over all ranks."""
        return self.size * self.ranks

    def steps(self, samples: int) -> int:
        """Return the number of steps that `samples` give."""
        return samples // self.step_samples if self.drop_last else -(-samples // self.step_samples)

    def step_sizes(self, samples: int) -> Iterator[int]:
        """Yield the number of samples that each step takes."""
        for step in range(self.steps(samples)):
            yield min(self.step_samples, samples - step * self.step_samples)

    def share(self, samples: int) -> Sequence[int]:
        """Return the indices, within a step of `samples`, that this rank takes; empty if the step is short and dropped."""
        if samples >= self.step_samples:
            return range(self.rank * self.size, (self.rank + 1) * self.size)
        if self.drop_last or samples == 0:
            return ()
        share = -(-samples // self.ranks)
        return [index % samples for index in range(self.rank * share, (self.rank + 1) * share)]


def generator(seed: int, epoch: int, rank: int = 0) -> torch.Generator:
    """Return a generator seeded by seed, epoch and rank, so that the global generator is not used."""
    mixed = ((seed * 1_000_003 + epoch) * 1_000_003 + rank) % 2**63
    return torch.Generator().manual_seed(mixed)


def permutation(samples: int, seed: int, epoch: int, *, shuffle: bool, left_out: frozenset[int] = frozenset()) -> Tensor:
    """Return the sample order of an epoch: a 1-D tensor of indices, int32 below 2**31 samples, else int64.

    It has all of the `samples` but those that are `left_out`, which change nothing about the order of the others.
    """
    dtype = torch.int32 if samples < 2**31 else torch.int64
    order = (torch.randperm(samples, generator=generator(seed, epoch), dtype=dtype, device="cpu") if shuffle
             else torch.arange(samples, dtype=dtype, device="cpu"))
    return order[~torch.isin(order, torch.tensor(sorted(left_out), dtype=dtype, device="cpu"))] if left_out else order
