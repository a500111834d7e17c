"""Attention on any device in plain torch operations: rows of blocks with equally many visited blocks are computed together.

The keys of a row's blocks are gathered beside each other, so that a bucket of rows is one batched dense attention. Rows are
bucketed by their number of visited blocks, rounded up to 1, 2, 3, 4, 6, 8, 12, 16 ...; the added blocks are masked. A bucket
is cut so that its scores take at most `_BYTES`, on the host `_HOST_BYTES`. Backward computes the probabilities again. The
tables of a layout's buckets are made once for a device, and not at each attention.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from shoal.attention.blocks import Blocks
from shoal.attention.call import AttentionCall, Term
from shoal.attention.dropout import keep
from shoal.autograd import without_autocast
from shoal.device import HOST, kept_for_stream

__all__ = ["backward", "forward"]

_BYTES = 4 << 20
"""Scores that are held at a time on an accelerator."""

_HOST_BYTES = 1 << 20
"""The same on the host, where scores that stay in the second cache are faster: by 5 % beside 4 MiB."""


@dataclass(frozen=True, slots=True)
class _Bucket:
    """Rows of one head: their block rows (rows,), the visited blocks (rows, degree), and which of these are real."""

    head: int
    rows: Tensor
    columns: Tensor
    real: Tensor | None
    chosen: Tensor | None
    """The numbers of the real ones, of rows * degree blocks; None where all are."""
    entries: Tensor
    """The place of each real block among the visited ones of the head (real blocks,)."""
    places: Tensor
    """The numbers of the visited blocks' columns in the whole layout (rows, degree)."""
    positions: Tensor
    """The position of each query in the whole sequence (rows, block)."""


@dataclass(slots=True)
class _Scored:
    """The scores of a bucket (batches, rows, block, keys) of all query heads of one layout head, and their operands."""

    scores: Tensor
    query: Tensor
    key: Tensor
    value: Tensor
    kept: Tensor | None


def _degree(count: int) -> int:
    """Return the least of 1, 2, 3, 4, 6, 8, 12, 16 ... that is at least `count`."""
    power = 1 << max(count - 1, 0).bit_length()
    return power * 3 // 4 if power >= 4 and count <= power * 3 // 4 else power


@kept_for_stream
def _buckets(device: torch.device, blocks: Blocks, batches: int, group: int) -> tuple[_Bucket, ...]:
    """Return the buckets of a layout on `device`, for `batches` and `group` query heads to a layout head."""
    return tuple(_on(device, bucket) for bucket in
                 _host_buckets(blocks, batches, group, _HOST_BYTES if device == HOST else _BYTES))


def _on(device: torch.device, bucket: _Bucket) -> _Bucket:
    columns = bucket.columns.to(device)
    return _Bucket(head=bucket.head, rows=bucket.rows.to(device), columns=columns,
                   real=None if bucket.real is None else bucket.real.to(device),
                   chosen=None if bucket.chosen is None else bucket.chosen.to(device), entries=bucket.entries.to(device),
                   places=columns if bucket.places is bucket.columns else bucket.places.to(device),
                   positions=bucket.positions.to(device))


