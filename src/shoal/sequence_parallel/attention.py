"""Attention where each rank has a part of the sequence, by whichever exchange sends fewer bytes.

    heads     any layout: each rank computes some heads over the whole sequence (heads.py)
    blocks    a sparse layout: each rank computes its rows, from the blocks that they need (block_plan.py)

The result is that of one rank with the whole sequence, dropout included: probabilities are dropped by the numbers that
heads, queries and keys have in the whole. Ranks that are to drop as one rank does have torch's generator seeded alike.
"""

from __future__ import annotations

from functools import partial
from operator import index
from typing import Literal, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from shoal.attention.arguments import check_tensor, in_memory, true_or_false
from shoal.attention.attend import (
    Backend,
    attend,
    check_options,
    kernels_for,
    of_one_dtype,
    scale_of,
)
from shoal.attention.blocks import Blocks
from shoal.attention.call import AttentionCall
from shoal.attention.masks import Mode, check_mode, key_padding_term, mask_term
from shoal.device import HOST
from shoal.errors import UsageError
from shoal.sequence_parallel.axis import SequenceAxis
from shoal.sequence_parallel.block_exchange import AttendByBlocks, BlockExchangeCall
from shoal.sequence_parallel.block_plan import block_plan
from shoal.sequence_parallel.heads import exchange_heads, heads_plan
from shoal.transport.collectives import eager

__all__ = ["EXCHANGES", "Exchange", "attend_sequence"]

Exchange = Literal["auto", "heads", "blocks"]
EXCHANGES: tuple[Exchange, ...] = ("auto", "heads", "blocks")
_DENSE_BLOCK = 64
"""The block of dense attention, which is padded to it."""


@eager
def attend_sequence(query: Tensor, key: Tensor, value: Tensor, axis: SequenceAxis, blocks: Blocks | None = None, *,
                    scale: float | None = None, causal: bool = False, key_padding: Tensor | None = None,
                    key_padding_mode: Mode = "add", mask: Tensor | None = None, mask_mode: Mode = "add",
                    bias: Tensor | None = None, dropout: float = 0.0, seed: int | None = None, first_head: int = 0,
                    exchange: Exchange = "auto", backend: Backend = "auto") -> Tensor:
    """Return this rank's rows of the attention of the whole sequence: (batches, heads, n, dim).

    `query`, `key` and `value` are this rank's n positions, of N n on N ranks. `blocks` is the layout of the whole sequence;
    without it attention is dense. `key_padding` (batches, N n), `mask` (N n, N n) and `bias` (batches or 1, heads or 1,
    N n, N n) are whole on every rank. The gradient of `bias` is of the heads that this rank computes: the mean over the
    sequence ranks, which the engine takes, of a loss of `mean_loss` is that of one rank. The other arguments are those of
    `shoal.attention.attend`. `exchange` says what ranks exchange; "auto" takes what sends fewer bytes, and the heads where
    there is a `mask` or a `bias`.

    Raises UsageError for shapes that do not fit, RanksDisagree where ranks have other shapes or layouts than each
    other in a call that is the first of its kind on all of them.
    """
    query, key, value = of_one_dtype("attend_sequence", query, key, value)
    causal = true_or_false("attend_sequence: causal", causal)
    check_options("attend_sequence", query.dtype, dropout=dropout, seed=seed, first_head=first_head, backend=backend)
    first_head = index(first_head)
    _check(query, key, value, axis, blocks, exchange)
    for name, given in (("key_padding", key_padding), ("mask", mask), ("bias", bias)):
        if given is not None:
            check_tensor(f"attend_sequence: {name}", given, "of the whole sequence")
    query, key, value, key_padding, mask, bias = in_memory(
        "attend_sequence", query=query, key=key, value=value, key_padding=key_padding, mask=mask, bias=bias)
    check_mode("key_padding", key_padding_mode)
    check_mode("mask", mask_mode)
    if mask is not None or bias is not None:
        if exchange == "blocks":
            raise UsageError("attend_sequence: exchange='blocks' has no mask or bias of each query and key; leave exchange "
                             "out, or take exchange='heads'")
        exchange = "heads"
    if not query.shape[0]:
        return query.new_zeros(*query.shape[:3], value.shape[3]) + 0 * (query.sum() + key.sum() + value.sum())
    scale = scale_of(scale, query.shape[-1])
    if dropout and seed is None:
        seed = int(torch.randint(2**62, (), device="cpu").item())
    if blocks is not None and causal:
        blocks = blocks.lower
    chosen = _choose(query, key, value, axis, blocks, exchange)
    if chosen == "blocks":
        assert blocks is not None
        plan = block_plan(blocks, query.shape[1], key.shape[1], axis.rank, axis.ranks)
        term = None if key_padding is None else key_padding_term(key_padding, key_padding_mode, blocks, query.shape[0],
                                                                 query.device)
        call = AttentionCall(blocks=plan.blocks, heads=query.shape[1], scale=scale, causal=causal,
                             terms=() if term is None else (term[0],), biased=False, dropout=dropout, seed=index(seed or 0),
                             hidden=None if term is None else term[1], first_head=first_head)
        facts = (f"blocks exchanged: query {tuple(query.shape)}, key {tuple(key.shape)}, value {tuple(value.shape)} "
                 f"{query.dtype}, layout {blocks.digest}".replace("torch.", ""))
        of = BlockExchangeCall(axis=axis, plan=plan, call=call, kernels=kernels_for(backend, call, query, key, value),
                               facts=facts)
        return cast(Tensor, AttendByBlocks.apply(of, query, key, value))
    own = heads_plan(query.shape[1], key.shape[1], axis.rank, axis.ranks).own
    if bias is not None and bias.dim() > 2 and bias.shape[-3] > 1:
        if bias.shape[-3] != query.shape[1]:
            raise UsageError(f"attend_sequence: bias has {bias.shape[-3]} heads, and the query {query.shape[1]}; give "
                             f"a bias of 1 or {query.shape[1]} heads")
        bias = bias[..., own.start:own.stop, :, :]
    whole = partial(_attend_whole, blocks=None if blocks is None or not own else blocks.of_heads(own), scale=scale,
                    causal=causal, key_padding=key_padding, key_padding_mode=key_padding_mode, mask=mask,
                    mask_mode=mask_mode, bias=bias, dropout=dropout, seed=seed, first_head=first_head + own.start,
                    backend=backend)
    return exchange_heads(whole, query, key, value, axis, reads=() if bias is None else (bias,),
                          layout="dense" if blocks is None else blocks.digest)


