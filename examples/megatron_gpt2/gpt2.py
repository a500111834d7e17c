"""GPT-2, written for tensor ranks: learned positions, pre-norm blocks with biases, the head tied to the embedding.

All layers are those of `shoal.tensor_parallel`, except `ColumnParallelLinear`, which shows a script's own layer: it holds a
slice of a weight and marks it as such. The whole model starts with the same weights for any number of ranks.
"""

# pyright: reportIncompatibleMethodOverride=false
# (torch declares the forward and backward of a Function with any arguments.)

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import mpu
from shoal.tensor_parallel import QKVLinear, RowLinear, VocabularyEmbedding, VocabularyHead, vocabulary_cross_entropy


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The size of a model; `words` need not divide by the ranks."""

    layers: int = 2
    dim: int = 64
    heads: int = 4
    words: int = 257
    positions: int = 256


class CopyToModelRanks(torch.autograd.Function):
    """Pass a whole tensor to the slices of a layer; backward sums the addends of its gradient over the ranks."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        gradient = gradient.contiguous()
        dist.all_reduce(gradient, group=mpu.get_model_parallel_group())
        return gradient


class ColumnParallelLinear(nn.Module):
    """A linear layer of which each model rank has an equal slice of the outputs.

    The engine needs only the marks on its parameters: norms count every element once, and checkpoints hold the whole
    weight, for any number of ranks.
    """

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        whole = nn.Linear(inputs, outputs)
        rank, ranks = mpu.get_model_parallel_rank(), mpu.get_model_parallel_world_size()
        self.weight = nn.Parameter(whole.weight.detach().chunk(ranks)[rank].clone())
        self.bias = nn.Parameter(whole.bias.detach().chunk(ranks)[rank].clone())
        for parameter in (self.weight, self.bias):
            marked = cast(Any, parameter)
            marked.tensor_model_parallel, marked.partition_dim = True, 0

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(cast(Tensor, CopyToModelRanks.apply(x)), self.weight, self.bias)


class Block(nn.Module):
    """Attention over this rank's heads, then an MLP over this rank's slice of its intermediate, each with a residual."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        group = mpu.get_model_parallel_group()
        self.ln_1 = nn.LayerNorm(shape.dim)
        self.qkv = QKVLinear(shape.dim, shape.heads, shape.dim // shape.heads, group)
        self.attention_out = RowLinear(shape.dim, shape.dim, group)
        self.ln_2 = nn.LayerNorm(shape.dim)
        self.mlp_in = ColumnParallelLinear(shape.dim, 4 * shape.dim)
        self.mlp_out = RowLinear(4 * shape.dim, shape.dim, group)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (part.transpose(1, 2) for part in self.qkv.split_heads(self.qkv(self.ln_1(x))))
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.attention_out(mixed.transpose(1, 2).flatten(-2))
        return x + self.mlp_out(F.gelu(self.mlp_in(self.ln_2(x)), approximate="tanh"))


class GPT2(nn.Module):
    """Returns the mean cross-entropy in nats of tokens (batch, length) and the tokens that follow them."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        group = mpu.get_model_parallel_group()
        self.words = VocabularyEmbedding(shape.words, shape.dim, group)
        self.positions = nn.Embedding(shape.positions, shape.dim)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.ln_f = nn.LayerNorm(shape.dim)
        self.head = VocabularyHead(shape.dim, shape.words, group, gather_output=False)
        self.head.weight = self.words.weight
        self.shape = shape
        with torch.no_grad():  # embeddings are drawn with deviation 1
            self.words.weight.mul_(0.02)
            self.positions.weight.mul_(0.02)

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        hidden = self.words(x) + self.positions(torch.arange(x.shape[1], device=x.device))
        for block in self.blocks:
            hidden = block(hidden)
        return vocabulary_cross_entropy(self.head(self.ln_f(hidden)), targets, mpu.get_model_parallel_group(),
                                        words=self.shape.words)
