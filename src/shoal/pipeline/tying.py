"""Tied weights: layers of one key share a weight, as one Parameter on each rank and under one name in the whole model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from shoal.errors import UsageError
from shoal.pipeline.layer import Built, Contents, Layer, TiedLayerSpec

__all__ = ["Tie", "Tied", "refuse_shared", "tie", "ties_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tied:
    """A parameter of this rank that several layers share.

    Each rank initializes its copy as the rank's own first layer of the key does. The engine broadcasts the value of the
    first of `stages` before training, and sums the gradients of all stages.
    """

    name: str
    """The weight's name in the whole model: its name in the first layer of the key."""
    stages: tuple[int, ...]
    """The stages that have a copy, on this rank or others, in order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tie:
    """One weight that several layers share."""

    key: str
    name: str
    places: Mapping[int, str]
    """Layer index -> the weight's name within that layer."""
    stages: tuple[int, ...]


def ties_of(layers: Sequence[Layer], contents: Sequence[Contents], stage_of: Sequence[int]) -> list[Tie]:
    """Return the weights that layers share by key. Raises `UsageError` where they disagree in number, shape or dtype."""
    keys: dict[str, list[tuple[Layer, TiedLayerSpec]]] = {}
    for layer in layers:
        if isinstance(layer.source, TiedLayerSpec):
            keys.setdefault(layer.source.key, []).append((layer, layer.source))
    ties: list[Tie] = []
    for key, members in keys.items():
        first, spec = members[0]
        for other, _ in members[1:]:
            if contents[first.index].tied != contents[other.index].tied:
                raise UsageError(f"TiedLayerSpec '{key}': layers {first} and {other} name weights that cannot be tied: "
                                 f"{_listed(first, contents)}, and {_listed(other, contents)}; they must agree in number, "
                                 f"shape, dtype and requires_grad")
        named_otherwise = len(members) > 1 or first.path != first.name
        for position, attribute in enumerate(spec.tied_weight_attr if named_otherwise else ()):
            places = {layer.index: each.tied_weight_attr[position] for layer, each in members}
            ties.append(Tie(key=key, name=f"{first.name}.{attribute}", places=places,
                            stages=tuple(sorted({stage_of[index] for index in places}))))
    return ties


def tie(ties: Iterable[Tie], built: Iterable[Built]) -> Iterator[tuple[Tie, nn.Parameter]]:
    """Make the layers of this rank share one Parameter for each tied weight, and yield it."""
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
    """Raise `UsageError` where given modules of two stages share a parameter outside of a `TiedLayerSpec`."""
    seen: dict[nn.Parameter, Layer] = {}
    for layer in layers:
        for parameter in layer.source.parameters() if isinstance(layer.source, nn.Module) else ():
            first = seen.setdefault(parameter, layer)
            if stage_of[first.index] != stage_of[layer.index]:
                raise UsageError(f"layers {first} and {layer} share a parameter {tuple(parameter.shape)}, but run in stages "
                                 f"{stage_of[first.index]} and {stage_of[layer.index]}, which would train separate copies; "
                                 f"give both as TiedLayerSpec with one key, or put both in one stage")


def _listed(layer: Layer, contents: Sequence[Contents]) -> str:
    assert isinstance(layer.source, TiedLayerSpec)
    weights = zip(layer.source.tied_weight_attr, contents[layer.index].tied, strict=True)
    return ", ".join(f"{attribute} {weight}" for attribute, weight in weights)
