"""Two towers over one table and one reader: a query and a passage lie close together where they belong together.

    vector(text) = W max_t [GRU forward_t, GRU backward_t]        over the table's rows of its words; then of length 1
    loss         = -log softmax(scale q . p)                      within groups of the batch, each other's negatives

Both towers share the reader, for the words of a docstring are also those of its source.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from data import NOTHING

SCALE = 16.0
"""Factor of the cosines before the softmax: an inverse temperature."""

GROUP = 32
"""Pairs among which a query must find its passage, so that a batch means the same however many ranks share it."""

FORGOTTEN = 0.3
"""The share of words that are left out in training, so that no single one is relied on."""


class TwoTowers(nn.Module):
    """Queries and passages (batch, length), as rows of the table, into vectors (batch, `vector`) of length 1.

    `sparse` is torch's: the gradient of the table then holds only the rows that a batch has touched.
    """

    def __init__(self, *, rows: int, dim: int = 64, hidden: int = 64, vector: int = 128, sparse: bool = False) -> None:
        super().__init__()
        self.table = nn.Embedding(rows, dim, padding_idx=NOTHING, sparse=sparse)
        self.reader = nn.GRU(dim, hidden, batch_first=True, bidirectional=True)
        self.project = nn.Linear(2 * hidden, vector, bias=False)

    def forward(self, queries: Tensor, passages: Tensor) -> tuple[Tensor, Tensor]:
        """Return the vectors of queries and of passages."""
        return self.read(queries), self.read(passages)

    def read(self, texts: Tensor) -> Tensor:
        """Return the vectors of texts, of which training forgets some words."""
        lengths = (texts != NOTHING).sum(1).clamp(min=1)
        if self.training:
            texts = texts.masked_fill(torch.rand(texts.shape, device=texts.device) < FORGOTTEN, NOTHING)
        packed = pack_padded_sequence(self.table(texts), lengths.cpu(), batch_first=True, enforce_sorted=False)
        states, _ = pad_packed_sequence(self.reader(packed)[0], batch_first=True, padding_value=-2.0)  # states are above -1
        return F.normalize(self.project(states.amax(1)), dim=-1)


def matching_loss(queries: Tensor, passages: Tensor) -> Tensor:
    """Return the mean cross-entropy of finding each query's passage within its group, and each passage's query.

    Raises `ValueError` for a batch (batch, vector) that is no whole number of groups, nor smaller than one.
    """
    group = min(GROUP, len(queries))
    if len(queries) % group:
        raise ValueError(f"a rank's microbatch of {len(queries)} pairs is no multiple of {GROUP}; change train_batch_size "
                         f"or the number of ranks")
    q, p = (vectors.unflatten(0, (-1, group)) for vectors in (queries, passages))
    scores = SCALE * q @ p.mT
    right = torch.arange(group, device=scores.device).expand(len(scores), -1)
    return (F.cross_entropy(scores, right) + F.cross_entropy(scores.mT, right)) / 2
