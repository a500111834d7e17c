"""A few words that stand for tensors when ranks compare what they hold: shapes and dtypes, and a number for the values.

The number weighs each word by its place, so that another order gives another one; whole numbers add up to the same in
whatever order a device adds them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from shoal.tree import tree_map

__all__ = ["Fingerprint", "bits_of", "fingerprint_of"]

_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, slots=True, kw_only=True)
class Fingerprint:
    """What stands for the tensors within a value."""

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    bits: int = 0
    """0 where values were not looked at."""

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
