"""Block-sparse attention where each rank computes its own rows, and the ranks exchange only the blocks that these need.

    forward    keys, values, queries of split rows ->  one attention  -> output and log-sum-exp of split rows, merged
    backward   gradients, outputs of split rows    ->  one attention  -> gradients of keys, values and queries, summed

Parts of a row over different keys merge exactly: with log-sum-exps a and b, c = log(e^a + e^b) is that of both, and the
output is e^(a-c) of one and e^(b-c) of the other. Backward needs of a row its whole output and log-sum-exp alone, whichever
keys a rank has (Dao et al. 2022, appendix B.2).
"""

# pyright: reportIncompatibleMethodOverride=false

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor

from shoal.attention.attend import Kernels
from shoal.attention.call import AttentionCall, Term
from shoal.autograd import check_first_derivative, kept_result
from shoal.sequence_parallel.axis import SequenceAxis
from shoal.sequence_parallel.block_plan import BlockPlan
from shoal.sequence_parallel.moves import RETURN, Moves, Operand, exchange, give_back

__all__ = ["AttendByBlocks", "BlockExchangeCall"]


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockExchangeCall:
    """One attention of a sequence axis, without its tensors."""

    axis: SequenceAxis
    plan: BlockPlan
    call: AttentionCall
    """That of this rank's part of the layout."""
    kernels: Kernels
    facts: str


class AttendByBlocks(torch.autograd.Function):
    """The attention of this rank's rows (batch, heads, n, dim): query, key, value and output are of these alone."""

    @staticmethod
    def forward(ctx: Any, of: BlockExchangeCall, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        plan = of.plan
        tensors = [key, value, *([query] if plan.splits else [])]
        results = exchange(of.axis, of.facts, _operands(tensors, plan, _tables(plan)))
        keys, values, queries = (*_joined(results, tensors), query)[:3]
        output, sums = kept_result(lambda: of.kernels.forward(of.call, queries, keys, values))
        rows = query.shape[2]
        if plan.splits:
            foreign = _cut(sums[..., None], plan.block), _cut(output, plan.block)
            output, sums = output[:, :, :rows].contiguous(), sums[:, :, :rows].contiguous()
            parts = _parts_of_own_rows(of, foreign)
            _merge(output, sums, parts, plan)
        ctx.save_for_backward(queries, keys, values, output, sums, *(term.tensor for term in of.call.terms))
        ctx.of = replace(of, call=replace(of.call, terms=()))
        ctx.multiplies = tuple(term.multiplies for term in of.call.terms)
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Exchange what the split rows need, let the backend compute its backward, and give back what is of others."""
        check_first_derivative("attention over the ranks of a sequence", "compute it on one rank with backend='reference'",
                               gradient)
        of: BlockExchangeCall = ctx.of
        queries, keys, values, output, sums, *terms = ctx.saved_tensors
        plan, rows = of.plan, gradient.shape[2]
        call = replace(of.call, terms=tuple(Term(tensor=tensor, multiplies=multiplies) for tensor, multiplies
                                            in zip(terms, ctx.multiplies, strict=True)))
        if plan.splits:
            whole = sums[..., None], gradient, output
            results = exchange(of.axis, of.facts, _operands(whole, plan, [plan.to_queries] * 3))
            wide, gradient, output = _joined(results, whole)
            sums = wide.squeeze(-1).contiguous()
        to_query, to_key, to_value = of.kernels.backward(call, queries, keys, values, output, sums, gradient,
                                                         score_gradient=None)
        typed = [to_key.to(keys.dtype), to_value.to(values.dtype), *([to_query.to(queries.dtype)] if plan.splits else [])]
        gradients = give_back(of.axis, of.facts, _operands(typed, plan, _tables(plan)))
        shapes = [(*each.shape[:2], rows, each.shape[3]) for each in typed]
        own = [each.view(shape) for each, shape in zip(gradients, shapes, strict=True)]
        return None, own[2] if plan.splits else to_query.to(queries.dtype), own[0], own[1]


def _tables(plan: BlockPlan) -> list[Moves]:
    return [plan.to_keys, plan.to_keys, *([plan.to_queries] if plan.splits else [])]


def _cut(tensor: Tensor, block: int) -> Tensor:
    """Return (batch, heads, length, dim) as units (batch, heads * blocks, block * dim)."""
    batch, heads, length, dim = tensor.shape
    return tensor.reshape(batch, heads * (length // block), block * dim)


def _operands(tensors: Sequence[Tensor], plan: BlockPlan, tables: Sequence[Moves]) -> list[Operand]:
    return [Operand(_cut(tensor, plan.block), moves) for tensor, moves in zip(tensors, tables, strict=True)]


def _joined(results: Sequence[Tensor], like: Sequence[Tensor]) -> list[Tensor]:
    """Return units as (batch, heads, length, dim), with the heads and dims of tensors before the exchange."""
    return [result.view(*tensor.shape[:2], -1, tensor.shape[3]) for result, tensor in zip(results, like, strict=True)]


def _parts_of_own_rows(of: BlockExchangeCall, computed: tuple[Tensor, Tensor]) -> list[list[Tensor]]:
    """Send others the parts of their rows, and return by peer those of this rank's: sums and outputs, as units."""
    axis, moves = of.axis, of.plan.to_queries.on(computed[0].device)
    send = [torch.cat([units.index_select(1, moves.receive[peer]).view(-1).view(torch.uint8) for units in computed])
            if peer != axis.rank else computed[0].new_empty(0, dtype=torch.uint8) for peer in range(axis.ranks)]
    widths = [units.shape[0] * units.shape[2] * units.element_size() for units in computed]
    counts = [0 if peer == axis.rank else len(moves.send[peer]) for peer in range(axis.ranks)]
    received = axis.swap(RETURN, of.facts, send, [count * sum(widths) for count in counts]).wait()
    return [[part.view(units.dtype).view(units.shape[0], count, units.shape[2]) for part, units in zip(
        flat.split([count * width for width in widths]), computed, strict=True)]
            for flat, count in zip(received, counts, strict=True)]


def _merge(output: Tensor, sums: Tensor, parts: list[list[Tensor]], plan: BlockPlan) -> None:
    """Merge into the own rows, contiguous, what other ranks computed of them, in rank order."""
    moves, block = plan.to_queries.on(output.device), plan.block
    outputs, all_sums = _cut(output, block), _cut(sums[..., None], block)  # views
    for units, (their_sums, theirs) in zip(moves.send, parts, strict=True):
        if not their_sums.shape[1]:
            continue
        mine = all_sums[:, units]
        total = torch.logaddexp(mine, their_sums)
        base = total.masked_fill(total == -torch.inf, 0.0)
        shares = [(each - base).exp()[..., None] for each in (mine, their_sums)]
        merged = sum(part.unflatten(2, (block, -1)).float() * share
                     for part, share in zip((outputs[:, units], theirs), shares, strict=True))
        outputs[:, units] = cast(Tensor, merged).flatten(2).to(output.dtype)
        all_sums[:, units] = total


