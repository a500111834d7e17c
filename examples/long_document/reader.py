"""A byte-level language model whose attention is dense or block-sparse; all else is the same.

Half of the heads have rotary positions, to read what is near. The other half have none, and search by content: their keys
are also those of the byte before ("smeared keys": Olsson et al. 2022, "In-context Learning and Induction Heads"), so that
one layer can find what followed the same bytes before.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

sys.path.append(str(Path(__file__).parents[1] / "gpt"))  # the embedding of bytes, and how matrices begin

from model import VOCABULARY, Embedding, Shape, initialise, rotate, rotation
from shoal.attention import Blocks, attend

SHAPES = {
    "tiny": Shape(layers=1, dim=32, heads=2, ngrams=3, rows=512),
    "small": Shape(layers=2, dim=64, heads=4, ngrams=3, rows=8192),
}
"""Of 0.07 and 1.7 million parameters, nearly all of them in the embedding of runs of bytes."""


class Layer(nn.Module):
    """Attention, then a two-layer perceptron, each added to the stream it reads (normalised)."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.attention_norm = nn.LayerNorm(shape.dim, bias=False)
        self.qkv = nn.Linear(shape.dim, 3 * shape.dim, bias=False)
        self.smear = nn.Parameter(torch.zeros(shape.heads - shape.heads // 2, 1, 1))
        self.attention_out = nn.Linear(shape.dim, shape.dim, bias=False)
        self.mlp_norm = nn.LayerNorm(shape.dim, bias=False)
        self.mlp_in = nn.Linear(shape.dim, 4 * shape.dim, bias=False)
        self.mlp_out = nn.Linear(4 * shape.dim, shape.dim, bias=False)

    def forward(self, x: Tensor, turns: Tensor, blocks: Blocks | None) -> Tensor:
        """Return (batch, length, dim) for `x` of that shape; `turns` are the rotary positions."""
        x = x + self.attention_out(self._attend(self.qkv(self.attention_norm(x)), turns, blocks))
        return x + self.mlp_out(F.gelu(self.mlp_in(self.mlp_norm(x))))

    def _attend(self, qkv: Tensor, turns: Tensor, blocks: Blocks | None) -> Tensor:
        parts = qkv.unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)  # (3, batch, heads, length, size)
        near = rotate(parts[:2, :, :self.heads // 2], turns)
        searching, key = parts[:2, :, self.heads // 2:]
        before = F.pad(key, (0, 0, 1, 0))[:, :, :-1]
        share = self.smear.sigmoid()
        query = torch.cat([near[0], searching], dim=1)
        key = torch.cat([near[1], share * before + (1 - share) * key], dim=1)
        mixed = eager(query, key, parts[2]) if blocks is None else attend(query, key, parts[2], blocks, causal=True)
        return mixed.transpose(1, 2).flatten(-2)


class Reader(nn.Module):
    """Bytes in, nats of each next byte out."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.embedding = Embedding(shape)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.dim, bias=False)
        self.head = nn.Linear(shape.dim, VOCABULARY, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                initialise(name, parameter, shape)

    def forward(self, text: Tensor, blocks: Blocks | None) -> Tensor:
        """Return the nats (batch, length) of bytes 1, 2, ... of `text` (batch, length + 1).

        Without `blocks` attention is dense, and makes matrices of length x length.
        """
        x = text[:, :-1].long()
        hidden = self.embedding(x)
        turns = rotation(x.shape[1], self.shape.dim // self.shape.heads, hidden)
        for layer in self.layers:
            hidden = layer(hidden, turns, blocks)
        logits = self.head(self.norm(hidden))
        return F.cross_entropy(logits.transpose(1, 2), text[:, 1:].long(), reduction="none")


def eager(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Attend causally with whole matrices of scores, as models do without a fused kernel."""
    scores = query @ key.transpose(-1, -2) / query.shape[-1] ** 0.5
    later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
    return scores.masked_fill(later, -torch.inf).softmax(-1) @ value


def eager_bytes(length: int, shape: Shape) -> int:
    """Return about how many bytes `eager` holds in a pass: probabilities of each layer, and four matrices at the peak."""
    return (shape.layers + 4) * shape.heads * length**2 * 4
