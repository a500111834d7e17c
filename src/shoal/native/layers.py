"""The native passes of transformer layers (layers.cpp), over contiguous fp32 tensors in host memory.

Every sum over rows is taken in `_parts` stretches of rows, and then over these: its bits depend on the number of threads.
"""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int64, c_uint32
from dataclasses import dataclass

import torch
from torch import Tensor

from shoal.native.build import load

__all__ = ["NO_DROPOUT", "DropMask", "available", "bias_gelu", "bias_gelu_backward", "cross_entropy", "dropout_add",
           "dropout_add_norm", "dropout_add_norm_backward", "rms_norm", "rms_norm_backward", "rotary", "swiglu",
           "swiglu_backward"]

_VERSION = 3
_WORD = 0xFFFFFFFF
_MIN_PER_THREAD = 15  # bits of the elements below which another thread costs more than it saves


@dataclass(frozen=True, slots=True)
class DropMask:
    """Drops the elements whose hash of (seed, row, column) is below `threshold`, of 2^32."""

    seed: int
    threshold: int
    kept: float
    """The factor on elements that stay."""

    def arguments(self) -> tuple[c_uint32, c_uint32, c_uint32, c_float]:
        """Return the arguments of a native pass."""
        return (c_uint32(self.seed & _WORD), c_uint32(self.seed >> 32 & _WORD), c_uint32(self.threshold),
                c_float(self.kept))


NO_DROPOUT = DropMask(0, 0, 1.0)


def available() -> bool:
    """Whether the library can be built and loaded here; the first call builds it."""
    library = load("layers")
    return library is not None and library.shoal_layers_version() == _VERSION


def dropout_add(x: Tensor, residual: Tensor | None, dropout: DropMask) -> Tensor:
    """Return dropout(x) + residual of matrices (rows, columns)."""
    output = torch.empty_like(x)
    _library().shoal_layers_dropout_add(_pointer(x), _pointer(residual), _pointer(output), *map(c_int64, x.shape),
                                        *dropout.arguments(), torch.get_num_threads())
    return output


def dropout_add_norm(x: Tensor, bias: Tensor | None, residual: Tensor, gain: Tensor, shift: Tensor, *, eps: float,
                     dropout: DropMask, keep_sum: bool) -> tuple[Tensor | None, Tensor, Tensor, Tensor]:
    """Return h = dropout(x + bias) + residual if `keep_sum`, its layer norm, and of each row of h mean and 1 / deviation."""
    output, means, rates = torch.empty_like(x), x.new_empty(x.shape[0]), x.new_empty(x.shape[0])
    sums = torch.empty_like(x) if keep_sum else None
    _library().shoal_layers_dropout_add_norm(
        _pointer(x), _pointer(bias), _pointer(residual), _pointer(gain), _pointer(shift),
        _pointer(output if sums is None else sums), _pointer(output), _pointer(means), _pointer(rates),
        *map(c_int64, x.shape), c_float(eps), *dropout.arguments(), torch.get_num_threads())
    return sums, output, means, rates


def dropout_add_norm_backward(of_y: Tensor, of_h: Tensor | None, held: Tensor, means: Tensor | None, rates: Tensor,
                              gain: Tensor, shift: Tensor, dropout: DropMask) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of x and residual, and those of gain, shift and bias as rows of one tensor.

    `held` is h; or the output y, where `means` is None.
    """
    parts = _parts(held)
    of_residual, partial = torch.empty_like(held), held.new_zeros((parts, 3, held.shape[1]))
    of_x = torch.empty_like(held) if dropout.threshold else None
    _library().shoal_layers_dropout_add_norm_backward(
        _pointer(of_y), _pointer(of_h), _pointer(held), _pointer(means), _pointer(rates), _pointer(gain), _pointer(shift),
        _pointer(of_residual), _pointer(of_x), _pointer(partial), *map(c_int64, held.shape), *dropout.arguments(),
        c_int64(parts))
    return of_residual if of_x is None else of_x, of_residual, partial.sum(0)


def bias_gelu(x: Tensor, bias: Tensor, *, tanh: bool) -> Tensor:
    """Return gelu(x + bias) of a matrix (rows, columns): the exact function, or its approximation by tanh."""
    output = torch.empty_like(x)
    _library().shoal_layers_bias_gelu(_pointer(x), _pointer(bias), _pointer(output), *map(c_int64, x.shape), int(tanh),
                                      torch.get_num_threads())
    return output


def bias_gelu_backward(gradient: Tensor, x: Tensor, bias: Tensor, *, tanh: bool) -> tuple[Tensor, Tensor]:
    """Return the gradients of x (rows, columns) and of the bias (columns,)."""
    parts = _parts(x)
    of_x, of_bias = torch.empty_like(x), x.new_zeros((parts, x.shape[1]))
    _library().shoal_layers_bias_gelu_backward(_pointer(gradient), _pointer(x), _pointer(bias), _pointer(of_x),
                                               _pointer(of_bias), *map(c_int64, x.shape), c_int64(parts), int(tanh))
    return of_x, of_bias.sum(0)


def rms_norm(x: Tensor, gain: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return the norm of a matrix (rows, columns), and the rate (rows,) of each row."""
    output, rates = torch.empty_like(x), x.new_empty(x.shape[0])
    _library().shoal_layers_rms_norm(_pointer(x), _pointer(gain), _pointer(output), _pointer(rates),
                                     *map(c_int64, x.shape), c_float(eps), torch.get_num_threads())
    return output, rates


