"""A GPT in plain PyTorch, one byte per token: pre-norm blocks, causal attention, rotary positions.

Nothing in this file knows about ranks, stages or precision: what trains it must not need to change it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

VOCABULARY = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The size of a model: `layers` blocks on vectors of `dim` elements, with `heads` attention heads.

    With `ngrams` = n, every byte is also embedded by the 2, ... n + 1 bytes that end at it, each from a table of `rows`.
    """

    layers: int
    dim: int
    heads: int
    ngrams: int = 0
    rows: int = 2048

    def build(self) -> GPT:
        return GPT(self)


PRESETS = {
    "tiny": Shape(layers=2, dim=64, heads=2),
    "3m": Shape(layers=4, dim=192, heads=4, ngrams=3),
    "30m": Shape(layers=6, dim=640, heads=10),
    "124m": Shape(layers=16, dim=800, heads=10),
}
"""Named after their parameters: 0.1, 3.0, 29.8 and 123.3 million."""


class Embedding(nn.Module):
    """A byte's own vector, plus one for each short run of bytes that ends at it, found by hash.

    The runs give a byte model from its first layer on what a tokenizer would give it, and cost no arithmetic; runs that
    share a row are told apart later on (Pagnoni et al. 2024, "Byte Latent Transformer", section 3.2.1).
    """

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.byte = nn.Embedding(VOCABULARY, shape.dim)
        self.runs = nn.ModuleList(nn.Embedding(shape.rows, shape.dim) for _ in range(shape.ngrams))

    def forward(self, x: Tensor) -> Tensor:
        """Embed bytes (batch, length) as vectors (batch, length, dim), each from itself and the bytes before it."""
        vectors = self.byte(x)
        key = x
        for order, table in enumerate(self.runs, start=1):
            before = F.pad(x + 1, (order, 0))[:, :x.shape[1]]  # 0: before the beginning
            key = (key * 1_000_003 + before) % 2_147_483_647
            vectors = vectors + table(key % self.shape.rows)
        return vectors


class Block(nn.Module):
    """Attention, then a two-layer perceptron, each added to the stream it reads (normalised)."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.attention_norm = nn.LayerNorm(shape.dim, bias=False)
        self.qkv = nn.Linear(shape.dim, 3 * shape.dim, bias=False)
        self.attention_out = nn.Linear(shape.dim, shape.dim, bias=False)
        self.mlp_norm = nn.LayerNorm(shape.dim, bias=False)
        self.mlp_in = nn.Linear(shape.dim, 4 * shape.dim, bias=False)
        self.mlp_out = nn.Linear(4 * shape.dim, shape.dim, bias=False)

    def forward(self, x: Tensor, rotation: Tensor) -> Tensor:
        x = x + self.attention_out(self._attend(self.qkv(self.attention_norm(x)), rotation))
        return x + self.mlp_out(F.gelu(self.mlp_in(self.mlp_norm(x))))

    def _attend(self, qkv: Tensor, rotation: Tensor) -> Tensor:
        parts = qkv.unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)  # (3, batch, heads, length, size)
        query, key = rotate(parts[:2], rotation)
        mixed = F.scaled_dot_product_attention(query, key, parts[2], is_causal=True)
        return mixed.transpose(1, 2).flatten(-2)


class GPT(nn.Module):
    """Bytes in, logits of the next byte out; given targets, their mean cross-entropy in nats instead."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.embedding = Embedding(shape)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.dim, bias=False)
        self.head = nn.Linear(shape.dim, VOCABULARY, bias=False)
        self._initialise()

    def forward(self, x: Tensor, targets: Tensor | None = None) -> Tensor:
        """Return logits (batch, length, 256), or a scalar loss when `targets` (batch, length) are given."""
        hidden = self.embedding(x)
        turns = rotation(x.shape[1], self.shape.dim // self.shape.heads, hidden)
        for block in self.blocks:
            hidden = block(hidden, turns)
        logits = self.head(self.norm(hidden))
        if targets is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())

    def flops(self, block: int) -> float:
        """Floating-point operations of one token's forward and backward in a block of `block` tokens.

        6 per weight of a matrix, and 12 * dim * block / 2 per layer for attention, of which the mask leaves half
        (Chowdhery et al. 2022, "PaLM", appendix B).
        """
        matrices = 12 * self.shape.layers * self.shape.dim ** 2 + VOCABULARY * self.shape.dim
        return 6 * matrices + 6 * self.shape.layers * self.shape.dim * block

    def _initialise(self) -> None:
        for name, parameter in self.named_parameters():
            if parameter.ndim > 1:
                initialise(name, parameter, self.shape)


def initialise(name: str, matrix: Tensor, shape: Shape) -> None:
    """Draw the values that the matrix of that name begins with, in place."""
    deviation = 0.02 if name.startswith("embedding.") else 0.6 / math.sqrt(matrix.shape[1])
    if name.endswith("_out.weight"):  # what is added to the stream starts small, so that depth does not matter
        deviation /= math.sqrt(2 * shape.layers)
    nn.init.normal_(matrix, std=deviation)


def rotation(length: int, size: int, like: Tensor) -> Tensor:
    """Return cosines and sines (2, length, size / 2) of rotary positions (Su et al. 2021, equation 34)."""
    frequencies = 10_000.0 ** (-torch.arange(0, size, 2, device=like.device) / size)
    angles = torch.outer(torch.arange(length, device=like.device), frequencies)
    return torch.stack((angles.cos(), angles.sin())).to(like.dtype)


def rotate(x: Tensor, rotation: Tensor) -> Tensor:
    """Turn the pairs (first half, second half) of the last dimension of `x` (..., length, size) by their positions."""
    cosine, sine = rotation
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cosine - second * sine, first * sine + second * cosine), dim=-1)
