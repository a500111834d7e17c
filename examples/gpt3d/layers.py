"""The GPT of `examples/gpt` as a list of layers, and how each of them is cut: all that three dimensions ask of a model.

Layers have the names that they have in the plain model, so that both load each other's checkpoints, and begin with the
same weights.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import shoal
from model import VOCABULARY, Block, Embedding, Shape, initialise, rotation
from shoal.tensor_parallel import Column, Head, Heads, Kind, Plan, Region, Row, Vocabulary


class Turned(Block):
    """A block that computes its rotary positions by itself, so that the stream is all that travels between layers."""

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self.head_size = shape.dim // shape.heads

    def forward(self, x: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]  that is the point
        return super().forward(x, rotation(x.shape[1], self.head_size, x))


def layers(shape: Shape) -> dict[str, shoal.LayerSpec]:
    """List the model's layers in their order; each is built where it runs, and nowhere else."""
    return {
        "embedding": shoal.LayerSpec(Embedding, shape),
        **{f"blocks.{number}": shoal.LayerSpec(Turned, shape) for number in range(shape.layers)},
        "norm": shoal.LayerSpec(nn.LayerNorm, shape.dim, bias=False),
        "head": shoal.LayerSpec(nn.Linear, shape.dim, VOCABULARY, bias=False),
    }


def plan(shape: Shape) -> Plan:
    """Say how layers are cut over tensor ranks: attention by heads, the perceptron by its middle, the rest by words."""
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
    """Return the loss of the plain model."""
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def begin(model: shoal.PipelineModule, shape: Shape, seed: int) -> None:
    """Give this rank's layers the weights with which the plain model of that seed begins.

    A rank draws the random numbers of all layers, in the plain model's order, and holds one layer beside its own at a time.
    """
    own, specs = dict(model.named_parameters()), layers(shape)
    torch.manual_seed(seed)
    for spec in specs.values():  # constructors draw, too
        spec.build()
    for layer, spec in specs.items():
        with torch.device("meta"):
            outline = spec.build()
        for part, parameter in outline.named_parameters(prefix=layer):
            if parameter.ndim > 1:
                initialise(part, matrix := torch.empty(parameter.shape), shape)
                if part in own:
                    own[part].data.copy_(matrix)
