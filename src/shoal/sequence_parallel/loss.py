"""The loss of a split sequence is the mean over all tokens of all its ranks, however many of them count on each.

    loss     = (sum over ranks of their sums) / (sum over ranks of their counts)
    gradient of a rank's sum = ranks / count

The value is the same on every rank. Gradients are averaged over the sequence ranks too, by the engine, hence the factor
`ranks`: the mean of what ranks contribute is then the gradient of the loss.
"""

# pyright: reportIncompatibleMethodOverride=false
# (once_differentiable hides the signature of the backward that it guards.)

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from shoal.errors import UsageError
from shoal.sequence_parallel.axis import SequenceAxis
from shoal.transport.collectives import eager
from shoal.transport.reduction import wide_dtype

__all__ = ["SequenceLoss", "cross_entropy", "mean_loss"]


@eager
def mean_loss(total: Tensor, count: Tensor | float, axis: SequenceAxis) -> Tensor:
    """Return the mean loss of the whole sequence, from the `total` of this rank's `count` tokens; a collective call.

    NaN where no token counts, as in torch. Raises UsageError for a `total` that is not one number.
    """
    if total.numel() != 1:
        raise UsageError(f"mean_loss: total has shape {tuple(total.shape)}; give the sum of the losses of this rank's "
                         f"tokens, and their number as count")
    number = torch.as_tensor(count, dtype=torch.float64, device=total.device).detach()
    return cast(Tensor, _Mean.apply(axis, total.reshape(()), number))


def cross_entropy(logits: Tensor, labels: Tensor, axis: SequenceAxis, *, ignore_index: int = -100,
                  label_smoothing: float = 0.0) -> Tensor:
    """Return the cross entropy of the whole sequence: the mean over its labels but `ignore_index`; a collective call.

    `logits` (..., classes) and `labels` (...) are of this rank's positions; a label belongs to the logits at its position,
    so shift labels before the sequence is split (`split_batch` does).
    """
    if logits.shape[:-1] != labels.shape:
        raise UsageError(f"cross_entropy: logits {tuple(logits.shape)} and labels {tuple(labels.shape)} are not of the same "
                         f"positions; give both of this rank's part of the sequence")
    total = F.cross_entropy(logits.flatten(0, -2).to(wide_dtype(logits.dtype)), labels.flatten(), reduction="sum",
                            ignore_index=ignore_index, label_smoothing=label_smoothing)
    return mean_loss(total, labels.ne(ignore_index).sum(), axis)


class SequenceLoss:
    """The loss of a language model of Hugging Face transformers on a split sequence: its `loss_function`.

    Takes labels that `split_batch` has shifted. Raises UsageError for labels alone, which would be shifted within the
    part of each rank, and for `num_items_in_batch`, which is counted here.
    """

    def __init__(self, axis: SequenceAxis):
        self._axis = axis

    def __call__(self, logits: Tensor, labels: Tensor | None = None, vocab_size: int = 0, *,
                 num_items_in_batch: Any = None, ignore_index: int = -100, shift_labels: Tensor | None = None,
                 **others: Any) -> Tensor:
        """Return the mean cross entropy over the whole sequence."""
        if shift_labels is None:
            raise UsageError("loss on a sequence axis: got labels without shift_labels: the label of each part's last "
                             "position is on another rank; give the model split_batch(batch, axis), which shifts them")
        if num_items_in_batch is not None:
            raise UsageError("loss on a sequence axis: num_items_in_batch is counted over the ranks here; leave it out")
        return cross_entropy(logits, shift_labels.to(logits.device), self._axis, ignore_index=ignore_index)


class _Mean(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, axis: SequenceAxis, total: Tensor, count: Tensor) -> Tensor:
        sums = axis.sum(torch.stack([total.to(torch.float64), count.to(torch.float64)]))
        ctx.factor = float(axis.ranks) / sums[1]
        ctx.dtype = total.dtype
        return (sums[0] / sums[1]).to(total.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor, None]:
        return None, (gradient * ctx.factor).to(ctx.dtype), None