def _host_buckets(blocks: Blocks, batches: int, group: int, most: int) -> Iterator[_Bucket]:
    """Yield the buckets on the host; the scores of each take at most `most` bytes, or are those of one row."""
    counts = blocks.starts.diff()
    for head in range(blocks.heads):
        first = head * blocks.row_blocks
        of_head = counts[first:first + blocks.row_blocks]
        degrees = torch.tensor([_degree(count) if count else 0 for count in of_head.tolist()], dtype=torch.int64,
                               device="cpu")
        for degree in degrees.unique().tolist():
            if not degree:
                continue
            rows = (degrees == degree).nonzero().flatten()
            at_once = max(1, most // (4 * max(batches, 1) * group * blocks.block**2 * degree))
            for some in rows.split(at_once):
                exact = of_head[some]
                offset = torch.arange(degree, device="cpu")
                real = offset < exact[:, None]
                entries = blocks.starts[first + some][:, None] + torch.minimum(offset, exact[:, None] - 1)
                columns = blocks.columns[entries].long()
                places = columns if blocks.column_places is None else blocks.column_places[entries].long()
                whole = bool(real.all())
                of_real = (entries if whole else entries[real]).flatten() - blocks.starts[first]
                yield _Bucket(head=head, rows=some, columns=columns, real=None if whole else real,
                              chosen=None if whole else real.flatten().nonzero().flatten(), entries=of_real, places=places,
                              positions=blocks.row_positions[head].view(-1, blocks.block)[some])


def _term_values(term: Term, bucket: _Bucket, blocks: Blocks, heads: slice) -> Tensor:
    """Return the term's addend to the bucket's scores: (batches or 1, heads or 1, rows, block or 1, degree * block)."""
    tensor = term.tensor if term.tensor.shape[1] == 1 else term.tensor[:, heads]
    batches, count, length, _ = tensor.shape
    columns, rows = bucket.places, bucket.rows
    cut = tensor.unflatten(-1, (-1, blocks.block))
    if length == 1:
        values = cut[:, :, 0][:, :, columns][:, :, :, None]
    else:
        cut = cut.unflatten(2, (blocks.row_blocks, blocks.block))
        values = cut[:, :, rows[:, None], :, columns].permute(2, 3, 0, 4, 1, 5)
        # advanced indices with a slice between them come first: (rows, degree, batches, heads, block, block)
    return term.added(values.reshape(batches, count, len(rows), values.shape[3], -1))


def _score(call: AttentionCall, bucket: _Bucket, heads: slice, query: Tensor, key: Tensor, value: Tensor,
           row_keys: Tensor | None) -> _Scored:
    """Compute the masked scores of a bucket: `query` (batches, heads, row blocks, block, dim), keys and values likewise."""
    blocks, rows, columns = call.blocks, bucket.rows, bucket.columns
    group = query.shape[1] // key.shape[1]
    some = query[:, heads].index_select(2, rows).float().mul_(call.scale)
    kv = slice(heads.start // group, (heads.stop - 1) // group + 1)
    gathered = [each[:, kv].index_select(2, columns.flatten()).unflatten(2, columns.shape).flatten(3, 4).float()
                for each in (key, value)]
    if kv.stop - kv.start != heads.stop - heads.start:
        gathered = [each.repeat_interleave(group, dim=1)[:, heads.start - kv.start * group:][:, :heads.stop - heads.start]
                    for each in gathered]
    scores = some @ gathered[0].transpose(-1, -2)
    for term in call.terms:
        scores += _term_values(term, bucket, blocks, heads)
    inner = torch.arange(blocks.block, device=query.device)
    positions = (bucket.places[..., None] * blocks.block + inner).flatten(1)  # (rows, keys)
    if bucket.real is not None:
        scores.masked_fill_(~bucket.real.repeat_interleave(blocks.block, 1)[:, None], -torch.inf)
    if call.causal:
        scores.masked_fill_(positions[:, None] > bucket.positions[..., None], -torch.inf)
    kept = None
    if row_keys is not None:
        keys = row_keys[:, heads].unflatten(2, (blocks.row_blocks, blocks.block))[:, :, rows]
        kept = keep(keys[..., None], positions[:, None], call.threshold)
    return _Scored(scores, some, gathered[0], gathered[1], kept)


def _heads_of(bucket: _Bucket, call: AttentionCall) -> slice:
    return slice(0, call.heads) if call.blocks.heads == 1 else slice(bucket.head, bucket.head + 1)


def _cut(blocks: Blocks, tensor: Tensor) -> Tensor:
    return tensor.unflatten(2, (tensor.shape[2] // blocks.block, blocks.block))


@without_autocast
def forward(call: AttentionCall, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Return the output, laid out as `query` where as wide, and the log-sum-exp (batches, heads, length) in fp32."""
    blocks = call.blocks
    q, k, v = (_cut(blocks, each) for each in (query, key, value))
    wide = value.shape[3]
    output = torch.zeros_like(query) if wide == query.shape[3] else query.new_zeros(*query.shape[:3], wide)
    sums = torch.full(query.shape[:3], -torch.inf, dtype=torch.float32, device=query.device)
    out, all_sums = _cut(blocks, output), _cut(blocks, sums)
    row_keys = call.row_keys(query.shape[0], query.device) if call.threshold else None
    for bucket in _buckets(query.device, blocks, query.shape[0], call.heads if blocks.heads == 1 else 1):
        heads = _heads_of(bucket, call)
        scored = _score(call, bucket, heads, q, k, v, row_keys)
        largest = scored.scores.amax(-1, keepdim=True)
        weights = scored.scores.sub_(largest.masked_fill(largest == -torch.inf, 0)).exp_()
        total = weights.sum(-1, keepdim=True)
        if scored.kept is not None:
            weights *= scored.kept
        share = total.reciprocal().masked_fill_(total == 0, 0)  # a row that sees nothing has weights and an output of 0
        out[:, heads, bucket.rows] = (weights @ scored.value).mul_(share.mul_(call.kept)).to(query.dtype)
        all_sums[:, heads, bucket.rows] = largest.add_(total.log_())[..., 0]
    return output, sums


@without_autocast
def backward(call: AttentionCall, query: Tensor, key: Tensor, value: Tensor, output: Tensor, sums: Tensor,
             gradient: Tensor, *, score_gradient: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of query, key and value in fp32; `score_gradient` is as in `shoal.native.attention`."""
    blocks, batches = call.blocks, query.shape[0]
    q, k, v, out, grad = (_cut(blocks, each) for each in (query, key, value, output, gradient))
    all_sums = _cut(blocks, sums)
    group = query.shape[1] // key.shape[1]
    to_query = torch.zeros(query.shape, dtype=torch.float32, device=query.device)
    to_key, to_value = (torch.zeros(each.shape, dtype=torch.float32, device=query.device) for each in (key, value))
    row_keys = call.row_keys(batches, query.device) if call.threshold else None
    for bucket in _buckets(query.device, blocks, batches, call.heads if blocks.heads == 1 else 1):
        heads, rows = _heads_of(bucket, call), bucket.rows
        scored = _score(call, bucket, heads, q, k, v, row_keys)
        some = grad[:, heads].index_select(2, rows).float()
        inner = (some * out[:, heads].index_select(2, rows).float()).sum(-1)
        of_rows = all_sums[:, heads].index_select(2, rows)
        weights = scored.scores.sub_(of_rows.masked_fill(of_rows == -torch.inf, torch.inf)[..., None]).exp_()
        product = some @ scored.value.transpose(-1, -2)
        dropped = weights
        if scored.kept is not None:
            factor = scored.kept.float().mul_(call.kept)
            dropped, product = weights * factor, product.mul_(factor)
        change = product.sub_(inner[..., None]).mul_(weights)
        if score_gradient is not None:
            _place(score_gradient, change, bucket, heads)
        _cut(blocks, to_query)[:, heads, rows] = (change @ scored.key).mul_(call.scale)
        for to, by in ((to_key, change.transpose(-1, -2) @ scored.query), (to_value, dropped.transpose(-1, -2) @ some)):
            _add(_cut(blocks, to), by, bucket.columns, heads, group)
    return to_query, to_key, to_value


def _add(to: Tensor, by: Tensor, columns: Tensor, heads: slice, group: int) -> None:
    """Add to the blocks (batches, kv heads, column blocks, block, dim) what rows gave (batches, heads, rows, keys, dim)."""
    batches, count, _, _, dim = by.shape
    first = heads.start // group
    if group > 1 and count > 1:
        by = by.unflatten(1, (count // group, group)).sum(2)
    size = to.shape[3]
    by = by.reshape(batches, by.shape[1], columns.numel(), size, dim)
    to[:, first:first + by.shape[1]].index_add_(2, columns.flatten(), by)


def _place(score_gradient: Tensor, change: Tensor, bucket: _Bucket, heads: slice) -> None:
    """Write the gradient of a bucket's scores (batches, heads, rows, block, keys) to its visited blocks."""
    cut = change.unflatten(-1, (bucket.columns.shape[1], -1))
    cut = cut.transpose(3, 4).flatten(2, 3)  # batches, heads, rows * degree, block, block
    score_gradient[:, heads, bucket.entries] = cut if bucket.chosen is None else cut[:, :, bucket.chosen]
