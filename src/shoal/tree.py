"""The tensors within a value: found at any depth, or each put in the place of what a function makes of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, cast

from torch import Tensor, nn

__all__ = ["tensors_within", "tree_map"]


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
