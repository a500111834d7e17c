"""Dropout from a counter: a hash of (seed, batch, head, query, key) says whether a probability is dropped.

Nothing is stored between forward and backward, and every backend, thread count and recompute drops the same ones. The hash
is the 32-bit finalizer of MurmurHash3, a bijection, over a Weyl sequence along the keys.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["drop_rows", "keep", "row_keys", "threshold"]

_GOLDEN = 0x9E3779B9
_WORD = 0xFFFFFFFF


def _mix(h: Tensor) -> Tensor:
    """Hash int64 tensors that hold 32 bits each."""
    h = ((h ^ (h >> 16)) * 0x85EBCA6B) & _WORD
    h = ((h ^ (h >> 13)) * 0xC2B2AE35) & _WORD
    return h ^ (h >> 16)


def threshold(dropout: float) -> int:
    """Return the number below which a hash is dropped, of 2^32."""
    return min(round(dropout * 2**32), _WORD)


def row_keys(seed: int, batches: int, heads: Tensor, positions: Tensor) -> Tensor:
    """Return the key of each query (batches, heads, length), int64 of 32 bits.

    `heads` (heads,) are the numbers of the heads, `positions` (heads or 1, length) those of the queries of each.
    """
    low, high = seed & _WORD, (seed >> 32) & _WORD
    pair = (torch.arange(batches, device=heads.device)[:, None] * _GOLDEN + heads + 1) & _WORD
    keys = _mix(low ^ _mix(high ^ _mix(pair)))
    rows = _mix((positions * _GOLDEN + 1) & _WORD)
    return _mix(keys[..., None] ^ rows)


def keep(keys: Tensor, columns: Tensor, dropped: int) -> Tensor:
    """Return whether each probability stays: `keys` (..., queries, 1) of `row_keys`, `columns` (..., 1, keys) positions."""
    return _mix((keys + columns * _GOLDEN) & _WORD) >= dropped


def drop_rows(rows: Tensor, residual: Tensor | None, dropout: float, seed: int) -> Tensor:
    """Return dropout(rows) [+ residual], both (rows, columns), by the hash of (seed, row, column)."""
    first = torch.zeros(1, dtype=torch.int64, device=rows.device)
    keys = row_keys(seed, 1, first, torch.arange(rows.shape[0], device=rows.device)[None])[0, 0]
    kept = keep(keys[:, None], torch.arange(rows.shape[1], device=rows.device), threshold(dropout))
    dropped = rows * kept * (1 / (1 - dropout))
    return dropped if residual is None else dropped + residual
