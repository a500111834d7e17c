"""The native backend of 1-bit packing (onebit.cpp): one pass over memory. shoal.onebit.reference defines the format."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from shoal.native.build import load
from shoal.native.step import DTYPES

__all__ = ["available", "difference", "pack", "unpack"]

_VERSION = 1


def available() -> bool:
    """Whether the library can be built and loaded here; the first call builds it."""
    library = load("onebit")
    return library is not None and library.shoal_onebit_version() == _VERSION


def pack(values: Tensor, packed: Tensor) -> None:
    """Write signs and scales of `values` (n,) to `packed`, and replace `values` by the residual."""
    _library().shoal_onebit_pack(ctypes.c_int64(values.numel()), _pointer(values), DTYPES[values.dtype], _pointer(packed),
                                 torch.get_num_threads())


def difference(master: Tensor, weight: Tensor, packed: Tensor) -> None:
    """Write signs and scales of `master - weight` (n,) to `packed`; `master` is fp32."""
    _library().shoal_onebit_difference(ctypes.c_int64(master.numel()), _pointer(master), _pointer(weight),
                                       DTYPES[weight.dtype], _pointer(packed), torch.get_num_threads())


def unpack(packed: Tensor, target: Tensor, *, factor: float, accumulate: bool) -> None:
    """Write `factor` times the decoded vector to `target` (n,), or add it."""
    _library().shoal_onebit_unpack(ctypes.c_int64(target.numel()), _pointer(packed), _pointer(target), DTYPES[target.dtype],
                                   ctypes.c_float(factor), int(accumulate), torch.get_num_threads())


def _library() -> ctypes.CDLL:
    library = load("onebit")
    assert library is not None
    return library


def _pointer(tensor: Tensor) -> ctypes.c_void_p:
    assert tensor.is_contiguous() and tensor.device.type == "cpu", "not a flat vector in host memory"
    return ctypes.c_void_p(tensor.data_ptr())
