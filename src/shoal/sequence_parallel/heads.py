"""Ulysses: each rank computes some of the heads over the whole sequence (Jacobs et al. 2023, arXiv 2309.14509).

    q, k, v  (batch, all heads, n rows)   -> all-to-all ->  (batch, own heads, N n rows)     attention of whole sequences
    output   (batch, own heads, N n rows) -> all-to-all ->  (batch, all heads, n rows)

Rank r of N has query heads r H // N to (r + 1) H // N, for any number H, and the heads of keys and values that these read:
one that queries of several ranks read goes to each of them. A rank without heads takes part in the messages. In backward the
gradients take the same way back. Elements that rank r sends, with Q(p) query heads and K(p) key heads on rank p, and d and e
the dims of a key and a value:

    forward    batch n  x  sum over p != r of Q(p) d + K(p) (d + e)    and    (N-1) Q(r) e
    backward   batch n  x  sum over p != r of Q(p) e                   and    (N-1) (Q(r) d + K(r) (d + e))
"""

# pyright: reportIncompatibleMethodOverride=false
# (once_differentiable hides the signature of the backward that it guards.)

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from shoal.device import kept_for_stream
from shoal.sequence_parallel.axis import SequenceAxis
from shoal.sequence_parallel.moves import EXCHANGE, RETURN, Moves, Operand, SentBytes, exchange, give_back

