"""The cost of a layout beside dense attention, by formulas.

A product of matrices (m, k) and (k, n) is 2 m k n FLOPs. Forward has two for each visited pair of query and key, scores and
values, backward five: scores again, and the gradients of probabilities, values, queries and keys. Dense attention that keeps
its probabilities for backward takes length^2 elements of each head and sample; `attend` keeps its output and the log-sum-exp
of each row.
"""

from __future__ import annotations

from dataclasses import dataclass

from shoal.attention.blocks import Blocks

__all__ = ["AttentionCost"]

_FORWARD, _BACKWARD = 2, 5
_FP32 = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionCost:
    """The cost of one layer's attention of one sample, in fp32."""

    blocks: Blocks
    heads: int
    dim: int
    """The head dim."""

    @property
    def pairs(self) -> int:
        """Visited pairs of query and key, of all heads."""
        return round(self.blocks.density * self.dense_pairs)

    @property
    def dense_pairs(self) -> int:
        """All pairs of query and key."""
        return self.heads * self.blocks.length * self.blocks.kv_length

    @property
    def flops(self) -> int:
        """FLOPs of forward and backward."""
        return 2 * self.dim * self.pairs * (_FORWARD + _BACKWARD)

    @property
    def dense_flops(self) -> int:
        """FLOPs of dense attention; its backward keeps the scores and has four products."""
        return 2 * self.dim * self.dense_pairs * (_FORWARD + _BACKWARD - 1)

    @property
    def saved_bytes(self) -> int:
        """Bytes that `attend` keeps for backward beside query, key and value: the output and the log-sum-exp."""
        return _FP32 * self.heads * self.blocks.length * (self.dim + 1)

    @property
    def dense_bytes(self) -> int:
        """Bytes that dense attention keeps where it keeps its probabilities."""
        return _FP32 * self.dense_pairs

    @property
    def index_bytes(self) -> int:
        """Bytes of the compressed rows, once for all layers and steps."""
        return self.blocks.starts.nbytes + self.blocks.columns.nbytes
