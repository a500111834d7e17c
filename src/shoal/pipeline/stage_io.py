"""What a stage is given and gives: the tensors in it, in the order in which they travel."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from shoal.pipeline.value_tree import Skeleton, flatten_tree

__all__ = ["detached", "tensors_in"]


def tensors_in(value: object, what: str) -> list[Tensor]:
    """Return the tensors within `value`, each once; `what` names the value in errors."""
    return [value] if isinstance(value, Tensor) else flatten_tree(value, what)[1]


def detached(value: object, what: str) -> Any:
    """Return `value` as it would arrive on another rank: leaves, of the same memory, that want gradients where it does."""
    skeleton, tensors = flatten_tree(value, what)
    return Skeleton(skeleton).build([tensor.detach().requires_grad_(tensor.requires_grad) for tensor in tensors])
