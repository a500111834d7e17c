"""The passes of layers in Triton, for accelerators: one program a row, computed in fp32, whatever the dtype in memory.

    rms_norm, rms_norm_backward     norm of a row; the gradient of the gain is summed by program, then over programs
    swiglu, swiglu_backward         silu(gate) up
    rotary                          pairs (i, i + columns / 2) of a row turned by an angle
    dropout_add                     dropout(x) + residual; a hash of (seed, row, column) says what is dropped

Arguments and results are those of `shoal.native.layers`, in any floating dtype; every sum has a fixed order. This file is
imported only where Triton is installed. With `TRITON_INTERPRET=1` Triton runs it on the host.
"""

# Triton is untyped, and not installed on every machine that checks types.
# pyright: basic, reportMissingImports=false, reportIndexIssue=false, reportGeneralTypeIssues=false
# pyright: reportOperatorIssue=false, reportCallIssue=false, reportArgumentType=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from shoal.attention.dropout import row_keys
from shoal.device import selected

__all__ = ["WIDEST", "dropout_add", "rms_norm", "rms_norm_backward", "rotary", "swiglu", "swiglu_backward"]

WIDEST = 16_384
"""The most columns of a row: it is held in the registers of one program."""

_PROGRAMS = 256
"""The programs that sum the gradient of a gain: each holds one partial sum."""