def _attend_whole(query: Tensor, key: Tensor, value: Tensor, *, blocks: Blocks | None, scale: float, causal: bool,
                  key_padding: Tensor | None, key_padding_mode: Mode, mask: Tensor | None, mask_mode: Mode,
                  bias: Tensor | None, dropout: float, seed: int | None, first_head: int, backend: Backend) -> Tensor:
    """Return the attention of some heads over the whole sequence, padded to the block where it is dense."""
    run = partial(attend, scale=scale, causal=causal, key_padding_mode=key_padding_mode, mask_mode=mask_mode,
                  dropout=dropout, seed=seed, first_head=first_head, backend=backend)
    if blocks is not None:
        return run(query, key, value, blocks, key_padding=key_padding, mask=mask, bias=bias)
    plain = key_padding is None and mask is None and bias is None
    if query.device != HOST and not dropout and plain and backend == "auto":
        return F.scaled_dot_product_attention(query, key, value, is_causal=causal, scale=scale,
                                              enable_gqa=query.shape[1] != key.shape[1])
    length = query.shape[2]
    missing = -length % _DENSE_BLOCK
    if missing:  # what is wrong is said of the sizes that were given
        if mask is not None:
            mask = F.pad(mask_term("mask", mask, mask_mode, (length, length), query.device).tensor[0, 0],
                         (0, missing, 0, missing))
        if bias is not None:
            if bias.shape[-2:] != (length, length):
                raise UsageError(f"attend_sequence: bias ends with (length, length), here {(length, length)}; got "
                                 f"{tuple(bias.shape)}")
            bias = F.pad(bias, (0, missing, 0, missing))
        if key_padding is not None or not causal:
            padding = (torch.ones(query.shape[0], length, dtype=torch.bool, device=query.device) if key_padding is None
                       else key_padding)
            term = mask_term("key_padding", padding, key_padding_mode, (query.shape[0], length), query.device)
            key_padding = F.pad(term.tensor[:, 0, 0], (0, missing), value=0.0 if term.multiplies else -torch.inf)
        query, key, value = (F.pad(each, (0, 0, 0, missing)) for each in (query, key, value))
    output = run(query, key, value, Blocks.dense(length + missing, length + missing, _DENSE_BLOCK), key_padding=key_padding,
                 mask=mask, bias=bias)
    return output[:, :, :length]


