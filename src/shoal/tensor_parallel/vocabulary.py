"""Embedding, output head and cross entropy with the vocabulary sliced over the ranks of a tensor axis.

Each rank has ceil(words / ranks) rows of the weight. Rows beyond the vocabulary are zero padding, which takes no part and
gets no gradient. Embedding and head are sliced alike, so that the head may be tied to the embedding:
`head.weight = embedding.weight`.

The loss needs no rank to hold all scores:

    loss = log(sum over ranks of exp(s_r)) - score of the target,    s_r = log(sum of exp(scores)) on rank r

Two numbers a token are sent, three with label smoothing: s_r, the target's score (zero where another rank has it), and the
sum of scores. They are gathered and added in rank order, so that the loss has the same bits on every rank.
"""

# pyright: reportIncompatibleMethodOverride=false

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from shoal.autograd import check_first_derivative
from shoal.errors import UsageError
from shoal.mesh.tensor_slice import TensorSlice, stretch
from shoal.tensor_parallel.axis import Axis, eager
from shoal.tensor_parallel.layers import SlicedLinear, column, sizes_of
from shoal.tensor_parallel.part_init import ParameterSlices, draw_slice
from shoal.tensor_parallel.regions import gather, leave
from shoal.transport.reduction import wide_dtype

__all__ = ["VocabularyEmbedding", "VocabularyHead", "vocabulary_cross_entropy"]

_REDUCTIONS = ("mean", "sum", "none")


