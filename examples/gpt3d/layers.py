"""The GPT of `examples/gpt` as a list of layers with a tensor-parallel plan: all that 3D parallelism needs of a model.

Layers have their names in the plain model, so that both models load each other's checkpoints and start with the same
weights.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import shoal
from model import VOCABULARY, Block, Embedding, Shape, initialise, rotation
from shoal.tensor_parallel import Column, Head, Heads, Kind, Plan, Region, Row, Vocabulary


class RotaryBlock(Block):
    """A block that computes its own rotary positions, so that only the residual stream travels between layers."""

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self.head_size = shape.dim // shape.heads

    def forward(self, x: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]  on purpose
        return super().forward(x, rotation(x.shape[1], self.head_size, x))


def layers(shape: Shape) -> dict[str, shoal.LayerSpec]:
    """Return the model's layers in order; each is built only on the ranks that run it."""
    return {
        "embedding": shoal.LayerSpec(Embedding, shape),
        **{f"blocks.{number}": shoal.LayerSpec(RotaryBlock, shape) for number in range(shape.layers)},
        "norm": shoal.LayerSpec(nn.LayerNorm, shape.dim, bias=False),
        "head": shoal.LayerSpec(nn.Linear, shape.dim, VOCABULARY, bias=False),
    }


def plan(shape: Shape) -> Plan:
    """Return the tensor-parallel plan: attention split by heads, the MLP by its hidden dim, the rest by vocabulary."""
    kinds: dict[str, Kind] = {
        "embedding.byte": Vocabulary(),
        "blocks.*": Region(divide=("heads",)),
        "blocks.*.qkv": Heads(heads=shape.heads, head_dim=shape.dim // shape.heads),
        "blocks.*.attention_out": Row(),
        "blocks.*.mlp_in": Column(),
        "blocks.*.mlp_out": Row(),
        "head": Head(),
    }
    return Plan(kinds | ({"embedding.runs.*": Vocabulary()} if shape.ngrams else {}))


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the plain model's loss."""
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def begin(model: shoal.PipelineModule, shape: Shape, seed: int) -> None:
    """Initialize this rank's layers as the plain model with the same seed does.

    Every rank draws the random numbers of all layers in the plain model's order, and builds one layer beside its own at a
    time.
    """
    own, specs = dict(model.named_parameters()), layers(shape)
    torch.manual_seed(seed)
    for spec in specs.values():  # constructors draw random numbers, too
        spec.build()
    for layer, spec in specs.items():
        with torch.device("meta"):
            outline = spec.build()
        for part, parameter in outline.named_parameters(prefix=layer):
            if parameter.ndim > 1:
                initialise(part, matrix := torch.empty(parameter.shape), shape)
                if part in own:
                    own[part].data.copy_(matrix)
