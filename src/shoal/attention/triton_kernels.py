"""Block-sparse attention in Triton: a program for each block of rows forward, and for each block of columns backward.

Forward keeps a running maximum and sum over the visited blocks of a row (online softmax). Backward computes the
probabilities again from the log-sum-exp. One kernel goes along rows, for queries; another goes along columns, for keys and
values: no two programs write one place, and every sum has a fixed order. Products of 16-bit operands are summed in fp32;
those of fp32 operands are exact fp32 products (no TF32).

This file is imported only where Triton is installed. With `TRITON_INTERPRET=1` Triton runs it on the host.
"""

# Triton is untyped, and not installed on every machine that checks types.
# pyright: basic, reportMissingImports=false, reportIndexIssue=false, reportGeneralTypeIssues=false
# pyright: reportOperatorIssue=false, reportCallIssue=false

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import knobs

from shoal.attention.blocks import Blocks
from shoal.attention.call import HIDES, AttentionCall, in_rows
from shoal.device import HOST, kept_for_stream, selected

__all__ = ["INTERPRETED", "backward", "forward"]

_LEAST = tl.constexpr(HIDES)
INTERPRETED = bool(knobs.runtime.interpret)
"""Whether Triton's interpreter runs the kernels, on the host."""

_LEAST_EDGE = 16
"""The least edge of a matrix product in Triton; a narrower head dim is padded in registers."""


