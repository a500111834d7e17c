"""Embedding and output head with the vocabulary cut over the ranks: equal runs of words, the last padded invisibly.

Each rank has ceil(words / ranks) rows, of which those beyond the vocabulary are zero, take no part and get no gradient. The
two layers are cut alike, so that a head may be tied to an embedding: `head.weight = embedding.weight`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from shoal.errors import UsageError
from shoal.mesh.tensor_slice import TensorSlice, stretch
from shoal.tensor_parallel.axis import Axis
from shoal.tensor_parallel.layers import CutLinear, sizes_of
from shoal.tensor_parallel.linear import column
from shoal.tensor_parallel.part_init import Taken, drawn
from shoal.tensor_parallel.regions import gather, leave

__all__ = ["VocabularyEmbedding", "VocabularyHead"]


class VocabularyEmbedding(nn.Module):
    """An embedding of which every rank holds a run of the words.

    Takes whole ids (...) and returns their vectors (..., embedding_dim): whole, or with `sequence_dim` split along that dim.
    The row `padding_idx` starts at zero and gets no gradient. Raises `UsageError` for ids out of the vocabulary; on an
    accelerator they fail as an index out of range does there.

    Sent per rank and pass, with n bytes of whole output and N ranks: forward 2 n (N-1)/N, backward 0; with `sequence_dim`
    forward and backward n (N-1)/N each.
    """

    def __init__(self, num_embeddings: int, embedding_dim: int, group: dist.ProcessGroup, *, padding_idx: int | None = None,
                 sequence_dim: int | None = None, device: torch.device | str | None = None,
                 dtype: torch.dtype | None = None):
        super().__init__()
        if padding_idx is not None and not -num_embeddings <= padding_idx < num_embeddings:
            raise UsageError(f"VocabularyEmbedding: padding_idx: got {padding_idx}; the vocabulary has {num_embeddings} "
                             f"words: give 0 to {num_embeddings - 1}, or one from the end, -{num_embeddings} to -1")
        self.num_embeddings = num_embeddings
        self.embedding_dim = embedding_dim
        self.padding_idx = padding_idx if padding_idx is None else padding_idx % num_embeddings
        self._sequence_dim = sequence_dim
        self._axis = axis = Axis(group)
        self._cut = TensorSlice.padded(0, num_embeddings, axis.rank, axis.ranks)
        self._rows = stretch(num_embeddings, axis.rank, axis.ranks)
        local = None if self.padding_idx is None else self.padding_idx - self._rows.start
        self._local_padding = local if local is not None and 0 <= local < len(self._rows) else None
        self.weight = nn.Parameter(drawn((num_embeddings, embedding_dim), self._cut, self._extent, nn.init.normal_,
                                         device=device, dtype=dtype))
        if self._local_padding is not None:
            with torch.no_grad():
                self.weight[self._local_padding] = 0

    @classmethod
    def from_embedding(cls, module: nn.Embedding, group: dist.ProcessGroup, *, sequence_dim: int | None = None,
                       taken: Taken | None = None) -> VocabularyEmbedding:
        """Return a layer with this rank's part of `module`; see `ColumnLinear.from_linear`.

        Raises `UsageError` for one with `max_norm`, `scale_grad_by_freq` or `sparse`.
        """
        options = {"max_norm": module.max_norm, "scale_grad_by_freq": module.scale_grad_by_freq, "sparse": module.sparse}
        for option, value in options.items():
            if value:
                raise UsageError(f"an embedding with {option}={value} cannot be cut over ranks; leave {option} out")
        layer = VocabularyEmbedding(module.num_embeddings, module.embedding_dim, group, padding_idx=module.padding_idx,
                                    sequence_dim=sequence_dim, device="meta")
        layer.weight = (taken or Taken()).take(cast(nn.Parameter, module.weight), layer._cut, layer._extent)
        return layer

    @property
    def _extent(self) -> int:
        return len(stretch(self.num_embeddings, 0, self._axis.ranks))

    def cuts(self) -> Mapping[str, TensorSlice]:
        """Return the cut of the weight."""
        return {"weight": self._cut}

    def forward(self, ids: Tensor) -> Tensor:
        local = ids - self._rows.start
        foreign = (local < 0) | (local >= len(self._rows))
        if ids.device.type != "cpu":
            foreign &= (ids >= 0) & (ids < self.num_embeddings)  # others are out of range on every rank, and say so
        elif ids.numel():
            low, high = ids.aminmax()
            if low < 0 or high >= self.num_embeddings:
                raise UsageError(f"VocabularyEmbedding: got ids from {int(low)} to {int(high)}; the vocabulary has "
                                 f"{self.num_embeddings} words, 0 to {self.num_embeddings - 1}")
        found = functional.embedding(local.masked_fill_(foreign, 0), self.weight, self._local_padding)
        return leave(found.masked_fill_(foreign.unsqueeze(-1), 0), self._axis, self._sequence_dim)

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}, rank {self._axis.rank} of {self._axis.ranks}"


class VocabularyHead(CutLinear):
    """A linear layer to the scores of all words, of which every rank computes those of its run.

    The input (..., in_features) is whole, or with `sequence_dim` split along that dim, in which case it is gathered. The
    output is whole (..., words) if `gather_output`, else this rank's run (..., its words), for `vocabulary_cross_entropy`.

    Sent per rank and pass, with n bytes of whole input, N ranks: forward 0, backward 2 n (N-1)/N; with `sequence_dim`
    forward n (N-1)/N, backward twice that; `gather_output` adds (N-1) times the scores of ceil(words / N) words in forward.
    """

    def __init__(self, in_features: int, words: int, group: dist.ProcessGroup, *, bias: bool = False,
                 gather_output: bool = True, sequence_dim: int | None = None, device: torch.device | str | None = None,
                 dtype: torch.dtype | None = None):
        axis = Axis(group)
        cut = TensorSlice.padded(0, words, axis.rank, axis.ranks)
        super().__init__(in_features, words, axis, cut, cut, extent=len(stretch(words, 0, axis.ranks)))
        self._gather_output = gather_output
        self._sequence_dim = sequence_dim
        self.draw(bias=bias, device=device, dtype=dtype)

    @classmethod
    def from_linear(cls, module: nn.Module, group: dist.ProcessGroup, *, gather_output: bool = True,
                    sequence_dim: int | None = None, taken: Taken | None = None) -> VocabularyHead:
        """Return a layer with this rank's part of `module`; see `ColumnLinear.from_linear`."""
        inputs, words, bias = sizes_of(module, input_first=False)
        layer = VocabularyHead(inputs, words, group, bias=bias, gather_output=gather_output, sequence_dim=sequence_dim,
                               device="meta")
        return layer.adopt(module, taken)

    def forward(self, x: Tensor) -> Tensor:
        words = self.cuts()["weight"].length
        weight, bias = self.weight, self.bias
        if words < weight.shape[0]:  # scores of padding never exist, and nothing must mask them
            weight, bias = weight[:words], None if bias is None else bias[:words]
        scores = column(x, weight, bias, self._axis, self._sequence_dim)
        return gather(scores, self._axis, -1, self.out_features) if self._gather_output else scores
