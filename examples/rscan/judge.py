"""How well queries find their passages on held-out modules: the area under the ROC curve.

    AUC = (R - P (P + 1) / 2) / (P N)

for P positive and N negative scores, R the sum of the positives' ranks among all (Mann and Whitney 1947; ties share the
mean of their ranks). It is the share of (positive, negative) pairs in which the positive has the higher score.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

import shoal
from data import Pairs

NEGATIVES = 8
"""Passages of other functions that each query is compared with."""


def auc(positives: Tensor, negatives: Tensor) -> float:
    """Return the area under the ROC curve of scores; 0.5 is chance."""
    _, places, counts = torch.cat([positives, negatives]).unique(return_inverse=True, return_counts=True)
    ranks = counts.cumsum(0) - (counts - 1) / 2  # of each distinct score, in the middle of those that share it
    found, others = len(positives), len(negatives)
    total = ranks.double()[places[:found]].sum().item()
    return (total - found * (found + 1) / 2) / (found * others)


def drawn(count: int, negatives: int = NEGATIVES) -> Tensor:
    """Draw for each of `count` queries so many passages (count, negatives) that are not its own, always the same."""
    generator = torch.Generator().manual_seed(0)
    away = torch.randint(1, count, (count, negatives), generator=generator)
    return (torch.arange(count)[:, None] + away) % count


class Judge:
    """Judges an engine by held-out pairs; every rank asks, for each encodes its share."""

    def __init__(self, held_out: Pairs) -> None:
        self.pairs = held_out
        self.negatives = drawn(len(held_out))

    @torch.no_grad()
    def __call__(self, engine: shoal.Engine) -> float:
        engine.eval()
        queries, passages = (vectors.cpu() for vectors in self._vectors(engine))
        engine.train()
        positives = (queries * passages).sum(1)
        negatives = (queries[:, None] * passages[self.negatives]).sum(2)
        return auc(positives, negatives.flatten())

    def _vectors(self, engine: shoal.Engine) -> list[Tensor]:
        """Return the vectors of all pairs, of which this rank encodes every `ranks`-th."""
        ranks, count = engine.world_size, len(self.pairs)
        mine = torch.arange(engine.global_rank, engine.global_rank + ranks * -(-count // ranks), ranks).clamp(max=count - 1)
        found = torch.stack(engine(self.pairs.queries[mine].to(engine.device), self.pairs.passages[mine].to(engine.device)))
        shares = [torch.empty_like(found) for _ in range(ranks)]
        dist.all_gather(shares, found)
        return list(torch.stack(shares, 2).flatten(1, 2)[:, :count])
