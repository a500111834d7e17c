"""Weights that several layers share: one Parameter on a rank, one name in the whole model, wherever its copies rest."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from shoal.errors import UsageError
from shoal.pipeline.layer import Built, Contents, Layer
from shoal.pipeline.spec import TiedLayerSpec

__all__ = ["Tie", "Tied", "refuse_shared", "tie", "ties_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tied:
    """A parameter of this rank that other layers hold too.

    Each rank builds its copy as its own first layer of the key says: whoever trains them begins with the value of the
    first of `stages`, and sums the gradients of all.
    """

    name: str
    """Its name in the whole model: that of the first layer with the key."""
    stages: tuple[int, ...]
    """Every stage that holds it, here or on other ranks, in order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tie:
    """One weight of several layers."""

    key: str
    name: str
    places: Mapping[int, str]
    """The index of each layer, and the weight's name within it."""
    stages: tuple[int, ...]


def ties_of(layers: Sequence[Layer], contents: Sequence[Contents], stage_of: Sequence[int]) -> list[Tie]:
    """Return the weights that layers share by key. Raises `UsageError` where they do not agree in number, shape or dtype."""
    keys: dict[str, list[tuple[Layer, TiedLayerSpec]]] = {}
    for layer in layers:
        if isinstance(layer.source, TiedLayerSpec):
            keys.setdefault(layer.source.key, []).append((layer, layer.source))
    ties: list[Tie] = []
    for key, members in keys.items():
        first, spec = members[0]
        for other, _ in members[1:]:
            mine, theirs = contents[first.index].tied, contents[other.index].tied
            if mine != theirs:
                raise UsageError(f"TiedLayerSpec '{key}': layers {first} and {other} name weights that cannot be one: "
                                 f"{_listed(first, contents)}, and {_listed(other, contents)}; they must agree in number, "
                                 f"shape, dtype and requires_grad")
        for position, attribute in enumerate(spec.tied_weight_attr if len(members) > 1 else ()):
            places = {layer.index: each.tied_weight_attr[position] for layer, each in members}
            ties.append(Tie(key=key, name=f"{first.name}.{attribute}", places=places,
                            stages=tuple(sorted({stage_of[index] for index in places}))))
    return ties


def tie(ties: Iterable[Tie], built: Iterable[Built]) -> Iterator[tuple[Tie, nn.Parameter]]:
    """Give the layers of this rank one Parameter for each weight that they share, and yield it."""
    modules = {layer.index: layer.module for layer in built if layer.module is not None}
    for each in ties:
        here = [(modules[index], attribute) for index, attribute in each.places.items() if index in modules]
        if here:
            parameter = here[0][0].get_parameter(here[0][1])
            for module, attribute in here[1:]:
                path, _, leaf = attribute.rpartition(".")
                setattr(module.get_submodule(path), leaf, parameter)
            yield each, parameter


def refuse_shared(layers: Sequence[Layer], stage_of: Sequence[int]) -> None:
    """Raise `UsageError` where modules of two stages share a parameter without saying so."""
    seen: dict[nn.Parameter, Layer] = {}
    for layer in layers:
        for parameter in layer.source.parameters() if isinstance(layer.source, nn.Module) else ():
            first = seen.setdefault(parameter, layer)
            if stage_of[first.index] != stage_of[layer.index]:
                raise UsageError(f"layers {first} and {layer} share a parameter {tuple(parameter.shape)}, but run in stages "
                                 f"{stage_of[first.index]} and {stage_of[layer.index]}, each with a copy of its own; give "
                                 f"both as TiedLayerSpec with one key, or let one stage hold both")


def _listed(layer: Layer, contents: Sequence[Contents]) -> str:
    assert isinstance(layer.source, TiedLayerSpec)
    weights = zip(layer.source.tied_weight_attr, contents[layer.index].tied, strict=True)
    return ", ".join(f"{attribute} {weight}" for attribute, weight in weights)
