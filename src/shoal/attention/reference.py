"""The oracle: dense scores, a mask from the layout, and autograd. It makes tensors of length x length."""

from __future__ import annotations

import torch
from torch import Tensor

from shoal.attention.call import AttentionCall, addend
from shoal.attention.dropout import keep
from shoal.autograd import without_autocast

__all__ = ["attention"]


@without_autocast
def attention(call: AttentionCall, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the output (batches, heads, length, dim) and the log-sum-exp (batches, heads, length) in fp32."""
    blocks = call.blocks
    group = query.shape[1] // key.shape[1]
    wide_key, wide_value = (each.float().repeat_interleave(group, dim=1) for each in (key, value))
    scores = query.float() @ wide_key.transpose(-1, -2) * call.scale
    if bias is not None:
        scores = scores + addend(bias)
    for term in call.terms[call.biased:]:
        scores = scores + term.added(term.tensor)
    visible = blocks.layout.to(query.device).repeat_interleave(blocks.block, 1).repeat_interleave(blocks.block, 2)
    if call.causal:
        positions = blocks.row_positions.to(query.device)[..., None]
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
    return (weights @ wide_value).to(query.dtype), sums.detach()