class VocabularyEmbedding(nn.Module):
    """An embedding of which each rank holds a contiguous slice of the words.

    The input is whole ids (...), the output their vectors (..., embedding_dim): whole, or with `sequence_dim` split along
    that dim. The row `padding_idx` starts at zero and gets no gradient. Raises `UsageError` for ids out of the vocabulary;
    on an accelerator they fail like any index out of range.

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
        self._slice = TensorSlice.padded(0, num_embeddings, axis.rank, axis.ranks)
        self._rows = stretch(num_embeddings, axis.rank, axis.ranks)
        local = None if self.padding_idx is None else self.padding_idx - self._rows.start
        self._local_padding = local if local is not None and 0 <= local < len(self._rows) else None
        self.weight = nn.Parameter(draw_slice((num_embeddings, embedding_dim), self._slice, self._extent, nn.init.normal_,
                                              device=device, dtype=dtype))
        if self._local_padding is not None:
            with torch.no_grad():
                self.weight[self._local_padding] = 0

    @classmethod
    def from_embedding(cls, module: nn.Embedding, group: dist.ProcessGroup, *, sequence_dim: int | None = None,
                       slices: ParameterSlices | None = None) -> VocabularyEmbedding:
        """Return a layer with this rank's slices of `module`; see `ColumnLinear.from_linear`.

        Raises `UsageError` for one with `max_norm`, `scale_grad_by_freq` or `sparse`.
        """
        options = {"max_norm": module.max_norm, "scale_grad_by_freq": module.scale_grad_by_freq, "sparse": module.sparse}
        for option, value in options.items():
            if value:
                raise UsageError(f"an embedding with {option}={value} cannot be sliced over ranks; leave {option} out")
        layer = VocabularyEmbedding(module.num_embeddings, module.embedding_dim, group, padding_idx=module.padding_idx,
                                    sequence_dim=sequence_dim, device="meta")
        layer.weight = (slices or ParameterSlices()).of(cast(nn.Parameter, module.weight), layer._slice, layer._extent)
        return layer

    @property
    def _extent(self) -> int:
        return len(stretch(self.num_embeddings, 0, self._axis.ranks))

    def cuts(self) -> Mapping[str, TensorSlice]:
        """Return the slice that this rank has of the weight."""
        return {"weight": self._slice}

    def forward(self, ids: Tensor) -> Tensor:
        local = ids - self._rows.start
        foreign = (local < 0) | (local >= len(self._rows))
        if ids.device.type != "cpu":
            foreign &= (ids >= 0) & (ids < self.num_embeddings)  # ids out of range fail on every rank
        elif ids.numel():
            low, high = ids.aminmax()
            if low < 0 or high >= self.num_embeddings:
                raise UsageError(f"VocabularyEmbedding: got ids from {int(low)} to {int(high)}; the vocabulary has "
                                 f"{self.num_embeddings} words, 0 to {self.num_embeddings - 1}")
        vectors = functional.embedding(local.masked_fill_(foreign, 0), self.weight, self._local_padding)
        return leave(vectors.masked_fill_(foreign.unsqueeze(-1), 0), self._axis, self._sequence_dim)

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}, rank {self._axis.rank} of {self._axis.ranks}"


class VocabularyHead(SlicedLinear):
    """A linear layer to the scores (logits) of all words, of which each rank computes those of its slice of the words.

    The input (..., in_features) is whole, or with `sequence_dim` split along that dim, in which case it is gathered. The
    output is whole (..., words) if `gather_output`, else this rank's slice (..., its words), for `vocabulary_cross_entropy`.

    Sent per rank and pass, with n bytes of whole input, N ranks: forward 0, backward 2 n (N-1)/N; with `sequence_dim`
    forward n (N-1)/N, backward twice that; `gather_output` adds (N-1) times the scores of ceil(words / N) words in forward.
    """

    def __init__(self, in_features: int, words: int, group: dist.ProcessGroup, *, bias: bool = False,
                 gather_output: bool = True, sequence_dim: int | None = None, device: torch.device | str | None = None,
                 dtype: torch.dtype | None = None):
        axis = Axis(group)
        own = TensorSlice.padded(0, words, axis.rank, axis.ranks)
        super().__init__(in_features, words, axis, own, own, extent=len(stretch(words, 0, axis.ranks)))
        self._gather_output = gather_output
        self._sequence_dim = sequence_dim
        self.draw(bias=bias, device=device, dtype=dtype)

    @classmethod
    def from_linear(cls, module: nn.Module, group: dist.ProcessGroup, *, gather_output: bool = True,
                    sequence_dim: int | None = None, slices: ParameterSlices | None = None) -> VocabularyHead:
        """Return a layer with this rank's slices of `module`; see `ColumnLinear.from_linear`."""
        inputs, words, bias = sizes_of(module, input_first=False)
        layer = VocabularyHead(inputs, words, group, bias=bias, gather_output=gather_output, sequence_dim=sequence_dim,
                               device="meta")
        return layer.load_slices(module, slices)

    @property
    def axis(self) -> Axis:
        """The ranks that hold slices of the words."""
        return self._axis

    @property
    def sequence_dim(self) -> int | None:
        """The dim along which the input is split."""
        return self._sequence_dim

    def own_words(self) -> tuple[Tensor, Tensor | None]:
        """Return weight and bias of the words of this rank, without padding."""
        words = self.cuts()["weight"].length
        weight, bias = self.weight, self.bias
        return (weight, bias) if words == len(weight) else (weight[:words], None if bias is None else bias[:words])

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = self.own_words()  # padding gets no scores, so that none have to be masked
        scores = column(x, weight, bias, self._axis, self._sequence_dim, self._products_on(x.device))
        return gather(scores, self._axis, -1, self.out_features) if self._gather_output else scores


