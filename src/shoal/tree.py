"""The tensors within a nested value: map a function over them, find them, or fingerprint them.

A fingerprint stands for tensors when ranks compare them: shapes, dtypes and one number for the values. The number weighs
each word by its position, so that another order gives another number. Words are added as integers, so that the sum does not
depend on the order in which a device adds them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

__all__ = ["Fingerprint", "bits_of", "fingerprint_of", "tensors_within", "tree_map"]

_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def tree_map(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    """Return `value` with `function` of each tensor in nested tuples, named tuples, lists and dicts."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, dict):
        return {key: tree_map(function, item) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):  # a named tuple takes its items one by one
        return type(value)(*(tree_map(function, item) for item in value))
    if isinstance(value, list | tuple):
        return type(value)(tree_map(function, item) for item in value)
    return value


def tensors_within(output: object) -> Iterator[Tensor]:
    """Yield the tensors within `output`: containers, dataclasses and plain objects, to any depth."""
    seen: set[int] = set()
    stack: list[Any] = [output]
    while stack:
        item = stack.pop()
        if isinstance(item, Tensor):
            yield item
        elif item is None or isinstance(item, str | bytes | int | float | bool | nn.Module) or id(item) in seen:
            continue
        else:
            seen.add(id(item))
            stack += _children(item)


def _children(item: object) -> list[Any]:
    if isinstance(item, Mapping):
        return list(cast("Mapping[Any, Any]", item).values())
    if isinstance(item, Sequence | set | frozenset):
        return list(cast("Sequence[Any]", item))
    if is_dataclass(item):
        return [getattr(item, field.name) for field in fields(item)]
    try:
        return list(vars(item).values())
    except TypeError:  # no attributes of its own: nothing to find
        return []


@dataclass(frozen=True, slots=True, kw_only=True)
class Fingerprint:
    """Shapes, dtypes and a checksum of the tensors within a value."""

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    bits: int = 0
    """0 where values were not read."""

    def __str__(self) -> str:
        return ", ".join(f"{shape} {dtype}" for shape, dtype in zip(self.shapes, self.dtypes, strict=True)) or "no tensor"


def fingerprint_of(value: object, *, values: bool = True) -> Fingerprint:
    """Return the fingerprint of the tensors within containers, in their order; of shapes alone unless `values`."""
    found: list[Tensor] = []
    tree_map(lambda tensor: found.append(tensor) or tensor, value)
    bits = sum((number + 1) * bits_of(tensor, ordered=True) for number, tensor in enumerate(found)) if values else 0
    return Fingerprint(shapes=tuple(tuple(tensor.shape) for tensor in found),
                       dtypes=tuple(str(tensor.dtype).removeprefix("torch.") for tensor in found), bits=bits)


def bits_of(tensor: Tensor, *, ordered: bool = False) -> int:
    """Return the sum of a tensor's words as whole numbers, each times its place if `ordered`, modulo 2 to the 64."""
    if tensor.is_meta or tensor.layout != torch.strided:
        return 0
    tensor = tensor.detach().contiguous().resolve_conj().resolve_neg()
    tensor = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    words = tensor.view(-1).view(_WORDS[tensor.element_size()])
    if ordered:
        words = words.long() * torch.arange(1, len(words) + 1, device=words.device)
    return int(words.sum(dtype=torch.int64))
