"""Small layers for pipelines in tests."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from shoal.pipeline.layer import LayerSpec, TiedLayerSpec

WIDTH, WORDS = 8, 13


class Block(nn.Module):
    """A residual block that records each build and each run."""

    built: ClassVar[list[int]] = []
    runs: ClassVar[list[int]] = []

    def __init__(self, number: int, width: int = WIDTH):
        super().__init__()
        self.number = number
        self.inner = nn.Linear(width, width)
        if not self.inner.weight.is_meta:
            self.built.append(number)

    def forward(self, x: Tensor) -> Tensor:
        self.runs.append(self.number)
        return x + torch.tanh(self.inner(x))


class Head(nn.Module):
    """Scores words by a weight that an embedding may share, and its own bias."""

    def __init__(self, words: int = WORDS, width: int = WIDTH, dtype: torch.dtype = torch.float32):
        super().__init__()
        self.scores = nn.Linear(width, words, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.scores(x)


def gpt(blocks: int = 4, *, tied: bool = True) -> dict[str, Any]:
    """Return the named layers of a small language model."""
    embed = TiedLayerSpec("words", nn.Embedding, WORDS, WIDTH) if tied else LayerSpec(nn.Embedding, WORDS, WIDTH)
    head = TiedLayerSpec("words", Head, tied_weight_attr="scores.weight") if tied else LayerSpec(Head)
    return {"embed": embed, **{f"body.h.{number}": LayerSpec(Block, number) for number in range(blocks)},
            "norm": LayerSpec(nn.LayerNorm, WIDTH), "head": head}


def loss_of(scores: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(scores.flatten(0, -2), labels.flatten())


def tokens(seed: int = 0) -> Tensor:
    return torch.randint(WORDS, (2, 5), generator=torch.Generator().manual_seed(seed))
