"""What a pipeline is made of: layers that are built where they run, and how each is called.

A layer takes the value that the one before it returned as its one argument, whatever that is: a tensor, a tuple, a dict.
`Unpacked` says that a layer takes its parts instead.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from shoal.errors import UsageError

__all__ = ["LayerSpec", "TiedLayerSpec", "Unpacked"]


class LayerSpec:
    """A layer that is built later: `LayerSpec(nn.Linear, 4, 4, bias=False)` becomes `nn.Linear(4, 4, bias=False)`.

    Only the ranks of its stage build it, so that no rank ever holds the whole model. To count its parameters every rank
    calls the class once more, on the device `meta`, where nothing has memory; a constructor that reads values cannot do
    that, and each rank builds the layer for real and drops it. Raises `UsageError` unless `typename` is a class of modules.
    """

    def __init__(self, typename: type[nn.Module], *module_args: Any, **module_kwargs: Any):
        if not (isinstance(typename, type) and issubclass(typename, nn.Module)):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise UsageError(f"{type(self).__name__}: typename: got {typename!r}; give a class of torch.nn.Module (a "
                             f"function or a module that is there already goes into the list of layers as it is)")
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
    """A layer whose weights `tied_weight_attr` are one with those of every other layer of the same `key`.

    The i-th weight named here is the i-th of each other layer of the key, where it may have another name; a name may be
    dotted. On one rank they are one Parameter; over ranks they are trained as one. All other parameters of the layer are its
    own. `forward_fn(module, value)` is called in place of `module(value)`.
    """

    def __init__(self, key: str, typename: type[nn.Module], *module_args: Any,
                 forward_fn: Callable[..., Any] | None = None, tied_weight_attr: str | Sequence[str] = "weight",
                 **module_kwargs: Any):
        super().__init__(typename, *module_args, **module_kwargs)
        self.key = key
        self.forward_fn = forward_fn
        self.tied_weight_attr = (tied_weight_attr,) if isinstance(tied_weight_attr, str) else tuple(tied_weight_attr)


class Unpacked:
    """A layer that takes the parts of its value: `layer(*value)` for a tuple or a list, `layer(**value)` for a mapping.

    `Unpacked(LayerSpec(Embedding, 100, 8))` is called `embedding(input_ids=..., attention_mask=...)` with what a tokenizer
    gives. Any other value is an error that names the layer. A tied layer's `forward_fn` takes the parts after its module.
    """

    def __init__(self, layer: LayerSpec | nn.Module | Callable[..., Any]):
        self.layer = layer

    def __repr__(self) -> str:
        return f"Unpacked({self.layer!r})"
