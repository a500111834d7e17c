"""Elements that the `exp_avg_mask` of a group leaves out: of their gradient nothing is taken, so their momentum is nothing.

Signs know no zero. An element whose gradient is always zero, such as the places of a table that no sequence reaches, comes
as plus and minus its block's scale in turns, which adds up to nothing, but is not nothing step by step. A mask says where
that is so: 0 leaves an element out, 1 keeps it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from shoal.errors import ConfigError
from shoal.optim.views import View

__all__ = ["MASK", "check_masks", "mask"]

MASK = "exp_avg_mask"
"""The option of a group, as published."""


def check_masks(names: Mapping[nn.Parameter, str], groups: Mapping[nn.Parameter, int],
                options: Sequence[Mapping[str, Any]]) -> None:
    """Raise `ConfigError` unless the mask of each group fits each of its parameters, by the names of these."""
    for parameter, index in groups.items():
        given = options[index].get(MASK)
        if given is None:
            continue
        shape = tuple(given.shape) if isinstance(given, Tensor) else None
        if shape is None or not _fits(shape, tuple(parameter.shape)):
            raise ConfigError(f"optimizer group {index}: {MASK}: got {type(given).__name__ if shape is None else shape} for "
                              f"'{names[parameter]}' of shape {tuple(parameter.shape)}; give a tensor of 0 and 1 of that "
                              f"shape, or of one that can be expanded to it, and parameters of other shapes other groups")


def mask(view: View, given: Tensor | None, vectors: Sequence[Tensor]) -> None:
    """Multiply `vectors` (n,), of the elements of `view`, by its part of the mask, where they are."""
    if given is None:
        return
    for part in view.parts:
        whole = given.to(vectors[0].device).expand(view.unit.layout.slots[part.slot].shape).reshape(-1)
        start, kept = part.offset - view.start, whole[part.start:part.stop]
        for vector in vectors:
            vector[start:start + len(kept)].mul_(kept)


def _fits(shape: tuple[int, ...], wanted: tuple[int, ...]) -> bool:
    """Whether a tensor of `shape` can be expanded to the shape `wanted`."""
    return len(shape) <= len(wanted) and all(
        size in (1, there) for size, there in zip(reversed(shape), reversed(wanted), strict=False))
