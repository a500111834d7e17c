"""Attention by torch's flex_attention: compiled on an accelerator, without dropout or bias; on the host only the forward.

flex_attention skips blocks of 128 positions, and hides single scores by a function. So a layout is coarsened to blocks of
128, of which each is visited that has a visited block; and the function hides what the layout itself does not visit.
(Uncompiled, flex_attention ignores the blocks, and only the function counts.)
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from itertools import count
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from shoal.attention.blocks import Blocks
from shoal.attention.call import HIDES, AttentionCall
from shoal.device import HOST, kept_for_stream

__all__ = ["attention", "coarse", "serves"]

_EDGE = 128


def serves(blocks: Blocks) -> bool:
    """Whether the layout can be coarsened: its blocks divide 128, or are multiples of it."""
    return _EDGE % blocks.block == 0 or blocks.block % _EDGE == 0


def attention(call: AttentionCall, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None) -> Tensor:
    """Return the output (batches, heads, length, dim); the call has neither dropout nor `bias`."""
    assert bias is None and not call.threshold and serves(call.blocks)
    run = flex_attention if query.device == HOST else _compiled(call.blocks, call.causal, len(call.terms))
    mask = _block_mask(query.device, call.blocks, call.causal)
    output: Any = run(query, key, value, score_mod=_added(call), block_mask=mask, scale=call.scale,
                      enable_gqa=query.shape[1] != key.shape[1])
    return output


def coarse(blocks: Blocks) -> Tensor:
    """Return which blocks of 128 have a visited block: (heads, row blocks of 128, column blocks of 128) bool."""
    layout = blocks.layout.bool()
    if blocks.block >= _EDGE:
        times = blocks.block // _EDGE
        return layout.repeat_interleave(times, 1).repeat_interleave(times, 2)
    size = _EDGE // blocks.block
    padded = F.pad(layout, (0, -layout.shape[2] % size, 0, -layout.shape[1] % size))
    return padded.unflatten(2, (-1, size)).unflatten(1, (-1, size)).any(4).any(2)


@lru_cache(maxsize=64)
def _compiled(blocks: Blocks, causal: bool, terms: int) -> Callable[..., Any]:
    """Return a compiled function of its own: torch compiles one function for a few cases, and then no more."""
    function: Any = flex_attention

    def run(*operands: Tensor, **options: Any) -> Any:
        return function(*operands, **options)

    run.__code__ = run.__code__.replace(co_name=f"flex_{next(_numbers)}")  # torch counts by code object
    return torch.compile(run, dynamic=False)


_numbers = count()


@kept_for_stream
def _block_mask(device: torch.device, blocks: Blocks, causal: bool) -> BlockMask:
    """Return the blocks of 128 and the function; kept, so that a layout is compiled once."""
    layout, edge, shared = blocks.layout.bool().to(device), blocks.block, blocks.heads == 1
    positions = blocks.row_positions.to(device)

    def visible(batch: Tensor, head: Tensor, row: Tensor, column: Tensor) -> Tensor:
        visited = layout[0 if shared else head, row // edge, column // edge]
        return visited & (positions[0 if shared else head, row] >= column) if causal else visited

    visited = coarse(blocks).to(device)[None]
    order = visited.int().argsort(dim=-1, descending=True, stable=True).int()  # visited columns first, in ascending order
    return BlockMask.from_kv_blocks(visited.sum(-1, dtype=torch.int32), order, BLOCK_SIZE=_EDGE, mask_mod=visible,
                                    seq_lengths=(blocks.length, blocks.kv_length))


def _added(call: AttentionCall) -> Callable[..., Tensor] | None:
    """Return the function that adds the masks of a call to a score; None without masks."""
    if not call.terms:
        return None

    def score(value: Tensor, batch: Tensor, head: Tensor, row: Tensor, column: Tensor) -> Tensor:
        for term in call.terms:
            batches, heads, rows, _ = term.tensor.shape
            of_score = term.tensor[batch if batches > 1 else 0, head if heads > 1 else 0, row if rows > 1 else 0, column]
            added = (torch.where(of_score == 0, -torch.inf, 0.0) if term.multiplies else
                     torch.where(of_score <= HIDES, -torch.inf, of_score))
            value = value + added
        return value
    return score
