"""The layers that a composition draws from: a list of specs for a pipeline, or one module; the same weights either way."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import shoal
from shoal.sequence_parallel import SequenceAxis, attend_sequence, cross_entropy
from shoal.tensor_parallel import Column, Head, Plan, Row, Vocabulary, Whole

from .draw import LayerDraw, ModelDraw

LONGEST = 7
"""Tokens of the longest sample, with the one that is the last label."""


class Embed(nn.Module):
    def __init__(self, words: int, width: int, *, rows: bool, frozen: bool):
        super().__init__()
        self.words = nn.Embedding(words, width, sparse=rows)
        self.places = nn.Parameter(torch.randn(LONGEST, width) * 0.1)
        self.words.requires_grad_(not frozen)

    def forward(self, inputs: tuple[Tensor, Tensor]) -> Tensor:
        tokens, positions = inputs
        return self.words(tokens) + self.places[positions]


class Block(nn.Module):
    def __init__(self, width: int, layer: LayerDraw):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, layer.hidden)
        self.down = nn.Linear(layer.hidden, width)
        if layer.spare:
            self.spare = nn.Parameter(torch.randn(5))
        self.requires_grad_(not layer.frozen)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Mix(nn.Module):
    def __init__(self, width: int, layer: LayerDraw):
        super().__init__()
        self.mix = nn.Linear(width, width)
        if layer.spare:
            self.spare = nn.Parameter(torch.randn(3))
        self.requires_grad_(not layer.frozen)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.mix(x))


class Attend(nn.Module):
    """Causal attention over the whole sequence, of which `axis` says who has the other parts."""

    def __init__(self, width: int, layer: LayerDraw, axis: SequenceAxis | None = None):
        super().__init__()
        self.query, self.value = nn.Linear(width, layer.hidden), nn.Linear(width, layer.hidden)
        self.key = nn.Linear(width, layer.hidden, bias=False)  # whose gradient would be rounding error alone
        self.out = nn.Linear(layer.hidden, width)
        self.dim = layer.hidden // layer.heads
        self.axis = axis
        if layer.spare:
            self.spare = nn.Parameter(torch.randn(3))
        self.requires_grad_(not layer.frozen)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (each(x).unflatten(-1, (-1, self.dim)).transpose(1, 2)
                             for each in (self.query, self.key, self.value))
        if self.axis is None:
            seen = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        else:
            seen = attend_sequence(query, key, value, self.axis, causal=True)
        return x + self.out(seen.transpose(1, 2).flatten(2))


class Gain(nn.Module):
    def __init__(self, width: int, layer: LayerDraw):
        super().__init__()
        self.gain = nn.Parameter(1 + torch.randn(width) * 0.1)
        self.requires_grad_(not layer.frozen)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gain


class Output(nn.Module):
    def __init__(self, words: int, width: int):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.words = nn.Linear(width, words, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.words(self.norm(x))


KINDS: dict[str, Callable[..., nn.Module]] = {"block": Block, "mix": Mix, "gain": Gain, "attend": Attend}


class Line(nn.Sequential):
    """All layers as one module, recomputed in groups of `recompute`."""

    recompute = 0
    reentrant = False

    def forward(self, value: Any) -> Tensor:
        layers = list(self)
        if not self.recompute:
            return super().forward(value)
        if self.reentrant:  # a re-entrant checkpoint needs an input with a gradient
            value = layers.pop(0)(value)
        for start in range(0, len(layers), self.recompute):
            part = partial(_run, layers[start:start + self.recompute])
            value = checkpoint(part, value, use_reentrant=self.reentrant)
        return value


def _run(layers: list[nn.Module], value: Any) -> Tensor:
    for layer in layers:
        value = layer(value)
    return value


def specs(model: ModelDraw, axis: SequenceAxis | None = None) -> list[shoal.LayerSpec]:
    """Return the layers for a pipeline; with `axis` their attention is over sequences of which each rank has a part."""
    def tied(key: str | None, attributes: tuple[str, ...], kind: Any, *args: Any, **keywords: Any) -> shoal.LayerSpec:
        if key is None:
            return shoal.LayerSpec(kind, *args, **keywords)
        return shoal.TiedLayerSpec(key, kind, *args, tied_weight_attr=list(attributes), **keywords)

    words, key = ("words.weight",), "words" if model.tied else None
    return [tied(key, words, Embed, model.words, model.width, rows=model.rows, frozen=model.frozen),
            *(tied(layer.key, layer.shared, KINDS[layer.kind], model.width, layer,
                   **({"axis": axis} if layer.kind == "attend" else {})) for layer in model.layers),
            tied(key, words, Output, model.words, model.width)]


def line(model: ModelDraw, axis: SequenceAxis | None = None) -> Line:
    """Return all layers as one module, with the weights that every division of a pipeline starts from."""
    layers, first = Line(), dict[tuple[str, int], nn.Parameter]()
    with torch.random.fork_rng():
        for number, spec in enumerate(specs(model, axis)):
            torch.manual_seed(model.seed + number)
            layers.append(spec.build())
    for layer, spec in zip(layers, specs(model), strict=True):
        for position, name in enumerate(spec.tied_weight_attr if isinstance(spec, shoal.TiedLayerSpec) else ()):
            path, _, leaf = name.rpartition(".")
            owner = layer.get_submodule(path)
            setattr(owner, leaf, first.setdefault((spec.key, position), owner.get_parameter(leaf)))
    return layers


def plan(model: ModelDraw) -> Plan:
    """Return how tensor ranks cut the layers."""
    words = Whole() if model.rows else Vocabulary()
    return Plan({"0.words": words, f"{model.depth - 1}.words": Head(), **dict(_kinds(model))})


def _kinds(model: ModelDraw) -> Iterator[tuple[str, Any]]:
    for number, layer in enumerate(model.layers, start=1):
        match layer.kind:
            case "block":
                yield f"{number}.up", Column()
                yield f"{number}.down", Row()
            case "attend":
                yield from ((f"{number}.{name}", Column()) for name in ("query", "key", "value"))
                yield f"{number}.out", Row()
            case "mix":
                yield f"{number}.mix", Column(gather_output=True) if layer.cut else Whole()
            case _:
                pass


def groups(model: nn.Module) -> list[dict[str, Any]]:
    """Return the trained parameters in two groups: matrices, and vectors, which have no weight decay."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return [{"params": [parameter for parameter in trained if parameter.dim() > 1]},
            {"params": [parameter for parameter in trained if parameter.dim() <= 1], "weight_decay": 0.0}]


def loss_of(logits: Tensor, labels: Tensor, axis: SequenceAxis | None = None) -> Tensor:
    if axis is not None:
        return cross_entropy(logits.float(), labels, axis)
    return nn.functional.cross_entropy(logits.float().flatten(0, 1), labels.flatten())


def microbatch(model: ModelDraw, samples: int, step: int, rank: int,
               number: int) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """Return one microbatch ((tokens, positions), labels) of a data rank, of a length of its own."""
    random = torch.Generator().manual_seed(model.seed + 10_000 * step + 100 * rank + number)
    length = int(torch.randint(3, LONGEST + 1, (), generator=random))
    tokens = torch.randint(model.words, (samples, length), generator=random)
    return (tokens[:, :-1], torch.arange(length - 1).expand(samples, -1)), tokens[:, 1:]
