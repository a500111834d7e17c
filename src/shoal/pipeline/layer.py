"""The layers of a pipeline: each with its name and place in the whole, and what it holds, known without building it all.

Names are those of the mapping that was given, or the layers' numbers, and never contain a stage: they name parameters and
checkpoints the same wherever a layer runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any, cast

import torch
from torch import nn

from shoal.errors import UsageError
from shoal.pipeline.spec import LayerSpec, TiedLayerSpec, Unpacked

__all__ = ["Built", "Contents", "Layer", "TiedWeightSpec", "contents_of", "generators", "named"]

Source = LayerSpec | nn.Module | Callable[..., Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One layer of the whole model."""

    index: int
    name: str
    source: Source
    unpack: bool

    @property
    def kind(self) -> str:
        """The name of its class, or of the function."""
        if isinstance(self.source, LayerSpec):
            return self.source.typename.__name__
        if isinstance(self.source, FunctionType | BuiltinFunctionType | MethodType):
            return self.source.__name__
        return type(self.source).__name__

    def __str__(self) -> str:
        return f"'{self.name}' ({self.kind})"

    def build(self) -> Built:
        """Build the layer, or take what was given."""
        source = self.source
        body = source.build() if isinstance(source, LayerSpec) else source
        call = source.forward_fn if isinstance(source, TiedLayerSpec) else None
        return Built(index=self.index, name=self.name, kind=self.kind, body=body, call=call, unpack=self.unpack)


@dataclass(slots=True, kw_only=True)
class Built:
    """A layer that runs on this rank."""

    index: int
    name: str
    kind: str
    body: nn.Module | Callable[..., Any]
    call: Callable[..., Any] | None
    """Called with the body in front, in place of it."""
    unpack: bool

    @property
    def module(self) -> nn.Module | None:
        """The module, None for a plain function."""
        return self.body if isinstance(self.body, nn.Module) else None

    def __call__(self, value: Any) -> Any:
        """Run the layer on what the one before it returned."""
        args, keywords = self._parts(value) if self.unpack else ((value,), {})
        if self.call is not None:
            return self.call(self.body, *args, **keywords)
        return self.body(*args, **keywords)

    def _parts(self, value: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if isinstance(value, Mapping):
            return (), dict(cast("Mapping[str, Any]", value))
        if isinstance(value, tuple | list):
            return tuple(cast("Iterable[Any]", value)), {}
        raise UsageError(f"layer '{self.name}' ({self.kind}) is Unpacked and got a {type(value).__name__}; the layer before "
                         f"it must return a tuple, a list or a mapping, or this one be given without Unpacked")


@dataclass(frozen=True, slots=True, kw_only=True)
class TiedWeightSpec:
    """What two weights that are one have to agree in."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    def __str__(self) -> str:
        return f"{self.shape} {self.dtype}{'' if self.requires_grad else ' frozen'}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Contents:
    """What a layer holds."""

    parameters: int
    trainable: int
    tied: tuple[TiedWeightSpec, ...] = ()
    """The weights that a `TiedLayerSpec` names, in its order."""


def named(layers: Any) -> tuple[Layer, ...]:
    """Return the layers that were given as a sequence, an `nn.Sequential`, or a mapping of names.

    Raises `UsageError` for what is no layer, for names that cannot be those of modules, and for one within another.
    """
    found = tuple(Layer(index=index, name=name, source=_source(name, item), unpack=isinstance(item, Unpacked))
                  for index, (name, item) in enumerate(_items(layers)))
    if not found:
        raise UsageError("layers: got none; a pipeline has one layer or more")
    names = {layer.name for layer in found}
    for name in names:
        parts = name.split(".")
        if not all(parts):
            raise UsageError(f"layers: got the name {name!r}; names are words joined by dots, such as 'transformer.h.0'")
        above = next((".".join(parts[:end]) for end in range(1, len(parts)) if ".".join(parts[:end]) in names), None)
        if above is not None:
            raise UsageError(f"layers: '{name}' lies within '{above}', which is a layer itself; rename one of them")
    return found


def contents_of(layer: Layer) -> Contents:
    """Count what a layer holds; one that is not built yet is, without memory where it can be."""
    source = layer.source
    if not isinstance(source, LayerSpec):
        return _count(source, layer) if isinstance(source, nn.Module) else Contents(parameters=0, trainable=0)
    try:
        with torch.device("meta"):
            module = source.build()
    except Exception:  # a constructor that reads values: it is built for real, and dropped; if that fails, it fails
        with torch.random.fork_rng(devices=generators()):
            module = _built(layer, source)
    return _count(module, layer)


def _built(layer: Layer, source: LayerSpec) -> nn.Module:
    try:
        return source.build()
    except Exception as error:
        raise UsageError(f"layers: {layer}: {source} cannot be built: {type(error).__name__}: {error}; change the arguments "
                         f"of its LayerSpec") from error


def generators() -> list[int]:
    """Return the devices, beside the host, whose random numbers layers may draw."""
    return [torch.cuda.current_device()] if torch.cuda.is_available() else []


def _count(module: nn.Module, layer: Layer) -> Contents:
    parameters = list(module.parameters())
    attributes = layer.source.tied_weight_attr if isinstance(layer.source, TiedLayerSpec) else ()
    return Contents(parameters=sum(p.numel() for p in parameters),
                    trainable=sum(p.numel() for p in parameters if p.requires_grad),
                    tied=tuple(_weight(module, attribute, layer) for attribute in attributes))


def _weight(module: nn.Module, attribute: str, layer: Layer) -> TiedWeightSpec:
    try:
        parameter = module.get_parameter(attribute)
    except AttributeError as error:
        names = ", ".join(name for name, _ in module.named_parameters())
        raise UsageError(f"layer {layer}: tied_weight_attr: got '{attribute}'; its parameters are {names}") from error
    return TiedWeightSpec(shape=tuple(parameter.shape), dtype=parameter.dtype, requires_grad=parameter.requires_grad)


def _items(layers: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(layers, Mapping):
        yield from ((str(name), item) for name, item in cast("Mapping[Any, Any]", layers).items())
    elif isinstance(layers, nn.Sequential | nn.ModuleList | nn.ModuleDict):
        yield from layers.named_children()
    elif isinstance(layers, Iterable) and not isinstance(layers, str):
        yield from ((str(index), item) for index, item in enumerate(cast("Iterable[Any]", layers)))
    else:
        raise UsageError(f"layers: got a {type(layers).__name__}; give a list of layers, an nn.Sequential, or a mapping of "
                         f"names to layers")


def _source(name: str, item: Any) -> Source:
    source: Any = item.layer if isinstance(item, Unpacked) else item
    if isinstance(source, type):
        raise UsageError(f"layers: '{name}' is the class {source.__name__}; write LayerSpec({source.__name__}, ...), or "
                         f"give one that is built")
    if isinstance(source, LayerSpec) or callable(source):
        return source
    raise UsageError(f"layers: '{name}' is {source!r}, a {type(source).__name__}; give a LayerSpec, a module or a function")