def rms_norm_backward(gradient: Tensor, x: Tensor, gain: Tensor, rates: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of x (rows, columns) and of the gain (columns,)."""
    parts = _parts(x)
    of_x, of_gain = torch.empty_like(x), x.new_zeros((parts, x.shape[1]))
    _library().shoal_layers_rms_norm_backward(
        _pointer(gradient), _pointer(x), _pointer(gain), _pointer(rates), _pointer(of_x), _pointer(of_gain),
        *map(c_int64, x.shape), c_int64(parts))
    return of_x, of_gain.sum(0)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Return silu(gate) up, of one shape."""
    output = torch.empty_like(gate)
    _library().shoal_layers_swiglu(_pointer(gate), _pointer(up), _pointer(output), c_int64(gate.numel()),
                                   torch.get_num_threads())
    return output


def swiglu_backward(gradient: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of gate and up."""
    of_gate, of_up = torch.empty_like(gate), torch.empty_like(up)
    _library().shoal_layers_swiglu_backward(_pointer(gradient), _pointer(gate), _pointer(up), _pointer(of_gate),
                                            _pointer(of_up), c_int64(gate.numel()), torch.get_num_threads())
    return of_gate, of_up


def rotary(x: Tensor, cosines: Tensor, sines: Tensor, *, back: bool) -> Tensor:
    """Return rows of x (rows, dim) turned by the angle of position row % length, of which (length, dim / 2) are given."""
    output = torch.empty_like(x)
    _library().shoal_layers_rotary(_pointer(x), _pointer(cosines), _pointer(sines), _pointer(output), c_int64(x.shape[0]),
                                   *map(c_int64, cosines.shape), c_float(-1 if back else 1), torch.get_num_threads())
    return output


def cross_entropy(logits: Tensor, targets: Tensor, scales: Tensor | None, *, smoothing: float,
                  z_loss: float) -> tuple[Tensor, Tensor]:
    """Return the loss and the logsumexp of each row of `logits` (rows, words); 0 where its target is negative.

    With `scales` (rows,), the logits are replaced by the gradient of the losses times the scales. `targets` are int64.
    """
    losses, sums = logits.new_empty(2, logits.shape[0])
    assert targets.dtype == torch.int64 and targets.is_contiguous()
    _library().shoal_layers_cross_entropy(
        _pointer(logits), ctypes.c_void_p(targets.data_ptr()), _pointer(scales), _pointer(losses), _pointer(sums),
        *map(c_int64, logits.shape), c_float(smoothing), c_float(z_loss), torch.get_num_threads())
    return losses, sums


def _library() -> ctypes.CDLL:
    library = load("layers")
    assert library is not None
    return library


def _parts(x: Tensor) -> int:
    """Return into how many stretches of rows, one for a thread, a sum over rows is divided."""
    return max(1, min(torch.get_num_threads(), x.numel() >> _MIN_PER_THREAD))


def _pointer(tensor: Tensor | None) -> ctypes.c_void_p | None:
    if tensor is None:
        return None
    assert tensor.is_contiguous() and tensor.device.type == "cpu" and tensor.dtype == torch.float32
    return ctypes.c_void_p(tensor.data_ptr())
