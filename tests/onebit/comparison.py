"""Input vectors of many kinds, and a bitwise comparison of a packing backend with the reference."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import ModuleType

import torch
from torch import Tensor

from shoal.onebit import BLOCK, packed_bytes, reference

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
INTEGERS = {4: torch.int32, 2: torch.int16, 1: torch.uint8}
SIZES = (0, 16, BLOCK - 16, BLOCK, BLOCK + 16, 40 * BLOCK + 208)


def normal(elements: int) -> Tensor:
    return torch.randn(elements, generator=torch.Generator().manual_seed(elements))


def all_magnitudes(elements: int) -> Tensor:
    return normal(elements) * torch.logspace(-44, 34, elements)


def with_zeros(elements: int) -> Tensor:
    values = normal(elements)
    values[::7], values[::11] = 0.0, -0.0
    return values


def non_finite(elements: int) -> Tensor:
    values = with_zeros(elements)
    for index, bad in enumerate((math.inf, math.nan, -math.inf)):
        values[index * 3 * BLOCK + 5 : index * 3 * BLOCK + 6] = bad
    return values


INPUTS: dict[str, Callable[[int], Tensor]] = {
    "normal": normal, "all magnitudes": all_magnitudes, "both zeros": with_zeros, "with Inf and NaN": non_finite,
    "denormal": lambda n: normal(n) * 1e-40, "smallest denormal": lambda n: normal(n).sign() * 1e-45,
    "zero": torch.zeros, "sum overflows": lambda n: normal(n).sign() * 3e38,
    "powers of two": lambda n: torch.exp2(normal(n) * 40),
}  # fmt: skip


def same(ours: Tensor, theirs: Tensor) -> bool:
    """Whether two tensors have the same bits; all NaNs count as one."""
    integer = INTEGERS[ours.element_size()]
    bits = (torch.where(x.isnan(), torch.nan, x).view(integer) if x.is_floating_point() else x for x in (ours, theirs))
    return torch.equal(*bits)


def agree(values: Tensor, backend: ModuleType) -> bool:
    """Whether pack, difference and unpack give the same bits in `backend` as in the reference on the host."""
    elements, results = values.numel(), []
    for module, source in ((backend, values), (reference, values.cpu())):
        packed = torch.full((packed_bytes(elements),), 0xAB, dtype=torch.uint8, device=source.device)
        packed_difference = packed.clone()
        residual, weight = source.clone(), normal(elements).to(source)
        module.pack(residual, packed)
        module.difference(source.float(), weight, packed_difference)
        unpacked = torch.full_like(residual, 7.0)
        module.unpack(packed, unpacked, factor=1.0, accumulate=False)
        module.unpack(packed, weight, factor=1 / 3, accumulate=True)
        results.append([result.cpu() for result in (packed, residual, packed_difference, unpacked, weight)])
    return all(map(same, *results))
