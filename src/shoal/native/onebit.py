"""Signs and scales of flat vectors in one pass over memory (signs.cpp); what they are is said in shoal.onebit."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from shoal.native.build import load
from shoal.native.step import DTYPES

__all__ = ["available", "difference", "pack", "unpack"]

_VERSION = 1


def available() -> bool:
    """Whether the library can be used here; the first call builds it."""
    library = load("signs")
    return library is not None and library.shoal_signs_version() == _VERSION


def pack(values: Tensor, packed: Tensor) -> None:
    """Write signs and scales of `values` (n,) to `packed`, and leave in `values` the rest."""
    _library().shoal_signs_pack(ctypes.c_int64(values.numel()), _pointer(values), DTYPES[values.dtype], _pointer(packed),
                                torch.get_num_threads())


def difference(master: Tensor, weight: Tensor, packed: Tensor) -> None:
    """Write signs and scales of `master - weight` (n,) to `packed`; `master` is fp32."""
    _library().shoal_signs_difference(ctypes.c_int64(master.numel()), _pointer(master), _pointer(weight),
                                      DTYPES[weight.dtype], _pointer(packed), torch.get_num_threads())


def unpack(packed: Tensor, target: Tensor, *, factor: float, accumulate: bool) -> None:
    """Write, or add, `factor` times what was packed to `target` (n,)."""
    _library().shoal_signs_unpack(ctypes.c_int64(target.numel()), _pointer(packed), _pointer(target), DTYPES[target.dtype],
                                  ctypes.c_float(factor), int(accumulate), torch.get_num_threads())


def _library() -> ctypes.CDLL:
    library = load("signs")
    assert library is not None
    return library


def _pointer(tensor: Tensor) -> ctypes.c_void_p:
    assert tensor.is_contiguous() and tensor.device.type == "cpu", "not a flat vector on the host"
    return ctypes.c_void_p(tensor.data_ptr())
