"""The native passes of transformer layers (layers.cpp), over contiguous fp32 tensors in host memory."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from shoal.native.build import load

__all__ = ["available", "dropout_add", "rms_norm", "rms_norm_backward", "rotary"]

_VERSION = 2
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


def rms_norm(x: Tensor, gain: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return the norm of a matrix (rows, columns), and the rate (rows,) of each row."""
    library = load("layers")
    assert library is not None
    output, rates = torch.empty_like(x), x.new_empty(x.shape[0])
    library.shoal_layers_rms_norm(_pointer(x), _pointer(gain), _pointer(output), _pointer(rates),
                                  *map(ctypes.c_int64, x.shape), ctypes.c_float(eps), torch.get_num_threads())
    return output, rates


def rms_norm_backward(gradient: Tensor, x: Tensor, gain: Tensor, rates: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of x (rows, columns) and of the gain (columns,)."""
    library = load("layers")
    assert library is not None
    parts = max(1, min(torch.get_num_threads(), x.numel() >> 15))
    of_x, of_gain = torch.empty_like(x), x.new_zeros((parts, x.shape[1]))
    library.shoal_layers_rms_norm_backward(
        _pointer(gradient), _pointer(x), _pointer(gain), _pointer(rates), _pointer(of_x), _pointer(of_gain),
        *map(ctypes.c_int64, x.shape), ctypes.c_int64(parts))
    return of_x, of_gain.sum(0)


def rotary(x: Tensor, cosines: Tensor, sines: Tensor, *, back: bool) -> Tensor:
    """Return rows of x (rows, dim) turned by the angle of position row % length, of which (length, dim / 2) are given."""
    library = load("layers")
    assert library is not None
    output = torch.empty_like(x)
    library.shoal_layers_rotary(
        _pointer(x), _pointer(cosines), _pointer(sines), _pointer(output), ctypes.c_int64(x.shape[0]),
        ctypes.c_int64(cosines.shape[0]), ctypes.c_int64(cosines.shape[1]), ctypes.c_float(-1 if back else 1),
        torch.get_num_threads())
    return output


def _pointer(tensor: Tensor) -> ctypes.c_void_p:
    assert tensor.is_contiguous() and tensor.device.type == "cpu" and tensor.dtype == torch.float32
    return ctypes.c_void_p(tensor.data_ptr())
