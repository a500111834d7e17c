"""From hidden states to the loss in tiles of tokens: no more than one tile of logits is in memory.

    logits = h W^T + b,   z = logsumexp(logits)
    loss   = z - (1 - s) logits[target] - s mean(logits) + c z^2            s: label smoothing, c: the weight of the z-loss
    dloss / dlogits = (1 + 2 c z) softmax(logits) - (1 - s) onehot(target) - s / words

A tile's logits are there once: its loss is taken, they are replaced by their gradient, and this is multiplied into the
gradients of h and W, all in forward. Backward multiplies these by the gradient of the loss, one number. Held until
backward: the gradients of h and W. With `recompute`, backward computes the logits again, a product more, and nothing is
held but h and W; so it is for `reduction="none"`, whose gradient has a number for each token, and in fp16, which needs the
loss scale in the products.

A head with its words sliced over tensor ranks computes the logits of its words; two or three numbers a token are gathered,
as in `vocabulary_cross_entropy`, and the gradient of h is summed over the ranks.

Label smoothing is that of torch's `cross_entropy`; the z-loss is that of PaLM (Chowdhery et al. 2022, section 5), per token.
"""

# pyright: reportIncompatibleMethodOverride=false

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from shoal.autograd import check_first_derivative, differentiable_gradients, keeps_graph
from shoal.device import HOST
from shoal.errors import UsageError
from shoal.mesh.tensor_slice import stretch
from shoal.nn.cross_entropy import REDUCTIONS, Reduction, TokenLoss, check_targets, coded_targets, mean_of_counted
from shoal.products import TORCH, Products, in_autocast_dtype
from shoal.tensor_parallel import Axis, enter
from shoal.transport.collectives import eager
from shoal.transport.reduction import wide_dtype

__all__ = ["TiledLoss", "WordSlice", "tiled_cross_entropy"]

_PART = 512
"""Words whose part of the weight's gradient is computed at a time and added to that of earlier tiles. With 192 tokens in a
tile and 768 inputs, all words at once took 3 times as long by oneDNN as in parts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TiledLoss:
    """How hidden states become a loss; the options of torch's `cross_entropy`, and more."""

    ignore_index: int = -100
    """The target of tokens without a loss."""
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    """The weight of the squared logarithm of the softmax's denominator, added to the loss of each token."""
    reduction: Reduction = "mean"
    """The mean is over the tokens that are not ignored."""
    rows: int | None = None
    """Tokens of a tile; None: as many as let its logits take a quarter of the weight's bytes, and at least 128."""
    recompute: bool | None = None
    """Compute the logits again in backward; None: where they have to be (see above)."""

    def __post_init__(self) -> None:
        if self.reduction not in REDUCTIONS:
            raise UsageError(f"tiled loss: reduction: got {self.reduction!r}; choose {', '.join(REDUCTIONS)}")
        if not 0 <= self.label_smoothing <= 1:
            raise UsageError(f"tiled loss: label_smoothing: got {self.label_smoothing}; it lies between 0 and 1")
        if not 0 <= self.z_loss < math.inf:
            raise UsageError(f"tiled loss: z_loss: got {self.z_loss}; it is a number of 0 or more")
        if type(self.ignore_index) is not int:
            raise UsageError(f"tiled loss: ignore_index: got {self.ignore_index!r}; give the target of tokens that do not "
                             f"count, as -100")
        if self.rows is not None and not (type(self.rows) is int and self.rows >= 1):
            raise UsageError(f"tiled loss: rows: got {self.rows}; give 1 or more tokens, or None")
        if self.recompute is False and self.reduction == "none":
            raise UsageError("tiled loss: recompute: got False beside reduction 'none', whose gradients are not known in "
                             "forward; leave recompute out")


@dataclass(frozen=True, slots=True, kw_only=True)
class WordSlice:
    """The words of which this rank of a tensor axis has the rows of the weight."""

    words: int
    """Those of the whole vocabulary."""
    axis: Axis
    sequence_dim: int | None = None
    """The dim along which hidden states are split over the ranks; None: every rank has all of them."""

    @property
    def rows(self) -> range:
        """The words of which this rank has the rows."""
        return stretch(self.words, self.axis.rank, self.axis.ranks)