__all__ = ["HeadPlan", "exchange_heads", "heads_plan"]


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadPlan:
    """The heads of every rank, and the messages of one of them."""

    rank: int
    queries: tuple[range, ...]
    """By rank, its query heads."""
    keys: tuple[range, ...]
    """By rank, the heads of keys and values that these read."""
    to_queries: Moves
    to_keys: Moves

    @property
    def own(self) -> range:
        """This rank's query heads."""
        return self.queries[self.rank]

    def key_of_each_query(self, group: int) -> list[int]:
        """Return which of this rank's key heads each of its query heads reads, `group` queries reading one key."""
        return [head // group - self.keys[self.rank].start for head in self.own]

    def sent_bytes(self, batch: int, rows: int, dim: int, value_dim: int, size: int) -> SentBytes:
        """Return the bytes that this rank sends, with `rows` rows on each rank and elements of `size` bytes."""
        others = [peer for peer in range(len(self.queries)) if peer != self.rank]
        unit = batch * rows * size
        queries = sum(len(self.queries[peer]) for peer in others)
        keys = sum(len(self.keys[peer]) for peer in others)
        own, own_keys = len(others) * len(self.own), len(others) * len(self.keys[self.rank])
        return SentBytes(
            forward=unit * (queries * dim + keys * (dim + value_dim) + own * value_dim),
            backward=unit * (queries * value_dim + own * dim + own_keys * (dim + value_dim)))


@lru_cache(maxsize=64)
def heads_plan(heads: int, kv_heads: int, rank: int, ranks: int) -> HeadPlan:
    """Return which heads each rank computes, and what `rank` sends."""
    group = heads // kv_heads
    queries = tuple(range(heads * peer // ranks, heads * (peer + 1) // ranks) for peer in range(ranks))
    keys = tuple(range(some.start // group, (some.stop - 1) // group + 1) if some else range(0) for some in queries)
    return HeadPlan(rank=rank, queries=queries, keys=keys, to_queries=_moves(queries, heads, rank, ranks),
                    to_keys=_moves(keys, kv_heads, rank, ranks))


def _moves(of_rank: tuple[range, ...], heads: int, rank: int, ranks: int) -> Moves:
    """Return the messages that give every rank its heads; the rows of rank p are unit p of a head."""
    own = torch.arange(len(of_rank[rank]), device="cpu") * ranks
    return Moves(send=tuple(torch.tensor(some, dtype=torch.int64, device="cpu") for some in of_rank),
                 receive=tuple(own + peer for peer in range(ranks)), units=heads, results=len(of_rank[rank]) * ranks,
                 shared=sum(map(len, of_rank)) > heads)


def exchange_heads(attention: Callable[[Tensor, Tensor, Tensor], Tensor], query: Tensor, key: Tensor, value: Tensor,
                   axis: SequenceAxis, *, reads: Sequence[Tensor] = (), layout: str | None = None) -> Tensor:
    """Return this rank's rows (batch, heads, n, dim of values) of an attention of whole sequences.

    `query` (batch, heads, n, dim), `key` and `value` (batch, kv_heads, n, dims) are this rank's rows. `attention` is given
    whole sequences of this rank's heads, as many of keys as divide those of queries, and is not called without heads.
    `reads` are the other tensors that it reads: a rank without heads gives those that need a gradient one of zeros. Where
    `layout` names the layout of `attention`, ranks with another one than each other raise RanksDisagree.
    """
    plan = heads_plan(query.shape[1], key.shape[1], axis.rank, axis.ranks)
    facts = (f"heads exchanged: query {tuple(query.shape)}, key {tuple(key.shape)}, value {tuple(value.shape)} "
             f"{query.dtype}{'' if layout is None else f', layout {layout}'}".replace("torch.", ""))
    queries, keys, values = cast("tuple[Tensor, ...]", _ToHeads.apply(axis, plan, facts, query, key, value))
    if plan.own:
        of_query = plan.key_of_each_query(query.shape[1] // key.shape[1])
        group, left = divmod(len(of_query), keys.shape[1])
        if left or of_query != [head // group for head in range(len(of_query))]:  # a group is cut: each query has a copy
            index = _index(key.device, tuple(of_query))
            keys, values = keys.index_select(1, index), values.index_select(1, index)
        output = attention(queries, keys, values)
    else:
        output = cast(Tensor, _WithoutHeads.apply(queries, keys, values, *reads))
    return cast(Tensor, _ToRows.apply(axis, plan, facts, output))


@kept_for_stream
def _index(device: torch.device, heads: tuple[int, ...]) -> Tensor:
    return torch.tensor(heads, dtype=torch.int64, device=device)


class _ToHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, axis: SequenceAxis, plan: HeadPlan, facts: str, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.axis, ctx.plan, ctx.facts = axis, plan, facts
        results = exchange(axis, facts, [Operand(tensor.reshape(*tensor.shape[:2], -1), moves)
                                         for tensor, moves in zip(tensors, _tables(plan), strict=True)])
        return tuple(result.view(tensor.shape[0], -1, axis.ranks * tensor.shape[2], tensor.shape[3]) if result.numel() else
                     result.new_empty(tensor.shape[0], result.shape[1] // axis.ranks, axis.ranks * tensor.shape[2],
                                      tensor.shape[3])
                     for result, tensor in zip(results, tensors, strict=True))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        ranks = ctx.axis.ranks
        rows = gradients[0].shape[2] // ranks
        results = give_back(ctx.axis, ctx.facts, [
            Operand(gradient.reshape(gradient.shape[0], gradient.shape[1] * ranks, rows * gradient.shape[3]), moves)
            for gradient, moves in zip(gradients, _tables(ctx.plan), strict=True)])
        return None, None, None, *(result.view(*result.shape[:2], rows, gradient.shape[3])
                                   for result, gradient in zip(results, gradients, strict=True))


class _ToRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, axis: SequenceAxis, plan: HeadPlan, facts: str, output: Tensor) -> Tensor:
        ctx.axis, ctx.plan, ctx.facts, ctx.shape = axis, plan, facts, output.shape
        batch, heads, length, dim = output.shape
        units = output.reshape(batch, heads * axis.ranks, length // axis.ranks * dim)
        result, = give_back(axis, facts, [Operand(units, plan.to_queries)], kind=RETURN)
        return result.view(batch, -1, length // axis.ranks, dim)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, None, Tensor]:
        units = gradient.reshape(*gradient.shape[:2], -1)
        result, = exchange(ctx.axis, ctx.facts, [Operand(units, ctx.plan.to_queries)], kind=EXCHANGE)
        return None, None, None, result.view(ctx.shape)


class _WithoutHeads(torch.autograd.Function):
    """The attention of a rank without heads: in autograd's graph it is as that of other ranks, with gradients of zeros.

    It saves a tensor, as every attention does. Under activation checkpointing, reading what was saved is what starts the
    recomputation, and that has the messages in which all ranks take part.
    """

    @staticmethod
    def forward(ctx: Any, queries: Tensor, keys: Tensor, values: Tensor, *reads: Tensor) -> Tensor:
        ctx.save_for_backward(queries)
        ctx.like = [(each.shape, each.dtype, each.device) for each in (queries, keys, values, *reads)]
        return queries.new_empty(*queries.shape[:3], values.shape[3])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        _ = ctx.saved_tensors
        return tuple(torch.zeros(shape, dtype=dtype, device=device) if wanted else None
                     for wanted, (shape, dtype, device) in zip(ctx.needs_input_grad, ctx.like, strict=True))


def _tables(plan: HeadPlan) -> tuple[Moves, Moves, Moves]:
    return plan.to_queries, plan.to_keys, plan.to_keys
