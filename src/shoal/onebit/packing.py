"""A flat vector is sent as one bit an element and one scale a block; what this does not say stays with the sender.

Whoever sends adds the rest of the last time to the next vector, so that everything is sent in the end (error feedback: Seide
et al. 2014; Karimireddy et al. 2019, arXiv 1901.09847; with Adam, Tang et al. 2021, arXiv 2102.02888).

There are three ways, with the same bits from each: native code on the host, Triton on a CUDA device, and torch for where
these are not, or do not work. How a scale is summed is said in plain.py.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Protocol, cast

import torch
from torch import Tensor

from shoal.log import warn_once
from shoal.native import onebit as native
from shoal.onebit import plain
from shoal.onebit.layout import GRAIN, packed_bytes

__all__ = ["difference", "pack", "unpack"]

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class _Packer(Protocol):
    """A module that packs."""

    def pack(self, values: Tensor, packed: Tensor) -> None: ...
    def difference(self, master: Tensor, weight: Tensor, packed: Tensor) -> None: ...
    def unpack(self, packed: Tensor, target: Tensor, *, factor: float, accumulate: bool) -> None: ...


def pack(values: Tensor, packed: Tensor) -> None:
    """Write the signs (>= 0; -0.0 is) and scales of `values` (n,) to `packed` (packed_bytes(n),) uint8.

    `values`, fp32, bf16 or fp16, keeps the rest: values - scale * sign, computed in fp32 and rounded. A block whose
    magnitudes have no finite sum in fp32, as one with an Inf or NaN, gets the scale NaN and leaves zeros: an error that is
    carried on stays finite.
    """
    _check(packed, values)
    _way(packed.device.type).pack(values, packed)


def difference(master: Tensor, weight: Tensor, packed: Tensor) -> None:
    """Write the signs and scales of `master - weight` (n,), subtracted in fp32, to `packed`, and change neither.

    `master` is fp32, `weight` fp32, bf16 or fp16. To publish an update so, needs no error beside it: what was not sent is
    the difference that remains when `packed` has been added to the weight, and rounding is in it.
    """
    _check(packed, master, weight)
    assert master.dtype == torch.float32, "masters are fp32"
    _way(packed.device.type).difference(master, weight, packed)


def unpack(packed: Tensor, target: Tensor, *, factor: float = 1.0, accumulate: bool = False) -> None:
    """Write `factor * scale * sign` to `target` (n,), or add it, in fp32 and then rounded to the target's dtype."""
    _check(packed, target)
    _way(packed.device.type).unpack(packed, target, factor=factor, accumulate=accumulate)


@cache
def _way(device: str) -> _Packer:
    if device == "cpu" and native.available():
        return native
    if device == "cuda" and find_spec("triton") is not None:
        return _tried(torch.device("cuda", torch.cuda.current_device()))
    return plain


def _tried(device: torch.device) -> _Packer:
    """Return the way by Triton if it works on `device`, else that by torch: the first launch needs a C compiler, for one."""
    values = torch.zeros(GRAIN, device=device)
    packed = torch.empty(packed_bytes(GRAIN), dtype=torch.uint8, device=device)
    try:
        kernels = cast(_Packer, import_module("shoal.onebit.kernels"))  # not at the top: it takes a second
        kernels.pack(values, packed)
        kernels.unpack(packed, values, factor=1.0, accumulate=False)
    except Exception as error:  # whatever a compiler or an installation of Triton raises
        warn_once(f"signs are packed by torch, which is slower: Triton does not work here ({type(error).__name__}: "
                  f"{error}). Its first launch needs a C compiler: install one, or name it in CC")
        return plain
    return kernels


def _check(packed: Tensor, *vectors: Tensor) -> None:
    """Refuse, as mistakes of our own, vectors that are not flat, not alike, or not of the size of `packed`."""
    elements = vectors[0].numel()
    for vector in vectors:
        assert vector.dtype in _DTYPES and vector.shape == (elements,) and vector.is_contiguous(), "not a flat vector"
        assert vector.device == packed.device, f"{vector.device} and {packed.device}"
    assert packed.dtype == torch.uint8 and packed.shape == (packed_bytes(elements),) and packed.is_contiguous(), \
        f"{elements} elements are packed in {packed_bytes(elements)} bytes, not in {tuple(packed.shape)} {packed.dtype}"
    assert packed.storage_offset() % 4 == 0, "scales would not be aligned"
