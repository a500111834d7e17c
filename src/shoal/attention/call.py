"""One call of attention as a value: shapes, scale, masks and dropout, without the tensors that autograd follows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

from shoal.attention.dropout import row_keys, threshold
from shoal.autograd import in_trace
from shoal.device import kept_for_stream

if TYPE_CHECKING:
    from shoal.attention.blocks import Blocks

__all__ = ["HIDES", "AttentionCall", "Term", "addend", "in_rows"]

HIDES = -65504.0
"""An addend of this or less, the least number of fp16, hides its key as -inf does.

Models write "minus infinity" as the least number of some dtype. In a row that sees only such keys it would swallow the
scores, and the log-sum-exp in fp32 would lose the number of keys. The C++ kernel has the same number.
"""


def addend(values: Tensor) -> Tensor:
    """Return what `values` of a mask or bias add to scores, in fp32: -inf where they hide. Gradients flow to the others."""
    return F.threshold(values.float(), HIDES, -torch.inf)


def in_rows(tensor: Tensor) -> Tensor:
    """Return `tensor` as kernels read it: elements of a row beside each other, no lazily negated view.

    A saved tensor may be otherwise in backward than it was in forward: hooks on saved tensors may change strides.
    """
    tensor = tensor.resolve_neg()
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


@dataclass(frozen=True, slots=True, kw_only=True)
class Term:
    """A tensor that is added to scores; or, where `multiplies`, one whose zeros hide scores.

    `tensor` is (batch or 1, heads or 1, queries or 1, keys), of a float dtype or bool. It is never expanded in memory.
    """

    tensor: Tensor
    multiplies: bool

    def added(self, values: Tensor) -> Tensor:
        """Return the addend to scores of some `values` of the tensor, in fp32."""
        if not self.multiplies:
            return addend(values)
        return torch.zeros((), dtype=torch.float32, device=values.device).masked_fill(values == 0, -torch.inf)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionCall:
    """The computation of a backend: softmax(scale * q k^T + terms) v over the visited blocks.

    q is (batches, heads, length, dim), k and v (batches, kv_heads, kv_length, dim); query head h reads key head
    h // (heads / kv_heads). With `causal` a query sees keys of its own position and before.
    """

    blocks: Blocks
    heads: int
    scale: float
    causal: bool
    terms: tuple[Term, ...]
    """At most three. The first may have a gradient: the bias."""
    biased: bool
    """Whether the first term is the bias."""
    dropout: float
    seed: int
    hidden: Tensor | None
    """(batch or 1, query blocks or 1, key blocks) bool: blocks that masks hide wholly."""
    first_head: int = 0
    """The number of the first head where these are some of the heads of the whole attention."""

    @property
    def threshold(self) -> int:
        """The hashes below it are dropped."""
        return threshold(self.dropout)

    @property
    def kept(self) -> float:
        """The factor on probabilities that stay."""
        return 1.0 / (1.0 - self.dropout)

    def row_keys(self, batches: int, device: torch.device) -> Tensor:
        """Return the dropout's key of each query (batches, heads, length)."""
        heads = torch.arange(self.first_head, self.first_head + self.heads, device=device)
        if torch.compiler.is_compiling() or in_trace():  # a graph's tensors may not stay in the cache
            return row_keys(self.seed, batches, heads, self.blocks.positions_of_rows().to(device))
        return row_keys(self.seed, batches, heads, _row_positions(device, self.blocks))


@kept_for_stream
def _row_positions(device: torch.device, blocks: Blocks) -> Tensor:
    return blocks.row_positions.to(device)
