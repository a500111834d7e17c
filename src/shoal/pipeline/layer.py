"""The layers of a pipeline: specs that are built on the ranks that run them, their names, and their parameter counts.

A layer receives the return value of the layer before it as its one argument: a tensor, a tuple, a dict, or any other object.
`Unpacked` makes a layer receive the parts of that value as separate arguments.

Layers are named by the keys of the given mapping, or by their numbers; names never contain a stage. So parameters and
checkpoints have the same names wherever a layer runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any, cast

import torch
from torch import nn

from shoal.device import forked_rng
from shoal.errors import UsageError

__all__ = ["Built", "Contents", "Layer", "LayerSpec", "TiedLayerSpec", "TiedWeightSpec", "Unpacked", "contents_of",
           "named", "parameters_of"]


class LayerSpec:
    """A layer that is built later: `LayerSpec(nn.Linear, 4, 4, bias=False)` becomes `nn.Linear(4, 4, bias=False)`.

    Only the ranks of its stage build it, so no rank ever holds the whole model. To count its parameters every rank also
    builds it once on the `meta` device, without memory. A constructor that reads tensor values fails there; then every rank
    builds the layer on the CPU and drops it. Raises `UsageError` unless `typename` is a subclass of `nn.Module`.
    """

    def __init__(self, typename: type[nn.Module], *module_args: Any, **module_kwargs: Any):
        if not (isinstance(typename, type) and issubclass(typename, nn.Module)):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise UsageError(f"{type(self).__name__}: typename: got {typename!r}; give a class of torch.nn.Module (put a "
                             f"function, or a module that is already built, into the list of layers as it is)")
        self.typename = typename
        self.module_args = module_args
        self.module_kwargs = module_kwargs

    def __repr__(self) -> str:
        given = [*map(repr, self.module_args), *(f"{name}={value!r}" for name, value in self.module_kwargs.items())]
        return f"{self.typename.__name__}({', '.join(given)})"

    def build(self) -> nn.Module:
        """Build the layer."""
        return self.typename(*self.module_args, **self.module_kwargs)


class TiedLayerSpec(LayerSpec):
    """A layer that shares its weights `tied_weight_attr` with every other layer of the same `key`.

    The i-th weight named here is tied to the i-th weight of each other layer of the key, whatever its name there; a name may
    be dotted. Tied weights on one rank are one Parameter; across ranks their copies start equal and get the summed gradient.
    The layer's other parameters are not shared. `forward_fn(module, value)` is called in place of `module(value)`.
    """

    def __init__(self, key: str, typename: type[nn.Module], *module_args: Any,
                 forward_fn: Callable[..., Any] | None = None, tied_weight_attr: str | Sequence[str] = "weight",
                 **module_kwargs: Any):
        super().__init__(typename, *module_args, **module_kwargs)
        self.key = key
        self.forward_fn = forward_fn
        self.tied_weight_attr = (tied_weight_attr,) if isinstance(tied_weight_attr, str) else tuple(tied_weight_attr)


class Unpacked:
    """A layer that receives the parts of its input: `layer(*value)` for a tuple or list, `layer(**value)` for a mapping.

    `Unpacked(LayerSpec(Embedding, 100, 8))` is called as `embedding(input_ids=..., attention_mask=...)` on the output of a
    tokenizer. Any other value raises a `UsageError` that names the layer. A tied layer's `forward_fn` receives the parts
    after its module.
    """

    def __init__(self, layer: LayerSpec | nn.Module | Callable[..., Any]):
        self.layer = layer

    def __repr__(self) -> str:
        return f"Unpacked({self.layer!r})"


Source = LayerSpec | nn.Module | Callable[..., Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One layer of the whole model, not yet built."""

    index: int
    name: str
    path: str
    """Where the module is registered; layers of one path share one module on each rank."""
    source: Source
    unpack: bool

    @property
    def kind(self) -> str:
        """The name of the layer's class or function."""
        if isinstance(self.source, LayerSpec):
            return self.source.typename.__name__
        if isinstance(self.source, FunctionType | BuiltinFunctionType | MethodType):
            return self.source.__name__
        return type(self.source).__name__

    def __str__(self) -> str:
        return f"'{self.name}' ({self.kind})"

    def build(self, shared: nn.Module | None = None) -> Built:
        """Build the layer from its spec, or use the `shared` module, or the given module or function."""
        source = self.source
        body = shared
        if body is None:
            body = source.build() if isinstance(source, LayerSpec) else source
        call = source.forward_fn if isinstance(source, TiedLayerSpec) else None
        return Built(index=self.index, name=self.name, path=self.path, kind=self.kind, body=body, call=call,
                     unpack=self.unpack)


@dataclass(slots=True, kw_only=True)
class Built:
    """A layer that is built on this rank."""

    index: int
    name: str
    path: str
    kind: str
    body: nn.Module | Callable[..., Any]
    call: Callable[..., Any] | None
    """Called with the body as first argument, in place of the body."""
    unpack: bool

    @property
    def module(self) -> nn.Module | None:
        """The layer as a module; None for a plain function."""
        return self.body if isinstance(self.body, nn.Module) else None

    def __call__(self, value: Any) -> Any:
        """Run the layer on the return value of the layer before it."""
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
                         f"it must return a tuple, a list or a mapping; else give this layer without Unpacked")


@dataclass(frozen=True, slots=True, kw_only=True)
class TiedWeightSpec:
    """The facts in which tied weights must agree."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    def __str__(self) -> str:
        return f"{self.shape} {self.dtype}{'' if self.requires_grad else ' frozen'}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Contents:
    """The parameter counts of a layer."""

    parameters: int
    trainable: int
    tied: tuple[TiedWeightSpec, ...] = ()
    """The weights that a `TiedLayerSpec` names, in its order."""


def named(layers: Any) -> tuple[Layer, ...]:
    """Return the layers of a sequence, an `nn.Sequential`, or a mapping of names to layers.

    Raises `UsageError` for an item that is no layer, a name that is no module path, and a name that lies within another.
    """
    found = tuple(Layer(index=index, name=name, path=name, source=_source(name, item), unpack=isinstance(item, Unpacked))
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
    """Count the parameters of a layer; a spec is built for that, on the meta device if its constructor allows."""
    module = _module(layer)
    return Contents(parameters=0, trainable=0) if module is None else _count(module, layer)


def parameters_of(layer: Layer) -> Mapping[str, TiedWeightSpec]:
    """Return the facts of a layer's parameters, by their names in it."""
    module = _module(layer)
    return {} if module is None else {name: _facts(parameter) for name, parameter in module.named_parameters()}


def _module(layer: Layer) -> nn.Module | None:
    """Return the module of a layer, which is that of the model only where the layer was given as a module."""
    source = layer.source
    if not isinstance(source, LayerSpec):
        return source if isinstance(source, nn.Module) else None
    try:
        with torch.device("meta"):
            return source.build()
    except Exception:  # the constructor reads values: build on the CPU, which raises the true error if there is one
        with forked_rng():
            return _built(layer, source)


def _built(layer: Layer, source: LayerSpec) -> nn.Module:
    try:
        return source.build()
    except Exception as error:
        raise UsageError(f"layers: {layer}: {source} cannot be built: {type(error).__name__}: {error}; change the arguments "
                         f"of its LayerSpec") from error


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
    return _facts(parameter)


def _facts(parameter: nn.Parameter) -> TiedWeightSpec:
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
                         f"give an instance")
    if isinstance(source, LayerSpec) or callable(source):
        return source
    raise UsageError(f"layers: '{name}' is {source!r}, a {type(source).__name__}; give a LayerSpec, a module or a function")