@eager
def vocabulary_cross_entropy(scores: Tensor, targets: Tensor, group: dist.ProcessGroup, *, words: int,
                             ignore_index: int = -100, reduction: str = "mean", label_smoothing: float = 0.0) -> Tensor:
    """Return the same as torch's `cross_entropy(whole scores, targets)`, computed in fp32 from sliced scores.

    `scores` (..., this rank's words) is the output of a `VocabularyHead(words)` without `gather_output`; `targets` (...)
    are whole ids. Unlike in torch, the words are the last dim. `reduction` is `mean` (over targets that are not ignored),
    `sum` or `none` (...). Raises `UsageError` for other shapes, targets or options.

    Sent per rank: 8 (N-1) bytes a token in forward, 12 with label smoothing, nothing in backward. Held until backward: the
    scores and 4 bytes a token; computed with one fp32 copy of the scores at a time.
    """
    axis = Axis(group)
    rows = stretch(words, axis.rank, axis.ranks)
    if reduction not in _REDUCTIONS:
        raise UsageError(f"vocabulary_cross_entropy: reduction: got {reduction!r}; choose {', '.join(_REDUCTIONS)}")
    if not 0 <= label_smoothing <= 1:
        raise UsageError(f"vocabulary_cross_entropy: label_smoothing: got {label_smoothing}; it lies between 0 and 1")
    if scores.shape[-1] != len(rows) or scores.shape[:-1] != targets.shape:
        raise UsageError(f"vocabulary_cross_entropy: got scores {tuple(scores.shape)} and targets {tuple(targets.shape)}; "
                         f"of {words} words this rank has {len(rows)}, so scores must be {(*targets.shape, len(rows))}: "
                         f"give it what a VocabularyHead of {words} words returns with gather_output=False")
    ignored = targets == ignore_index
    if targets.device.type == "cpu" and (wrong := targets[~ignored & ((targets < 0) | (targets >= words))]).numel():
        raise UsageError(f"vocabulary_cross_entropy: got target {int(wrong[0])}; targets are 0 to {words - 1}, or "
                         f"ignore_index ({ignore_index})")
    losses = cast(Tensor, _CrossEntropy.apply(scores, targets, ignored, axis, rows, words, label_smoothing))
    match reduction:
        case "none":
            return losses
        case "sum":
            return losses.sum()
        case _:
            return losses.sum() / (~ignored).sum()


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, scores: Tensor, targets: Tensor, ignored: Tensor, axis: Axis, rows: range, words: int,
                smoothing: float) -> Tensor:
        local = targets - rows.start
        foreign = (local < 0) | (local >= len(rows)) | ignored
        local.masked_fill_(foreign, 0)
        wide = scores.to(wide_dtype(scores.dtype))
        if rows:
            local_stats = [wide.logsumexp(-1), wide.gather(-1, local.unsqueeze(-1)).squeeze(-1).masked_fill_(foreign, 0)]
        else:
            local_stats = [wide.new_full(targets.shape, -torch.inf), wide.new_zeros(targets.shape)]
        if smoothing:
            local_stats.append(wide.sum(-1))
        sums, own, *totals = axis.all_gather(torch.stack(local_stats)).wait().unbind(1)
        logarithm = sums.logsumexp(0)
        losses = logarithm - (1 - smoothing) * own.sum(0)
        if smoothing:
            losses -= smoothing / words * totals[0].sum(0)
        ctx.save_for_backward(scores, logarithm, local, foreign, ignored)
        ctx.words, ctx.smoothing = words, smoothing
        return losses.masked_fill_(ignored, 0)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None, None, None, None]:
        check_first_derivative("the cross entropy over slices of words", "take a mesh without tensor ranks")
        scores, logarithm, local, foreign, ignored = ctx.saved_tensors
        gradient = gradient.masked_fill(ignored, 0)
        if scores.dtype.itemsize == 1:
            scores = scores.to(logarithm.dtype)  # torch subtracts nothing from float8
        result = (scores - logarithm.unsqueeze(-1)).exp_()
        if ctx.smoothing:
            result -= ctx.smoothing / ctx.words
        if result.shape[-1]:
            own = ((1 - ctx.smoothing) * ~foreign).to(result.dtype).unsqueeze(-1)
            result.scatter_add_(-1, local.unsqueeze(-1), -own)
        result *= gradient.unsqueeze(-1)
        return result.to(scores.dtype), None, None, None, None, None, None
