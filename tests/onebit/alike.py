"""Vectors of every kind, and whether a way to pack them gives the bits of torch."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import ModuleType

import torch
from torch import Tensor

from shoal.onebit import BLOCK, packed_bytes, plain

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
INTEGERS = {4: torch.int32, 2: torch.int16, 1: torch.uint8}
SIZES = (0, 16, BLOCK - 16, BLOCK, BLOCK + 16, 40 * BLOCK + 208)


def normal(elements: int) -> Tensor:
    return torch.randn(elements, generator=torch.Generator().manual_seed(elements))


def of_all_sizes(elements: int) -> Tensor:
    return normal(elements) * torch.logspace(-44, 34, elements)


def mixed(elements: int) -> Tensor:
    values = normal(elements)
    values[::7], values[::11] = 0.0, -0.0
    return values


def spoilt(elements: int) -> Tensor:
    values = mixed(elements)
    for place, bad in enumerate((math.inf, math.nan, -math.inf)):
        values[place * 3 * BLOCK + 5 : place * 3 * BLOCK + 6] = bad
    return values


INPUTS: dict[str, Callable[[int], Tensor]] = {
    "normal": normal, "of all sizes": of_all_sizes, "with zeros of both signs": mixed, "with Inf and NaN": spoilt,
    "denormal": lambda n: normal(n) * 1e-40, "the smallest": lambda n: normal(n).sign() * 1e-45,
    "zero": torch.zeros, "beyond any sum": lambda n: normal(n).sign() * 3e38,
    "of powers": lambda n: torch.exp2(normal(n) * 40),
}  # fmt: skip


def same(ours: Tensor, theirs: Tensor) -> bool:
    """Whether two tensors have the same bits, but for those of a NaN."""
    whole = INTEGERS[ours.element_size()]
    bits = (torch.where(x.isnan(), torch.nan, x).view(whole) if x.is_floating_point() else x for x in (ours, theirs))
    return torch.equal(*bits)


def agree(values: Tensor, ours: ModuleType) -> bool:
    """Whether packing, the difference to another vector and unpacking are the same in a way and in torch on the host."""
    elements, found = values.numel(), []
    for way, there in ((ours, values), (plain, values.cpu())):
        packed = torch.full((packed_bytes(elements),), 0xAB, dtype=torch.uint8, device=there.device)
        other = packed.clone()
        rest, weight = there.clone(), normal(elements).to(there)
        way.pack(rest, packed)
        way.difference(there.float(), weight, other)
        once = torch.full_like(rest, 7.0)
        way.unpack(packed, once, factor=1.0, accumulate=False)
        way.unpack(packed, weight, factor=1 / 3, accumulate=True)
        found.append([made.cpu() for made in (packed, rest, other, once, weight)])
    return all(map(same, *found))