def forward(call: AttentionCall, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Return the output, laid out as `query` is, and the log-sum-exp (batches, heads, length) in fp32."""
    query, key, value = (in_rows(each) for each in (query, key, value))
    output = torch.empty_like(query)
    if output.stride(-1) != 1:  # of a query whose memory overlaps, as that of windows by `unfold`
        output = query.new_empty(query.shape)
    sums = torch.empty(query.shape[:3], dtype=torch.float32, device=query.device)
    with selected(query.device):
        _forward[(call.blocks.row_blocks, call.heads, query.shape[0])](
            query, key, value, output, sums, *_strides(query, key, value, output),
            *_along_rows(query.device, call.blocks), *_masks(call, query, key), **_constants(call, query))
    return output, sums


def backward(call: AttentionCall, query: Tensor, key: Tensor, value: Tensor, output: Tensor, sums: Tensor,
             gradient: Tensor, *, score_gradient: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of query, key and value in fp32; `score_gradient` is as in `shoal.native.attention`."""
    query, key, value, gradient = (in_rows(each) for each in (query, key, value, gradient))
    sums = sums.contiguous()  # hooks on saved tensors may give back other strides
    inner = (output.float() * gradient.float()).sum(-1).contiguous()
    to_query, to_key, to_value = (torch.empty(each.shape, dtype=torch.float32, device=query.device)
                                 for each in (query, key, value))
    blocks, operands = call.blocks, (query, key, value, gradient)
    masks, constants = _masks(call, query, key), _constants(call, query)
    scores = to_query if score_gradient is None else score_gradient  # an absent tensor is any, and is not written
    with selected(query.device):
        _to_query[(blocks.row_blocks, call.heads, query.shape[0])](
            *operands, sums, inner, to_query, scores, *_strides(*operands, to_query, scores),
            *_along_rows(query.device, blocks), *masks, SCORES=score_gradient is not None, **constants)
        _to_key_and_value[(blocks.column_blocks, key.shape[1], query.shape[0])](
            *operands, sums, inner, to_key, to_value, *_strides(*operands, to_key, to_value),
            *_along_columns(query.device, blocks), *masks, blocks.column_blocks, **constants)
    return to_query, to_key, to_value


# --- Arguments of the kernels ---

class _Visits(NamedTuple):
    """The visited blocks along the lines of a layout, its rows or its columns, as int32 on the device.

    Those of line i are `starts[i]` to `starts[i + 1]`. Each has its number among those of its head (`numbers`), the line of
    the other direction that it is on (`others`), and the numbers of its row and column in the whole layout.
    """

    starts: Tensor
    numbers: Tensor
    others: Tensor
    row_places: Tensor
    column_places: Tensor


@kept_for_stream
def _along_rows(device: torch.device, blocks: Blocks) -> _Visits:
    firsts = blocks.starts[:-1:blocks.row_blocks]
    numbers = torch.arange(blocks.visited, device="cpu") - firsts[blocks.rows // blocks.row_blocks]
    rows = blocks.rows % blocks.row_blocks if blocks.row_places is None else blocks.row_places[blocks.rows]
    columns = blocks.columns if blocks.column_places is None else blocks.column_places
    return _on(device, blocks.starts, numbers, blocks.columns, rows, columns)


@kept_for_stream
def _along_columns(device: torch.device, blocks: Blocks) -> _Visits:
    rows = _along_rows(HOST, blocks)
    lines = blocks.rows // blocks.row_blocks * blocks.column_blocks + blocks.columns
    order = lines.argsort(stable=True)
    counts = torch.bincount(lines, minlength=blocks.heads * blocks.column_blocks)
    return _on(device, torch.cat([counts.new_zeros(1), counts.cumsum(0)]), rows.numbers[order],
               (blocks.rows % blocks.row_blocks)[order], rows.row_places[order], rows.column_places[order])


def _on(device: torch.device, *tensors: Tensor) -> _Visits:
    return _Visits(*(each.to(device, torch.int32) for each in tensors))


def _masks(call: AttentionCall, query: Tensor, key: Tensor) -> tuple[Any, ...]:
    """Return hidden blocks, the keys of dropout and three terms, then their strides and the sizes; an absent one is any."""
    hidden = call.hidden
    keys = call.row_keys(query.shape[0], query.device).to(torch.int32) if call.threshold else query
    terms = [tensor.view(torch.uint8) if tensor.dtype == torch.bool else tensor
             for tensor in (in_rows(term.tensor) for term in call.terms)]
    absent = [query] * (3 - len(terms))
    strides = [0, 0] if hidden is None else _broadcast_strides(hidden, 2)
    for term in terms:
        strides += _broadcast_strides(term, 3)
    return (query if hidden is None else hidden.view(torch.uint8), keys, *terms, *absent, *strides, *[0] * (3 * len(absent)),
            call.scale, call.kept, call.heads, call.blocks.row_blocks, call.heads // key.shape[1])


def _broadcast_strides(tensor: Tensor, dims: int) -> list[int]:
    """Return the strides of the first `dims`, 0 where a dim of size 1 is for all."""
    return [0 if tensor.shape[dim] == 1 else tensor.stride(dim) for dim in range(dims)]


def _constants(call: AttentionCall, query: Tensor) -> dict[str, Any]:
    """Return the constants for which a kernel is compiled."""
    block, dim = call.blocks.block, query.shape[3]
    return {"BLOCK": block, "DIM": dim, "WIDE": max(_LEAST_EDGE, triton.next_power_of_2(dim)), "CAUSAL": call.causal,
            "HIDDEN": call.hidden is not None, "TERMS": len(call.terms),
            "MULTIPLIES": sum(1 << i for i, term in enumerate(call.terms) if term.multiplies),
            "DROPPED": call.threshold, "SHARED": call.blocks.heads == 1, "num_warps": {16: 1, 32: 2}.get(block, 4)}


def _strides(*tensors: Tensor) -> list[int]:
    return [stride for tensor in tensors for stride in tensor.stride()[:3]]


# --- Kernels ---
# Offsets are int64: a mask of 65,536 x 65,536 has more elements than int32 counts.

@triton.jit
def _mix(h):
    """Hash 32 bits: the finalizer of MurmurHash3, as in dropout.py."""
    h = (h ^ (h >> 16)) * 0x85EBCA6B
    h = (h ^ (h >> 13)) * 0xC2B2AE35
    return h ^ (h >> 16)


@triton.jit
def _kept_there(keys, batch, head, heads, length, rows, places, DROPPED: tl.constexpr):
    """Return which probabilities of a tile stay, by the keys (batches, heads, length) and the columns in the whole."""
    of_rows = tl.load(keys + (batch * heads + head) * length + rows).to(tl.uint32, bitcast=True)
    return _mix(of_rows[:, None] + places.to(tl.uint32)[None, :] * 0x9E3779B9) >= DROPPED


@triton.jit
def _with_term(scores, term, batch_stride, head_stride, row_stride, batch, head, rows, places, MULTIPLIES: tl.constexpr):
    """Add a term to a tile of scores, and hide those to which it adds HIDES or less; or hide the scores where it is 0."""
    at = term + batch * batch_stride + head * head_stride + rows[:, None] * row_stride + places[None, :]
    values = tl.load(at)
    if MULTIPLIES:
        return tl.where(values == 0, float("-inf"), scores)
    added = values.to(tl.float32)
    return tl.where(added <= _LEAST, float("-inf"), scores + added)


@triton.jit
def _tile(matrix, batch_stride, head_stride, row_stride, batch, head, rows, DIM: tl.constexpr, WIDE: tl.constexpr):
    """Load some rows of one head, padded with zeros to WIDE."""
    dims = tl.arange(0, WIDE)
    at = matrix + batch * batch_stride + head * head_stride + rows[:, None] * row_stride + dims[None, :]
    return tl.load(at, mask=(dims < DIM)[None, :], other=0.0)


@triton.jit
def _store(matrix, batch_stride, head_stride, row_stride, batch, head, rows, values, DIM: tl.constexpr, WIDE: tl.constexpr):
    """Write some rows of one head."""
    dims = tl.arange(0, WIDE)
    at = matrix + batch * batch_stride + head * head_stride + rows[:, None] * row_stride + dims[None, :]
    tl.store(at, values.to(matrix.dtype.element_ty), mask=(dims < DIM)[None, :])


@triton.jit
def _scores(q, k, rows, positions, places, batch, head, term0, term1, term2, t0b, t0h, t0r, t1b, t1h, t1r, t2b, t2h, t2r,
            scale, CAUSAL: tl.constexpr, TERMS: tl.constexpr, MULTIPLIES: tl.constexpr):
    """Return the scores of a tile of queries and a tile of keys, with causal mask and terms."""
    scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
    if TERMS > 0:
        scores = _with_term(scores, term0, t0b, t0h, t0r, batch, head, rows, places, MULTIPLIES & 1)
    if TERMS > 1:
        scores = _with_term(scores, term1, t1b, t1h, t1r, batch, head, rows, places, MULTIPLIES >> 1 & 1)
    if TERMS > 2:
        scores = _with_term(scores, term2, t2b, t2h, t2r, batch, head, rows, places, MULTIPLIES >> 2)
    if CAUSAL:
        scores = tl.where(positions[:, None] >= places[None, :], scores, float("-inf"))
    return scores


@triton.jit
def _forward(query, key, value, output, sums, qb, qh, qr, kb, kh, kr, vb, vh, vr, ob, oh, orow,
             starts, numbers, others, row_places, column_places,
             hidden, keys, term0, term1, term2, hb, hr, t0b, t0h, t0r, t1b, t1h, t1r, t2b, t2h, t2r,
             scale, kept, heads, row_blocks, group,
             BLOCK: tl.constexpr, DIM: tl.constexpr, WIDE: tl.constexpr, CAUSAL: tl.constexpr, HIDDEN: tl.constexpr,
             TERMS: tl.constexpr, MULTIPLIES: tl.constexpr, DROPPED: tl.constexpr, SHARED: tl.constexpr):
    """Compute a block of rows of one head: its output and log-sum-exp."""
    row, head, batch = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    inner = tl.arange(0, BLOCK)
    rows = row * BLOCK + inner
    line = row if SHARED else head * row_blocks + row
    q = _tile(query, qb, qh, qr, batch, head, rows, DIM, WIDE)
    top = tl.full([BLOCK], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    sum_of_values = tl.zeros([BLOCK, WIDE], tl.float32)
    for visit in range(tl.load(starts + line), tl.load(starts + line + 1)):
        place = tl.load(column_places + visit).to(tl.int64)
        masked = 0
        if HIDDEN:
            masked = tl.load(hidden + batch * hb + row * hr + place)
        if masked == 0:
            columns = tl.load(others + visit).to(tl.int64) * BLOCK + inner
            places, positions = place * BLOCK + inner, tl.load(row_places + visit) * BLOCK + inner
            k = _tile(key, kb, kh, kr, batch, head // group, columns, DIM, WIDE)
            v = _tile(value, vb, vh, vr, batch, head // group, columns, DIM, WIDE)
            scores = _scores(q, k, rows, positions, places, batch, head, term0, term1, term2,
                             t0b, t0h, t0r, t1b, t1h, t1r, t2b, t2h, t2r, scale, CAUSAL, TERMS, MULTIPLIES)
            higher = tl.maximum(top, tl.max(scores, 1))
            shift = tl.where(higher == float("-inf"), 0.0, higher)
            weights = tl.exp(scores - shift[:, None])
            factor = tl.exp(top - shift)
            total = total * factor + tl.sum(weights, 1)
            if DROPPED:
                stays = _kept_there(keys, batch, head, heads, row_blocks * BLOCK, rows, places, DROPPED)
                weights = tl.where(stays, weights * kept, 0.0)
            sum_of_values = sum_of_values * factor[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
            top = higher
    seen = total != 0
    shift = tl.where(top == float("-inf"), 0.0, top)
    result = sum_of_values / tl.where(seen, total, 1.0)[:, None]
    _store(output, ob, oh, orow, batch, head, rows, result, DIM, WIDE)
    log_sum = tl.where(seen, shift + tl.log(tl.where(seen, total, 1.0)), float("-inf"))
    tl.store(sums + (batch * heads + head) * row_blocks * BLOCK + rows, log_sum)


@triton.jit
def _changes(q, k, v, grad, log_sum, inner_product, rows, positions, places, batch, head, keys, heads, length,
             term0, term1, term2, t0b, t0h, t0r, t1b, t1h, t1r, t2b, t2h, t2r, scale, kept,
             CAUSAL: tl.constexpr, TERMS: tl.constexpr, MULTIPLIES: tl.constexpr, DROPPED: tl.constexpr):
    """Return the probabilities of a tile after dropout, and the gradient of its scores."""
    scores = _scores(q, k, rows, positions, places, batch, head, term0, term1, term2,
                     t0b, t0h, t0r, t1b, t1h, t1r, t2b, t2h, t2r, scale, CAUSAL, TERMS, MULTIPLIES)
    weights = tl.exp(scores - tl.where(log_sum == float("-inf"), float("inf"), log_sum)[:, None])
    product = tl.dot(grad, tl.trans(v), input_precision="ieee")
    after = weights
    if DROPPED:
        stays = _kept_there(keys, batch, head, heads, length, rows, places, DROPPED)
        after = tl.where(stays, weights * kept, 0.0)
        product = tl.where(stays, product * kept, 0.0)
    return after, weights * (product - inner_product[:, None])


@triton.jit
def _to_query(query, key, value, gradient, sums, inner_products, to_query, score_gradient,
              qb, qh, qr, kb, kh, kr, vb, vh, vr, gb, gh, gr, ob, oh, orow, sb, sh, sn,
              starts, numbers, others, row_places, column_places,
              hidden, keys, term0, term1, term2, hb, hr, t0b, t0h, t0r, t1b, t1h, t1r, t2b, t2h, t2r,
              scale, kept, heads, row_blocks, group, SCORES: tl.constexpr,
              BLOCK: tl.constexpr, DIM: tl.constexpr, WIDE: tl.constexpr, CAUSAL: tl.constexpr, HIDDEN: tl.constexpr,
              TERMS: tl.constexpr, MULTIPLIES: tl.constexpr, DROPPED: tl.constexpr, SHARED: tl.constexpr):
    """Compute the gradient of a block of queries of one head, and (SCORES) of the scores of its visited blocks."""
    row, head, batch = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    inner = tl.arange(0, BLOCK)
    rows = row * BLOCK + inner
    line = row if SHARED else head * row_blocks + row
    of_rows = (batch * heads + head) * row_blocks * BLOCK + rows
    q = _tile(query, qb, qh, qr, batch, head, rows, DIM, WIDE)
    grad = _tile(gradient, gb, gh, gr, batch, head, rows, DIM, WIDE)
    log_sum, product = tl.load(sums + of_rows), tl.load(inner_products + of_rows)
    total = tl.zeros([BLOCK, WIDE], tl.float32)
    for visit in range(tl.load(starts + line), tl.load(starts + line + 1)):
        place = tl.load(column_places + visit).to(tl.int64)
        masked = 0
        if HIDDEN:
            masked = tl.load(hidden + batch * hb + row * hr + place)
        if masked == 0:
            columns = tl.load(others + visit).to(tl.int64) * BLOCK + inner
            places, positions = place * BLOCK + inner, tl.load(row_places + visit) * BLOCK + inner
            k = _tile(key, kb, kh, kr, batch, head // group, columns, DIM, WIDE)
            v = _tile(value, vb, vh, vr, batch, head // group, columns, DIM, WIDE)
            _, change = _changes(q, k, v, grad, log_sum, product, rows, positions, places, batch, head, keys, heads,
                                 row_blocks * BLOCK, term0, term1, term2, t0b, t0h, t0r, t1b, t1h, t1r, t2b, t2h, t2r,
                                 scale, kept, CAUSAL, TERMS, MULTIPLIES, DROPPED)
            if SCORES:
                at = score_gradient + batch * sb + head * sh + tl.load(numbers + visit).to(tl.int64) * sn
                tl.store(at + inner[:, None] * BLOCK + inner[None, :], change)
            total += tl.dot(change.to(k.dtype), k, input_precision="ieee")
    _store(to_query, ob, oh, orow, batch, head, rows, total * scale, DIM, WIDE)


@triton.jit
def _to_key_and_value(query, key, value, gradient, sums, inner_products, to_key, to_value,
                      qb, qh, qr, kb, kh, kr, vb, vh, vr, gb, gh, gr, okb, okh, okr, ovb, ovh, ovr,
                      starts, numbers, others, row_places, column_places,
                      hidden, keys, term0, term1, term2, hb, hr, t0b, t0h, t0r, t1b, t1h, t1r, t2b, t2h, t2r,
                      scale, kept, heads, row_blocks, group, column_blocks,
                      BLOCK: tl.constexpr, DIM: tl.constexpr, WIDE: tl.constexpr, CAUSAL: tl.constexpr,
                      HIDDEN: tl.constexpr, TERMS: tl.constexpr, MULTIPLIES: tl.constexpr, DROPPED: tl.constexpr,
                      SHARED: tl.constexpr):
    """Compute the gradients of a block of keys and values of one head, from all query heads that read it."""
    column, kv_head, batch = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    inner = tl.arange(0, BLOCK)
    columns = column * BLOCK + inner
    k = _tile(key, kb, kh, kr, batch, kv_head, columns, DIM, WIDE)
    v = _tile(value, vb, vh, vr, batch, kv_head, columns, DIM, WIDE)
    total_key = tl.zeros([BLOCK, WIDE], tl.float32)
    total_value = tl.zeros([BLOCK, WIDE], tl.float32)
    for member in range(group):
        head = kv_head * group + member
        line = column if SHARED else head * column_blocks + column
        for visit in range(tl.load(starts + line), tl.load(starts + line + 1)):
            row, place = tl.load(others + visit).to(tl.int64), tl.load(column_places + visit).to(tl.int64)
            masked = 0
            if HIDDEN:
                masked = tl.load(hidden + batch * hb + row * hr + place)
            if masked == 0:
                rows = row * BLOCK + inner
                places, positions = place * BLOCK + inner, tl.load(row_places + visit) * BLOCK + inner
                of_rows = (batch * heads + head) * row_blocks * BLOCK + rows
                q = _tile(query, qb, qh, qr, batch, head, rows, DIM, WIDE)
                grad = _tile(gradient, gb, gh, gr, batch, head, rows, DIM, WIDE)
                after, change = _changes(
                    q, k, v, grad, tl.load(sums + of_rows), tl.load(inner_products + of_rows), rows, positions, places,
                    batch, head, keys, heads, row_blocks * BLOCK, term0, term1, term2, t0b, t0h, t0r, t1b, t1h, t1r, t2b,
                    t2h, t2r, scale, kept, CAUSAL, TERMS, MULTIPLIES, DROPPED)
                total_value += tl.dot(tl.trans(after.to(grad.dtype)), grad, input_precision="ieee")
                total_key += tl.dot(tl.trans(change.to(q.dtype)), q, input_precision="ieee")
    _store(to_key, okb, okh, okr, batch, kv_head, columns, total_key * scale, DIM, WIDE)
    _store(to_value, ovb, ovh, ovr, batch, kv_head, columns, total_value, DIM, WIDE)
