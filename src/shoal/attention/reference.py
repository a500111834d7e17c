"""The oracle: dense scores, a mask from the layout, and autograd. It makes tensors of length x length."""

# pyright: reportIncompatibleMethodOverride=false

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from shoal.attention.call import AttentionCall, addend
from shoal.attention.dropout import keep
from shoal.autograd import without_autocast

__all__ = ["attention"]


class _Product(torch.autograd.Function):
    """The product of fp32 matrices (batches, heads, ., .) whose gradients are products of fp32 too.

    Those of torch's own product are of 16 bits where backward runs within autocast. It has derivatives of any order, in
    reverse and forward mode.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(left: Tensor, right: Tensor) -> Tensor:
        """Return `left` @ `right`."""
        return _multiply(left, right)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        """Save the matrices."""
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        """Return the gradients of both matrices."""
        left, right = ctx.saved_tensors
        return _product(gradient, right.mT), _product(left.mT, gradient)

    @staticmethod
    def jvp(ctx: Any, left_tangent: Tensor | None, right_tangent: Tensor | None) -> Tensor | None:
        """Return the tangent of the product."""
        left, right = ctx.saved_tensors
        to_left = None if left_tangent is None else _multiply(left_tangent, right)
        to_right = None if right_tangent is None else _multiply(left, right_tangent)
        return to_right if to_left is None else to_left if to_right is None else to_left + to_right


@without_autocast
def _multiply(left: Tensor, right: Tensor) -> Tensor:
    return left @ right


def _product(left: Tensor, right: Tensor) -> Tensor:
    if torch.compiler.is_compiling():  # a graph of torch.compile has no function with a jvp
        return left @ right
    return cast(Tensor, _Product.apply(left, right))


@without_autocast
def attention(call: AttentionCall, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the output (batches, heads, length, dim) and the log-sum-exp (batches, heads, length) in fp32."""
    blocks = call.blocks
    group = query.shape[1] // key.shape[1]
    wide_key, wide_value = (each.float().repeat_interleave(group, dim=1) for each in (key, value))
    scores = _product(query.float(), wide_key.mT) * call.scale
    if bias is not None:
        scores = scores + addend(bias)
    for term in call.terms[call.biased:]:
        scores = scores + term.added(term.tensor)
    visible = blocks.layout.to(query.device).repeat_interleave(blocks.block, 1).repeat_interleave(blocks.block, 2)
    if call.causal:
        positions = blocks.positions_of_rows().to(query.device)[..., None]
        visible = visible & (torch.arange(blocks.kv_length, device=query.device) <= positions)
    scores = scores.masked_fill(~visible, -torch.inf)
    empty = (scores == -torch.inf).all(-1)
    scores = scores.masked_fill(empty[..., None], 0.0)
    weights = scores.softmax(-1).masked_fill(empty[..., None], 0.0)
    sums = scores.logsumexp(-1).masked_fill(empty, -torch.inf)
    if call.threshold:
        keys = call.row_keys(query.shape[0], query.device)[..., None]
        kept = keep(keys, torch.arange(blocks.kv_length, device=query.device), call.threshold)
        weights = weights * kept * call.kept
    return _product(weights, wide_value).to(query.dtype), sums.detach()
