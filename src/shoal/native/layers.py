"""The native passes of transformer layers (layers.cpp), over contiguous fp32 tensors in host memory."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from shoal.native.build import load

__all__ = ["available", "dropout_add"]

_VERSION = 1
_WORD = 0xFFFFFFFF


def available() -> bool:
    """Whether the library can be built and loaded here; the first call builds it."""
    library = load("layers")
    return library is not None and library.shoal_layers_version() == _VERSION


def dropout_add(x: Tensor, residual: Tensor | None, *, seed: int, threshold: int, kept: float) -> Tensor:
    """Return dropout(x) + residual of matrices (rows, columns)."""
    library = load("layers")
    assert library is not None
    output = torch.empty_like(x)
    rows, columns = x.shape
    library.shoal_layers_dropout_add(
        _pointer(x), None if residual is None else _pointer(residual), _pointer(output), ctypes.c_int64(rows),
        ctypes.c_int64(columns), ctypes.c_uint32(seed & _WORD), ctypes.c_uint32(seed >> 32 & _WORD),
        ctypes.c_uint32(threshold), ctypes.c_float(kept), torch.get_num_threads())
    return output


def _pointer(tensor: Tensor) -> ctypes.c_void_p:
    assert tensor.is_contiguous() and tensor.device.type == "cpu" and tensor.dtype == torch.float32
    return ctypes.c_void_p(tensor.data_ptr())
