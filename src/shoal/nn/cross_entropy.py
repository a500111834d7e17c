"""Cross entropy of logits; where there is a fused pass for them, it reads and writes each row once.

    z    = logsumexp(logits)
    loss = z - (1 - s) logits[target] - s mean(logits) + c z^2              s: label smoothing, c: the weight of the z-loss
    dloss / dlogits = (1 + 2 c z) softmax(logits) - (1 - s) onehot(target) - s / words

Saved for backward: the logits themselves, where torch's `cross_entropy` saves their log-softmax too. fp32 in host memory is
computed natively (layers.cpp), and on an accelerator Triton computes where it serves; elsewhere torch does. The z-loss is
that of Chowdhery et al. 2022 (arXiv 2204.02311, section 5).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from shoal.errors import UsageError
from shoal.nn.passes import fused_passes
from shoal.transport.reduction import wide_dtype

__all__ = ["REDUCTIONS", "Reduction", "TokenLoss", "check_targets", "coded_targets", "cross_entropy", "mean_of_counted"]

Reduction = Literal["mean", "sum", "none"]
REDUCTIONS: tuple[Reduction, ...] = ("mean", "sum", "none")


def cross_entropy(logits: Tensor, targets: Tensor, *, ignore_index: int = -100, label_smoothing: float = 0.0,
                  z_loss: float = 0.0, reduction: Reduction = "mean") -> Tensor:
    """Return the cross entropy of `logits` (..., words) and `targets` (...), ids of words; computed in fp32.

    The same as torch's `cross_entropy(logits.float(), targets)` of flat tensors, with z_loss x logsumexp(logits)^2 added
    to the loss of each token; "none" gives losses (...). Raises UsageError for shapes or targets that do not fit.
    """
    if logits.shape[:-1] != targets.shape or not logits.dim():
        raise UsageError(f"cross_entropy: got logits {tuple(logits.shape)} and targets {tuple(targets.shape)}; they are "
                         f"(..., words) and (...)")
    if reduction not in REDUCTIONS:
        raise UsageError(f"cross_entropy: reduction: got {reduction!r}; choose {', '.join(REDUCTIONS)}")
    if not 0 <= label_smoothing <= 1 or not z_loss >= 0:
        raise UsageError(f"cross_entropy: got label_smoothing {label_smoothing} and z_loss {z_loss}; the first lies between "
                         f"0 and 1, the second is 0 or more")
    targets = check_targets("cross_entropy", targets, logits.shape[-1], ignore_index, logits.device)
    counted = targets != ignore_index
    form = TokenLoss(smoothing=label_smoothing, z_loss=z_loss)
    if fused_passes(logits, tiled=True) is None:
        losses = form.by_torch(logits, targets, counted)
    else:
        losses = cast(Tensor, _CrossEntropyPass.apply(logits, coded_targets(targets, counted, logits.shape[-1]), form))
    match reduction:
        case "none":
            return losses.view(logits.shape[:-1])
        case "sum":
            return losses.sum()
        case "mean":
            return mean_of_counted(losses, counted)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLoss:
    """The loss of one token."""

    smoothing: float = 0.0
    z_loss: float = 0.0

    def by_torch(self, logits: Tensor, targets: Tensor, counted: Tensor) -> Tensor:
        """Return the losses (tokens,) of `logits` (..., words); 0 where a token is not counted."""
        logits = logits.reshape(-1, logits.shape[-1]).to(wide_dtype(logits.dtype))
        losses = F.cross_entropy(logits, targets.masked_fill(~counted, -100), label_smoothing=self.smoothing,
                                 reduction="none")
        return losses + self.z_loss * logits.logsumexp(-1).square() * counted if self.z_loss else losses

    def fused(self, logits: Tensor, targets: Tensor, scales: Tensor | None = None) -> tuple[Tensor, Tensor] | None:
        """Return losses and logsumexps (tokens,) of contiguous `logits` (tokens, words); None where no pass serves.

        With `scales` (tokens,), the logits are replaced by the gradient of the losses times the scales. `targets` are those
        of `coded_targets`.
        """
        passes = fused_passes(logits, *(() if scales is None else (scales,)), tiled=True)
        if passes is None:
            return None
        return passes.cross_entropy(logits, targets.contiguous(), None if scales is None else scales.contiguous(),
                                    smoothing=self.smoothing, z_loss=self.z_loss)


class _CrossEntropyPass(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, form: TokenLoss) -> Tensor:
        ctx.save_for_backward(logits, targets)
        ctx.form = form
        found = form.fused(logits.reshape(-1, logits.shape[-1]).contiguous(), targets)
        assert found is not None
        return found[0]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        logits, targets = ctx.saved_tensors
        if torch.is_grad_enabled():  # with create_graph: torch's operations have second derivatives
            losses = ctx.form.by_torch(logits, targets, targets >= 0)
            return torch.autograd.grad(losses, logits, gradient, create_graph=True)[0], None, None
        of_logits = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device).copy_(logits)
        found = ctx.form.fused(of_logits.view(-1, logits.shape[-1]), targets, gradient.float().resolve_neg())
        assert found is not None
        return of_logits, None, None


def coded_targets(targets: Tensor, counted: Tensor, words: int) -> Tensor:
    """Return the ids as the passes take them: -1 where a token does not count, `words`, with a loss of NaN, if wrong."""
    return torch.where(targets < 0, words, targets).masked_fill_(~counted, -1)


def check_targets(name: str, targets: Tensor, words: int, ignore_index: int, device: torch.device) -> Tensor:
    """Return the ids flat in int64.

    Raises UsageError for other dtypes and devices, and in host memory for ids out of range.
    """
    if targets.device != device:
        raise UsageError(f"{name}: got targets on {targets.device}, and logits on {device}; move them there")
    if targets.is_floating_point() or targets.dtype == torch.bool:
        raise UsageError(f"{name}: got targets of {targets.dtype}; give ids of words, of an integer dtype")
    targets = targets.reshape(-1).long()
    wrong = (targets != ignore_index) & ((targets < 0) | (targets >= words))
    if targets.device.type == "cpu" and bool(wrong.any()):
        raise UsageError(f"{name}: got target {int(targets[wrong][0])}; targets are 0 to {words - 1}, or ignore_index "
                         f"({ignore_index})")
    return targets


def mean_of_counted(losses: Tensor, counted: Tensor) -> Tensor:
    """Return the mean of the losses of counted tokens: without any NaN, whose gradient is 0, as torch has it."""
    count = counted.sum()
    return torch.where(count > 0, losses.sum() / count.clamp(min=1), torch.nan)