def rms_norm(x: Tensor, gain: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return the norm of a matrix (rows, columns), and the rate (rows,) of each row in fp32."""
    output, rates = torch.empty_like(x), torch.empty(x.shape[0], device=x.device)
    with selected(x.device):
        _rms_norm[(x.shape[0],)](x, gain, output, rates, x.shape[1], eps, WIDE=triton.next_power_of_2(x.shape[1]))
    return output, rates


def rms_norm_backward(gradient: Tensor, x: Tensor, gain: Tensor, rates: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of x (rows, columns) in its dtype, and of the gain (columns,) in fp32."""
    programs = min(_PROGRAMS, x.shape[0])
    of_x, of_gain = torch.empty_like(x), torch.empty(programs, x.shape[1], device=x.device)
    with selected(x.device):
        _rms_norm_backward[(programs,)](gradient, x, gain, rates, of_x, of_gain, x.shape[0], x.shape[1], programs,
                                        WIDE=triton.next_power_of_2(x.shape[1]))
    return of_x, of_gain.sum(0)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Return silu(gate) up of matrices (rows, columns)."""
    output = torch.empty_like(gate)
    with selected(gate.device):
        _swiglu[(gate.shape[0],)](gate, up, output, gate.shape[1], WIDE=triton.next_power_of_2(gate.shape[1]))
    return output


def swiglu_backward(gradient: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of gate and up (rows, columns)."""
    of_gate, of_up = torch.empty_like(gate), torch.empty_like(up)
    with selected(gate.device):
        _swiglu_backward[(gate.shape[0],)](gradient, gate, up, of_gate, of_up, gate.shape[1],
                                           WIDE=triton.next_power_of_2(gate.shape[1]))
    return of_gate, of_up


def rotary(x: Tensor, cosines: Tensor, sines: Tensor, *, back: bool) -> Tensor:
    """Return rows of x (rows, dim) turned by the angle of position row % length, of which (length, dim / 2) are given."""
    output = torch.empty_like(x)
    half = x.shape[1] // 2
    with selected(x.device):
        _rotary[(x.shape[0],)](x, cosines, sines, output, cosines.shape[0], half, WIDE=triton.next_power_of_2(half),
                               BACK=back)
    return output


def dropout_add(x: Tensor, residual: Tensor | None, *, seed: int, threshold: int, kept: float) -> Tensor:
    """Return dropout(x) + residual of matrices (rows, columns)."""
    output = torch.empty_like(x)
    first = torch.zeros(1, dtype=torch.int64, device=x.device)
    keys = row_keys(seed, 1, first, torch.arange(x.shape[0], device=x.device)[None]).view(-1).to(torch.int32)
    with selected(x.device):
        _dropout_add[(x.shape[0],)](x, x if residual is None else residual, keys, output, x.shape[1], kept,
                                    WIDE=triton.next_power_of_2(x.shape[1]), DROPPED=threshold, ADDS=residual is not None)
    return output


# --- Kernels ---

@triton.jit
def _read(rows, row, columns, places):
    """Load a row in fp32; places beyond its columns are 0."""
    return tl.load(rows + row.to(tl.int64) * columns + places, mask=places < columns, other=0.0).to(tl.float32)


@triton.jit
def _write(rows, row, columns, places, values):
    """Store a row in the dtype of its memory."""
    tl.store(rows + row.to(tl.int64) * columns + places, values.to(rows.dtype.element_ty), mask=places < columns)


@triton.jit
def _rms_norm(x, gain, output, rates, columns, eps, WIDE: tl.constexpr):
    row, places = tl.program_id(0), tl.arange(0, WIDE)
    values = _read(x, row, columns, places)
    rate = 1.0 / tl.sqrt(tl.sum(values * values, 0) / columns + eps)
    gains = tl.load(gain + places, mask=places < columns, other=0.0).to(tl.float32)
    tl.store(rates + row, rate)
    _write(output, row, columns, places, values * rate * gains)


@triton.jit
def _rms_norm_backward(gradient, x, gain, rates, of_x, of_gain, rows, columns, programs, WIDE: tl.constexpr):
    first, places = tl.program_id(0), tl.arange(0, WIDE)
    gains = tl.load(gain + places, mask=places < columns, other=0.0).to(tl.float32)
    total = tl.zeros([WIDE], tl.float32)
    row = first
    while row < rows:
        rate = tl.load(rates + row)
        unit, given = _read(x, row, columns, places) * rate, _read(gradient, row, columns, places)
        scaled = given * gains
        inner = tl.sum(scaled * unit, 0) / columns
        _write(of_x, row, columns, places, (scaled - unit * inner) * rate)
        total += given * unit
        row += programs
    tl.store(of_gain + first * columns + places, total, mask=places < columns)


@triton.jit
def _swiglu(gate, up, output, columns, WIDE: tl.constexpr):
    row, places = tl.program_id(0), tl.arange(0, WIDE)
    gates = _read(gate, row, columns, places)
    _write(output, row, columns, places, gates * tl.sigmoid(gates) * _read(up, row, columns, places))


@triton.jit
def _swiglu_backward(gradient, gate, up, of_gate, of_up, columns, WIDE: tl.constexpr):
    row, places = tl.program_id(0), tl.arange(0, WIDE)
    given, gates = _read(gradient, row, columns, places), _read(gate, row, columns, places)
    share = tl.sigmoid(gates)
    _write(of_up, row, columns, places, given * gates * share)
    _write(of_gate, row, columns, places,
           given * _read(up, row, columns, places) * share * (1.0 + gates * (1.0 - share)))


@triton.jit
def _rotary(x, cosines, sines, output, length, half, WIDE: tl.constexpr, BACK: tl.constexpr):
    row, places = tl.program_id(0), tl.arange(0, WIDE)
    position = row % length
    cosine, sine = _read(cosines, position, half, places), _read(sines, position, half, places)
    if BACK:
        sine = -sine
    low, high = _read(x, 2 * row, half, places), _read(x, 2 * row + 1, half, places)
    _write(output, 2 * row, half, places, low * cosine - high * sine)
    _write(output, 2 * row + 1, half, places, high * cosine + low * sine)


@triton.jit
def _dropout_add(x, residual, keys, output, columns, kept, WIDE: tl.constexpr, DROPPED: tl.constexpr, ADDS: tl.constexpr):
    row, places = tl.program_id(0), tl.arange(0, WIDE)
    key = tl.load(keys + row).to(tl.uint32, bitcast=True)
    h = key + places.to(tl.uint32) * 0x9E3779B9
    h = (h ^ (h >> 16)) * 0x85EBCA6B
    h = (h ^ (h >> 13)) * 0xC2B2AE35
    values = tl.where(h ^ (h >> 16) >= DROPPED, _read(x, row, columns, places) * kept, 0.0)
    if ADDS:
        values += _read(residual, row, columns, places)
    _write(output, row, columns, places, values)
