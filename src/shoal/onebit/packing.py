"""Packing compresses a flat vector to one sign bit an element and one scale a block, and keeps the compression error.

The sender adds this residual to the next vector, so that everything is sent in the end (error feedback: Seide et al. 2014;
Karimireddy et al. 2019, arXiv 1901.09847; with Adam, Tang et al. 2021, arXiv 2102.02888).

Three backends give the same bits: native code on the host, Triton on a CUDA device, and torch where neither is available.
reference.py defines the format, and the order in which a scale is summed.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Protocol, cast

import torch
from torch import Tensor

from shoal.device import current_device, has_triton
from shoal.log import warn_once
from shoal.native import onebit as native
from shoal.onebit import reference
from shoal.onebit.reference import GRAIN, packed_bytes

__all__ = ["difference", "pack", "unpack"]

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class _Backend(Protocol):
    """A module that implements packing."""

    def pack(self, values: Tensor, packed: Tensor) -> None: ...
    def difference(self, master: Tensor, weight: Tensor, packed: Tensor) -> None: ...
    def unpack(self, packed: Tensor, target: Tensor, *, factor: float, accumulate: bool) -> None: ...


def pack(values: Tensor, packed: Tensor) -> None:
    """Write the signs (>= 0; -0.0 is) and scales of `values` (n,) to `packed` (packed_bytes(n),) uint8.

    `values`, fp32, bf16 or fp16, is replaced by the residual values - scale * sign, computed in fp32 and rounded. A block
    whose magnitudes have no finite sum in fp32, such as one with an Inf or NaN, gets the scale NaN and the residual 0: an
    error that is carried on stays finite.
    """
    _check(packed, values)
    _backend(packed.device.type).pack(values, packed)


def difference(master: Tensor, weight: Tensor, packed: Tensor) -> None:
    """Write the signs and scales of `master - weight` (n,), subtracted in fp32, to `packed`, and change neither.

    `master` is fp32, `weight` fp32, bf16 or fp16. An update published this way needs no residual buffer: the compression
    error, rounding included, is the difference that remains once `packed` has been added to the weight.
    """
    _check(packed, master, weight)
    assert master.dtype == torch.float32, "masters are fp32"
    _backend(packed.device.type).difference(master, weight, packed)


def unpack(packed: Tensor, target: Tensor, *, factor: float = 1.0, accumulate: bool = False) -> None:
    """Write `factor * scale * sign` to `target` (n,), or add it: computed in fp32, then rounded to the target's dtype."""
    _check(packed, target)
    _backend(packed.device.type).unpack(packed, target, factor=factor, accumulate=accumulate)


@cache
def _backend(device: str) -> _Backend:
    if device == "cpu" and native.available():
        return native
    if has_triton(torch.device(device)) and find_spec("triton") is not None:
        return _triton_or_reference(current_device())
    return reference


def _triton_or_reference(device: torch.device) -> _Backend:
    """Return the Triton backend if it works on `device`, else the reference: its first launch needs a C compiler."""
    values = torch.zeros(GRAIN, dtype=torch.float32, device=device)
    packed = torch.empty(packed_bytes(GRAIN), dtype=torch.uint8, device=device)
    try:
        kernels = cast(_Backend, import_module("shoal.onebit.kernels"))  # importing Triton takes a second
        kernels.pack(values, packed)
        kernels.unpack(packed, values, factor=1.0, accumulate=False)
    except Exception as error:  # a compiler or a broken Triton may raise anything
        warn_once(f"1-bit packing falls back to torch, which is slower: Triton does not work here ({type(error).__name__}: "
                  f"{error}). Its first launch needs a C compiler: install one, or name it in CC")
        return reference
    return kernels


def _check(packed: Tensor, *vectors: Tensor) -> None:
    """Assert that the vectors are flat, of one length and device, and that `packed` has the size for them."""
    elements = vectors[0].numel()
    for vector in vectors:
        assert vector.dtype in _DTYPES and vector.shape == (elements,) and vector.is_contiguous(), "not a flat vector"
        assert vector.device == packed.device, f"{vector.device} and {packed.device}"
    assert packed.dtype == torch.uint8 and packed.shape == (packed_bytes(elements),) and packed.is_contiguous(), \
        f"{elements} elements are packed in {packed_bytes(elements)} bytes, not in {tuple(packed.shape)} {packed.dtype}"
    assert packed.storage_offset() % 4 == 0, "scales would not be aligned"