@eager
def tiled_cross_entropy(hidden: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None = None, *,
                        loss: TiledLoss | None = None, words: WordSlice | None = None, products: Products = TORCH,
                        ) -> Tensor:
    """Return the cross entropy of `hidden` (..., in) through the head `weight` (words, in), without its logits.

    The same as `F.cross_entropy(F.linear(hidden, weight, bias).float(), targets)`, with `targets` (...) ids of words. The
    sum is in fp32. With `words`, `weight` and `bias` are this rank's slices, and every rank of the axis calls. The weight
    must be gathered, as in the forward of its module. Raises UsageError for shapes, dtypes or targets that do not fit.
    """
    loss = loss or TiledLoss()
    hidden, weight, bias = in_autocast_dtype(hidden, weight, bias)
    if words is not None:
        hidden = enter(hidden, words.axis, words.sequence_dim)
    _check(hidden, weight, targets, bias, loss, words)
    if loss.recompute is None and (loss.reduction == "none" or hidden.dtype == torch.float16):
        loss = replace(loss, recompute=True)
    targets = targets.reshape(-1).long()
    counted = targets != loss.ignore_index
    problem = _LossCall(loss, targets, counted, words, products, weight.shape, torch.is_grad_enabled())
    losses = cast(Tensor, _TiledLoss.apply(hidden, weight, bias, problem))
    match loss.reduction:
        case "none":
            return losses.view(hidden.shape[:-1])
        case "sum":
            return losses.sum()
        case "mean":
            return mean_of_counted(losses, counted) if loss.recompute else losses