def _choose(query: Tensor, key: Tensor, value: Tensor, axis: SequenceAxis, blocks: Blocks | None,
            exchange: Exchange) -> Exchange:
    """Return the exchange to use: the same on every rank, which compare the bytes of the rank that sends most."""
    if blocks is None or blocks.row_blocks % axis.ranks:
        return "heads"
    if exchange != "auto":
        return exchange
    if blocks.density > 0.5:
        return "heads"
    batch, heads, rows, dim = query.shape
    plan = block_plan(blocks, heads, key.shape[1], axis.rank, axis.ranks)
    size = query.element_size()
    by_blocks = max(plan.sent_bytes(batch, dim, value.shape[3], size, peer=peer).total for peer in range(axis.ranks))
    by_heads = max(heads_plan(heads, key.shape[1], peer, axis.ranks).sent_bytes(batch, rows, dim, value.shape[3], size).total
                   for peer in range(axis.ranks))
    return "blocks" if by_blocks <= by_heads else "heads"


def _check(query: Tensor, key: Tensor, value: Tensor, axis: SequenceAxis, blocks: object, exchange: str) -> None:
    """Raise UsageError where the parts do not fit each other, the layout or the exchange."""
    shapes = f"query {tuple(query.shape)}, key {tuple(key.shape)}, value {tuple(value.shape)}"
    if any(each.dim() != 4 for each in (query, key, value)):
        raise UsageError(f"attend_sequence: operands are (batches, heads, positions of this rank, dim); got {shapes}")
    if len({(each.dtype, each.device) for each in (query, key, value)}) > 1:
        raise UsageError("attend_sequence: query, key and value have one dtype, and one device; got "
                         + ", ".join(f"{each.dtype} on {each.device}" for each in (query, key, value)))
    same = key.shape[:3] == value.shape[:3] and (query.shape[0], query.shape[2], query.shape[3]) == (
        key.shape[0], key.shape[2], key.shape[3])
    empty = not all((query.shape[1], key.shape[1], query.shape[3], value.shape[3]))
    if not same or empty or query.shape[1] % key.shape[1]:
        raise UsageError(f"attend_sequence: query, key and value have one batch and one length, query and key one head dim, "
                         f"and the heads of keys divide those of the query, none of them 0; got {shapes}")
    if exchange not in EXCHANGES:
        raise UsageError(f"attend_sequence: exchange is one of {', '.join(EXCHANGES)}; got {exchange!r}")
    length = query.shape[2] * axis.ranks
    if blocks is None:
        if exchange == "blocks":
            raise UsageError("attend_sequence: exchange='blocks' needs a layout, and got none; give blocks, or "
                             "exchange='heads'")
        return
    if not isinstance(blocks, Blocks):
        raise UsageError(f"attend_sequence: blocks are those of a layout, of class Blocks; got {type(blocks).__name__}: "
                         f"give Blocks.of(layout, block), or config.blocks(length)")
    if blocks.heads not in (1, query.shape[1]):
        raise UsageError(f"attend_sequence: the layout is for {blocks.heads} heads, query has {query.shape[1]}; make a "
                         f"layout with 1 or {query.shape[1]} heads")
    if (blocks.length, blocks.kv_length) != (length, length):
        raise UsageError(f"attend_sequence: the layout is for {blocks.length} queries and {blocks.kv_length} keys, and "
                         f"{axis.ranks} ranks have {query.shape[2]} positions each; make the layout for length {length}")
    if exchange == "blocks" and blocks.row_blocks % axis.ranks:
        raise UsageError(f"attend_sequence: {axis.ranks} ranks do not divide {blocks.row_blocks} blocks of {blocks.block}; "
                         f"pad the sequence to a multiple of {blocks.block * axis.ranks}, or take exchange='heads'")

