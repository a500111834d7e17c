"""Cross entropy of scores whose vocabulary is cut over the ranks, without any rank seeing all scores.

    loss = log(sum over ranks of exp(s_r)) - score of the target,    s_r = log(sum of exp(scores)) on rank r

Two numbers a token travel, three with label smoothing: s_r, the target's score (zero where another rank has it), and the
sum of scores. They are gathered, and added in rank order, so that the loss has the same bits on every rank.
"""

# pyright: reportIncompatibleMethodOverride=false
# (once_differentiable hides the signature of the backward that it guards.)

from __future__ import annotations

from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from shoal.errors import UsageError
from shoal.mesh.tensor_slice import stretch
from shoal.tensor_parallel.axis import Axis, eager

__all__ = ["vocabulary_cross_entropy"]

_REDUCTIONS = ("mean", "sum", "none")


@eager
def vocabulary_cross_entropy(scores: Tensor, targets: Tensor, group: dist.ProcessGroup, *, words: int,
                             ignore_index: int = -100, reduction: str = "mean", label_smoothing: float = 0.0) -> Tensor:
    """Return what `cross_entropy(whole scores, targets)` of torch does, in fp32.

    `scores` (..., this rank's words) are what a `VocabularyHead(words)` gives without `gather_output`, `targets` (...) whole
    ids. Unlike torch's, the words are the last dim. `reduction` is `mean` (over targets that are not ignored), `sum` or
    `none` (...).

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
        wide = scores.to(torch.promote_types(scores.dtype, torch.float32))
        if rows:
            said = [wide.logsumexp(-1), wide.gather(-1, local.unsqueeze(-1)).squeeze(-1).masked_fill_(foreign, 0)]
        else:
            said = [wide.new_full(targets.shape, -torch.inf), wide.new_zeros(targets.shape)]
        if smoothing:
            said.append(wide.sum(-1))
        sums, own, *totals = axis.all_gather(torch.stack(said)).wait().unbind(1)
        logarithm = sums.logsumexp(0)
        losses = logarithm - (1 - smoothing) * own.sum(0)
        if smoothing:
            losses -= smoothing / words * totals[0].sum(0)
        ctx.save_for_backward(scores, logarithm, local, foreign, ignored)
        ctx.words, ctx.smoothing = words, smoothing
        return losses.masked_fill_(ignored, 0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None, None, None, None]:
        scores, logarithm, local, foreign, ignored = ctx.saved_tensors
        gradient = gradient.masked_fill(ignored, 0)
        result = (scores - logarithm.unsqueeze(-1)).exp_()
        if ctx.smoothing:
            result -= ctx.smoothing / ctx.words
        if result.shape[-1]:
            own = ((1 - ctx.smoothing) * ~foreign).to(result.dtype).unsqueeze(-1)
            result.scatter_add_(-1, local.unsqueeze(-1), -own)
        result *= gradient.unsqueeze(-1)
        return result.to(scores.dtype), None, None, None, None, None, None