@dataclass(frozen=True, slots=True)
class _LossCall:
    """A call: all but the tensors that autograd follows."""

    loss: TiledLoss
    targets: Tensor
    """(tokens,)"""
    counted: Tensor
    """(tokens,) bool: those that are not ignored."""
    words: WordSlice | None
    products: Products
    shape: torch.Size
    """The shape of this rank's weight."""
    differentiated: bool

    @property
    def vocabulary(self) -> int:
        return self.shape[0] if self.words is None else self.words.words

    def tiles(self) -> Iterator[slice]:
        """Yield the tokens of each tile."""
        rows = self.loss.rows or max(128, self.shape[1] // 4)
        for start in range(0, len(self.targets), rows):
            yield slice(start, start + rows)

    def local_targets(self, tile: slice) -> tuple[Tensor, Tensor]:
        """Return the targets as rows of this rank's weight, and whether the target is another rank's or ignored."""
        targets = self.targets[tile]
        local = targets if self.words is None else targets - self.words.rows.start
        foreign = (local < 0) | (local >= self.shape[0]) | ~self.counted[tile]
        return local.masked_fill(foreign, 0), foreign

    def whole(self, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return the losses of all tokens by torch's operations on whole logits."""
        logits = F.linear(hidden.reshape(-1, hidden.shape[-1]), weight, bias)
        form = TokenLoss(smoothing=self.loss.label_smoothing, z_loss=self.loss.z_loss)
        targets = coded_targets(self.targets, self.counted, logits.shape[-1])
        return form.by_torch(logits.to(wide_dtype(logits.dtype)), targets, self.counted)

    def losses(self, logits: Tensor, tile: slice) -> tuple[Tensor, Tensor]:
        """Return the loss and the logsumexp over all words of each token, from this rank's fp32 `logits`."""
        return self._fused(logits, tile) or self._losses(logits, tile)

    def differentiate(self, logits: Tensor, tile: slice, scale: Tensor) -> tuple[Tensor, Tensor]:
        """Return the same, and replace `logits` by their gradient, times `scale` (1,)."""
        if (found := self._fused(logits, tile, scale.expand(len(logits)))) is not None:
            return found
        losses, logsumexp = self._losses(logits, tile)
        self._to_gradient(logits, logsumexp, tile, scale)
        return losses, logsumexp

    def to_gradient(self, logits: Tensor, logsumexp: Tensor, tile: slice, scales: Tensor) -> None:
        """Replace fp32 `logits` by their gradient, times `scales` (tokens,)."""
        if self._fused(logits, tile, scales) is None:
            self._to_gradient(logits, logsumexp, tile, scales)

    def _fused(self, logits: Tensor, tile: slice, scales: Tensor | None = None) -> tuple[Tensor, Tensor] | None:
        """Return losses and logsumexps by one pass over the logits; None where none serves, as for slices of words."""
        if self.words is not None:
            return None
        form = TokenLoss(smoothing=self.loss.label_smoothing, z_loss=self.loss.z_loss)
        return form.fused(logits, coded_targets(self.targets[tile], self.counted[tile], logits.shape[-1]), scales)

    def _losses(self, logits: Tensor, tile: slice) -> tuple[Tensor, Tensor]:
        smoothing, z_loss = self.loss.label_smoothing, self.loss.z_loss
        local, foreign = self.local_targets(tile)
        own = logits.gather(-1, local.unsqueeze(-1)).squeeze(-1).masked_fill_(foreign, 0)
        stats = [_logsumexp(logits), own, *([logits.sum(-1)] if smoothing else [])]
        if self.words is not None:
            sums, owns, *totals = self.words.axis.all_gather(torch.stack(stats)).wait().unbind(1)
            stats = [sums.logsumexp(0), owns.sum(0), *(total.sum(0) for total in totals)]
        losses = stats[0] - (1 - smoothing) * stats[1]
        if smoothing:
            losses -= smoothing / self.vocabulary * stats[2]
        if z_loss:
            losses += z_loss * stats[0].square()
        return losses.masked_fill_(~self.counted[tile], 0), stats[0]

    def _to_gradient(self, logits: Tensor, logsumexp: Tensor, tile: slice, scale: Tensor) -> None:
        smoothing, z_loss = self.loss.label_smoothing, self.loss.z_loss
        local, foreign = self.local_targets(tile)
        scale = (scale * self.counted[tile]).unsqueeze(-1)
        factor = scale * (1 + 2 * z_loss * logsumexp.unsqueeze(-1)) if z_loss else scale
        logits.sub_(logsumexp.unsqueeze(-1)).exp_().mul_(factor)
        if smoothing:
            logits.sub_(scale * (smoothing / self.vocabulary))
        logits.scatter_add_(-1, local.unsqueeze(-1), -(1 - smoothing) * scale * ~foreign.unsqueeze(-1))


class _TiledLoss(torch.autograd.Function):
    """Losses of tokens (tokens,); or with gradients taken in forward, the sum or the mean."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, problem: _LossCall) -> Tensor:
        ctx.problem, rows = problem, hidden.reshape(-1, hidden.shape[-1])
        ctx.shape, ctx.taken = hidden.shape, not problem.loss.recompute
        wide = wide_dtype(hidden.dtype)
        losses, sums = torch.empty(2, len(rows), dtype=wide, device=hidden.device)
        wanted = [needed and ctx.taken and problem.differentiated for needed in ctx.needs_input_grad[:3]]
        gradients = _Gradients(rows, weight, bias, wanted, problem.products)
        scale = torch.ones(1, dtype=wide, device=hidden.device)
        if problem.loss.reduction == "mean":
            scale /= problem.counted.sum().clamp(min=1)
        for tile in problem.tiles():
            logits = problem.products.linear(rows[tile], weight, bias).to(wide)
            if any(wanted):
                losses[tile], sums[tile] = problem.differentiate(logits, tile, scale)
                gradients.add(tile, logits.to(hidden.dtype))
            else:
                losses[tile], sums[tile] = problem.losses(logits, tile)
        if not ctx.taken:
            ctx.save_for_backward(hidden, weight, bias, sums)
            return losses
        ctx.save_for_backward(*gradients.finish())
        return mean_of_counted(losses, problem.counted) if problem.loss.reduction == "mean" else losses.sum()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        problem: _LossCall = ctx.problem
        if ctx.taken or problem.words is not None:
            check_first_derivative("the tiled loss", "take TiledLoss(recompute=True), or whole logits where the words are "
                                                     "sliced over tensor ranks")
        if ctx.taken:
            found = [_scaled(each, gradient) for each in ctx.saved_tensors]
        elif torch.is_grad_enabled():  # with all logits in memory
            hidden, weight, bias, _ = ctx.saved_tensors
            return *differentiable_gradients(problem.whole, (hidden, weight, bias), gradient), None
        else:
            hidden, weight, bias, sums = ctx.saved_tensors
            rows = hidden.reshape(-1, hidden.shape[-1])
            gradients = _Gradients(rows, weight, bias, ctx.needs_input_grad[:3], problem.products)
            for tile in problem.tiles():
                logits = problem.products.linear(rows[tile], weight, bias).to(sums.dtype)
                problem.to_gradient(logits, sums[tile], tile, gradient[tile])
                gradients.add(tile, logits.to(rows.dtype))
            found = gradients.finish()
        of_hidden, *others = found
        return None if of_hidden is None else of_hidden.view(ctx.shape), *others, None


class _Gradients:
    """The gradients of hidden states, weight and bias, to which tiles add."""

    def __init__(self, rows: Tensor, weight: Tensor, bias: Tensor | None, wanted: Any, products: Products):
        self._rows, self._weight, self._products = rows, weight, products
        wide = wide_dtype(weight.dtype)
        self._of_rows = torch.empty_like(rows, memory_format=torch.contiguous_format) if wanted[0] else None
        self._of_weight = torch.zeros(weight.shape, dtype=wide, device=weight.device) if wanted[1] else None
        self._of_bias = torch.zeros(weight.shape[0], dtype=wide, device=weight.device) if wanted[2] else None
        self._dtypes = weight.dtype, weight.dtype if bias is None else bias.dtype

    def add(self, tile: slice, of_logits: Tensor) -> None:
        """Add what the gradient (tokens, words) of a tile's logits gives."""
        if self._of_rows is not None:
            self._of_rows[tile] = self._products.gradient_of_input(of_logits, self._weight)
        if self._of_weight is not None:
            if self._products.weight_gradient == "torch" and of_logits.dtype == self._of_weight.dtype:
                self._of_weight.addmm_(of_logits.t(), self._rows[tile])
            else:  # in parts that stay in the cache until they are added, so that no second tensor of that size is made
                transposed = self._rows[tile].t().contiguous()
                size = _PART if transposed.device == HOST else 32 * _PART  # few kernels, each with work for the device
                for words in range(0, len(self._of_weight), size):
                    part = slice(words, words + size)
                    self._of_weight[part] += self._products.linear(of_logits[:, part].t(), transposed)
        if self._of_bias is not None:
            self._of_bias += of_logits.sum(0, dtype=self._of_bias.dtype)

    def finish(self) -> list[Tensor | None]:
        """Return the gradients in the dtypes of what they are of."""
        of_weight, of_bias = self._of_weight, self._of_bias
        return [self._of_rows, None if of_weight is None else of_weight.to(self._dtypes[0]),
                None if of_bias is None else of_bias.to(self._dtypes[1])]


def _scaled(held: Tensor | None, factor: Tensor) -> Tensor | None:
    """Return `held` times `factor`: in its own memory, unless the graph is kept for another backward."""
    if held is None:
        return None
    factor = factor.to(held.dtype) if held.dtype.itemsize > 2 else factor
    return held * factor if keeps_graph() else held.mul_(factor)


def _logsumexp(logits: Tensor) -> Tensor:
    """Return the logsumexp over the last dim, -inf where a rank has no words."""
    return logits.logsumexp(-1) if logits.shape[-1] else logits.new_full(logits.shape[:-1], -torch.inf)


def _check(hidden: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None, loss: TiledLoss,
           words: WordSlice | None) -> None:
    if weight.dim() != 2 or hidden.shape[-1:] != weight.shape[1:] or hidden.shape[:-1] != targets.shape or (
            bias is not None and bias.shape != weight.shape[:1]):
        raise UsageError(f"tiled loss: got hidden states {tuple(hidden.shape)}, a weight {tuple(weight.shape)}, targets "
                         f"{tuple(targets.shape)} and a bias {None if bias is None else tuple(bias.shape)}; they are "
                         f"(..., in), (words, in), (...) and (words,) or None")
    if hidden.dtype != weight.dtype or not hidden.is_floating_point():
        raise UsageError(f"tiled loss: got hidden states of {hidden.dtype} and a weight of {weight.dtype}; give both one "
                         f"floating dtype, or call it under autocast")
    check_targets("tiled loss", targets, weight.shape[0] if words is None else words.words, loss.ignore_index, hidden.device)
