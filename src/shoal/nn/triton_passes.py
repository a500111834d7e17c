"""The passes of layers in Triton, for accelerators: one program a row, computed in fp32, whatever the dtype in memory.

    rms_norm, rms_norm_backward     norm of a row; the gradient of the gain is summed by program, then over programs
    swiglu, swiglu_backward         silu(gate) up
    rotary                          pairs (i, i + columns / 2) of a row turned by an angle
    dropout_add                     dropout(x) + residual; a hash of (seed, row, column) says what is dropped
    dropout_add_norm, .._backward   dropout(x + bias) + residual, and its layer norm
    bias_gelu, bias_gelu_backward   gelu(x + bias)
    cross_entropy                   the loss of a row of logits, which are replaced by their gradient

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
from shoal.native.layers import DropMask

__all__ = ["WIDEST", "bias_gelu", "bias_gelu_backward", "cross_entropy", "dropout_add", "dropout_add_norm",
           "dropout_add_norm_backward", "rms_norm", "rms_norm_backward", "rotary", "swiglu", "swiglu_backward"]

WIDEST = 16_384
"""The most columns of a row: it is held in the registers of one program."""

_PROGRAMS = 256
"""The programs that sum the gradient of a gain: each holds one partial sum."""

_TILE = 4096
"""The words of a row of logits that are in registers at a time."""


def _width(columns: int) -> dict[str, int]:
    """Return how many places a program has for a row of `columns`, and its warps: a thread holds up to 32 of them."""
    wide = triton.next_power_of_2(columns)
    return {"WIDE": wide, "num_warps": min(16, max(4, wide // 1024))}


def rms_norm(x: Tensor, gain: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return the norm of a matrix (rows, columns), and the rate (rows,) of each row in fp32."""
    output, rates = torch.empty_like(x), torch.empty(x.shape[0], dtype=torch.float32, device=x.device)
    with selected(x.device):
        _rms_norm[(x.shape[0],)](x, gain, output, rates, x.shape[1], eps, **_width(x.shape[1]))
    return output, rates


def rms_norm_backward(gradient: Tensor, x: Tensor, gain: Tensor, rates: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of x (rows, columns) in its dtype, and of the gain (columns,) in fp32."""
    programs = min(_PROGRAMS, x.shape[0])
    of_x, of_gain = torch.empty_like(x), torch.empty(programs, x.shape[1], dtype=torch.float32, device=x.device)
    with selected(x.device):
        _rms_norm_backward[(programs,)](gradient, x, gain, rates, of_x, of_gain, x.shape[0], x.shape[1], programs,
                                        **_width(x.shape[1]))
    return of_x, of_gain.sum(0)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Return silu(gate) up of matrices (rows, columns)."""
    output = torch.empty_like(gate)
    with selected(gate.device):
        _swiglu[(gate.shape[0],)](gate, up, output, gate.shape[1], **_width(gate.shape[1]))
    return output


def swiglu_backward(gradient: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of gate and up (rows, columns)."""
    of_gate, of_up = torch.empty_like(gate), torch.empty_like(up)
    with selected(gate.device):
        _swiglu_backward[(gate.shape[0],)](gradient, gate, up, of_gate, of_up, gate.shape[1],
                                           **_width(gate.shape[1]))
    return of_gate, of_up


def rotary(x: Tensor, cosines: Tensor, sines: Tensor, *, back: bool) -> Tensor:
    """Return rows of x (rows, dim) turned by the angle of position row % length, of which (length, dim / 2) are given."""
    output = torch.empty_like(x)
    half = x.shape[1] // 2
    with selected(x.device):
        _rotary[(x.shape[0],)](x, cosines, sines, output, cosines.shape[0], half, **_width(half),
                               BACK=back)
    return output


def dropout_add(x: Tensor, residual: Tensor | None, dropout: DropMask) -> Tensor:
    """Return dropout(x) + residual of matrices (rows, columns)."""
    output = torch.empty_like(x)
    with selected(x.device):
        _dropout_add[(x.shape[0],)](x, x if residual is None else residual, _keys(x, dropout), output, x.shape[1],
                                    dropout.kept, **_width(x.shape[1]), DROPPED=dropout.threshold,
                                    ADDS=residual is not None)
    return output


def dropout_add_norm(x: Tensor, bias: Tensor | None, residual: Tensor, gain: Tensor, shift: Tensor, *, eps: float,
                     dropout: DropMask, keep_sum: bool) -> tuple[Tensor | None, Tensor, Tensor, Tensor]:
    """Return h = dropout(x + bias) + residual if `keep_sum`, its layer norm, and of each row of h mean and 1 / deviation."""
    output, sums = torch.empty_like(x), torch.empty_like(x) if keep_sum else None
    means, rates = torch.empty(2, x.shape[0], dtype=torch.float32, device=x.device)
    with selected(x.device):
        _dropout_add_norm[(x.shape[0],)](
            x, x if bias is None else bias, residual, gain, shift, _keys(x, dropout), output if sums is None else sums,
            output, means, rates, x.shape[1], eps, dropout.kept, **_width(x.shape[1]),
            DROPPED=dropout.threshold, BIASED=bias is not None, SUMMED=keep_sum)
    return sums, output, means, rates


def dropout_add_norm_backward(of_y: Tensor, of_h: Tensor | None, held: Tensor, means: Tensor | None, rates: Tensor,
                              gain: Tensor, shift: Tensor, dropout: DropMask) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of x and residual, and in fp32 those of gain, shift and bias as rows of one tensor.

    `held` is h; or the output y, where `means` is None.
    """
    programs = min(_PROGRAMS, held.shape[0])
    of_residual = torch.empty_like(held)
    partial = torch.empty(programs, 3, held.shape[1], dtype=torch.float32, device=held.device)
    of_x = torch.empty_like(held) if dropout.threshold else of_residual
    with selected(held.device):
        _dropout_add_norm_backward[(programs,)](
            of_y, of_y if of_h is None else of_h, held, rates if means is None else means, rates, gain, shift,
            _keys(held, dropout), of_residual, of_x, partial, held.shape[0], held.shape[1], programs, dropout.kept,
            **_width(held.shape[1]), DROPPED=dropout.threshold, ADDS=of_h is not None,
            INVERTS=means is None)
    return of_x, of_residual, partial.sum(0)


def bias_gelu(x: Tensor, bias: Tensor, *, tanh: bool) -> Tensor:
    """Return gelu(x + bias) of a matrix (rows, columns): the exact function, or its approximation by tanh."""
    output = torch.empty_like(x)
    with selected(x.device):
        _bias_gelu[(x.shape[0],)](x, bias, output, x.shape[1], **_width(x.shape[1]), TANH=tanh)
    return output


def bias_gelu_backward(gradient: Tensor, x: Tensor, bias: Tensor, *, tanh: bool) -> tuple[Tensor, Tensor]:
    """Return the gradients of x (rows, columns) in its dtype, and of the bias (columns,) in fp32."""
    programs = min(_PROGRAMS, x.shape[0])
    of_x, of_bias = torch.empty_like(x), torch.empty(programs, x.shape[1], dtype=torch.float32, device=x.device)
    with selected(x.device):
        _bias_gelu_backward[(programs,)](gradient, x, bias, of_x, of_bias, x.shape[0], x.shape[1], programs,
                                         **_width(x.shape[1]), TANH=tanh)
    return of_x, of_bias.sum(0)


def cross_entropy(logits: Tensor, targets: Tensor, scales: Tensor | None, *, smoothing: float,
                  z_loss: float) -> tuple[Tensor, Tensor]:
    """Return the loss and the logsumexp of each row of `logits` (rows, words); 0 where its target is negative.

    With `scales` (rows,), the logits are replaced by the gradient of the losses times the scales. `targets` are int64.
    """
    losses, sums = torch.empty(2, logits.shape[0], dtype=torch.float32, device=logits.device)
    with selected(logits.device):
        _cross_entropy[(logits.shape[0],)](
            logits, targets, sums if scales is None else scales, losses, sums, logits.shape[1], smoothing, z_loss,
            **_width(min(_TILE, logits.shape[1])), DIFFERENTIATES=scales is not None)
    return losses, sums


def _keys(x: Tensor, dropout: DropMask) -> Tensor:
    """Return the key of each row's hash; without dropout none is read."""
    if not dropout.threshold:
        return torch.empty(1, dtype=torch.int32, device=x.device)
    first = torch.zeros(1, dtype=torch.int64, device=x.device)
    return row_keys(dropout.seed, 1, first, torch.arange(x.shape[0], device=x.device)[None]).view(-1).to(torch.int32)


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
def _drop(values, keys, row, places, kept, DROPPED: tl.constexpr):
    """Set the elements to 0 that the hash of the row's key and their column says, and multiply the others."""
    key = tl.load(keys + row).to(tl.uint32, bitcast=True)
    h = key + places.to(tl.uint32) * 0x9E3779B9
    h = (h ^ (h >> 16)) * 0x85EBCA6B
    h = (h ^ (h >> 13)) * 0xC2B2AE35
    return tl.where(h ^ (h >> 16) >= DROPPED, values * kept, 0.0)


@triton.jit
def _dropout_add(x, residual, keys, output, columns, kept, WIDE: tl.constexpr, DROPPED: tl.constexpr, ADDS: tl.constexpr):
    row, places = tl.program_id(0), tl.arange(0, WIDE)
    values = _drop(_read(x, row, columns, places), keys, row, places, kept, DROPPED)
    if ADDS:
        values += _read(residual, row, columns, places)
    _write(output, row, columns, places, values)


@triton.jit
def _dropout_add_norm(x, bias, residual, gain, shift, keys, sums, output, means, rates, columns, eps, kept,
                      WIDE: tl.constexpr, DROPPED: tl.constexpr, BIASED: tl.constexpr, SUMMED: tl.constexpr):
    row, places = tl.program_id(0), tl.arange(0, WIDE)
    inside = places < columns
    values = _read(x, row, columns, places)
    if BIASED:
        values += _read(bias, row * 0, columns, places)
    if DROPPED:
        values = _drop(values, keys, row, places, kept, DROPPED)
    values += _read(residual, row, columns, places)
    if SUMMED:
        _write(sums, row, columns, places, values)
        values = values.to(sums.dtype.element_ty).to(tl.float32)  # backward reads h as it was written
    mean = tl.sum(tl.where(inside, values, 0.0), 0) / columns
    centred = tl.where(inside, values - mean, 0.0)
    rate = 1.0 / tl.sqrt(tl.sum(centred * centred, 0) / columns + eps)
    tl.store(means + row, mean)
    tl.store(rates + row, rate)
    gains, shifts = _read(gain, row * 0, columns, places), _read(shift, row * 0, columns, places)
    _write(output, row, columns, places, centred * rate * gains + shifts)


@triton.jit
def _dropout_add_norm_backward(of_y, of_h, held, means, rates, gain, shift, keys, of_residual, of_x, partial, rows, columns,
                               programs, kept, WIDE: tl.constexpr, DROPPED: tl.constexpr, ADDS: tl.constexpr,
                               INVERTS: tl.constexpr):
    first, places = tl.program_id(0), tl.arange(0, WIDE)
    inside = places < columns
    gains, shifts = _read(gain, first * 0, columns, places), _read(shift, first * 0, columns, places)
    of_gain, of_shift, of_bias = tl.zeros([WIDE], tl.float32), tl.zeros([WIDE], tl.float32), tl.zeros([WIDE], tl.float32)
    row = first
    while row < rows:
        rate = tl.load(rates + row)
        unit = _read(held, row, columns, places)
        if INVERTS:
            unit = tl.where(inside, (unit - shifts) / tl.where(inside, gains, 1.0), 0.0)
        else:
            unit = tl.where(inside, (unit - tl.load(means + row)) * rate, 0.0)
        given = _read(of_y, row, columns, places)
        scaled = given * gains
        along, across = tl.sum(scaled, 0) / columns, tl.sum(scaled * unit, 0) / columns
        values = (scaled - along - unit * across) * rate
        if ADDS:
            values += _read(of_h, row, columns, places)
        _write(of_residual, row, columns, places, values)
        if DROPPED:
            values = _drop(values, keys, row, places, kept, DROPPED)
            _write(of_x, row, columns, places, values)
        of_gain += given * unit
        of_shift += given
        of_bias += values
        row += programs
    tl.store(partial + first * 3 * columns + places, of_gain, mask=inside)
    tl.store(partial + (first * 3 + 1) * columns + places, of_shift, mask=inside)
    tl.store(partial + (first * 3 + 2) * columns + places, of_bias, mask=inside)


@triton.jit
def _gelu_share(x, TANH: tl.constexpr):
    """Return gelu(x) / x."""
    if TANH:
        return tl.sigmoid(1.5957691216057308 * x * (1.0 + 0.044715 * x * x))
    return 0.5 * (1.0 + tl.erf(0.7071067811865476 * x))


@triton.jit
def _bias_gelu(x, bias, output, columns, WIDE: tl.constexpr, TANH: tl.constexpr):
    row, places = tl.program_id(0), tl.arange(0, WIDE)
    values = _read(x, row, columns, places) + _read(bias, row * 0, columns, places)
    _write(output, row, columns, places, values * _gelu_share(values, TANH))


@triton.jit
def _bias_gelu_backward(gradient, x, bias, of_x, of_bias, rows, columns, programs, WIDE: tl.constexpr, TANH: tl.constexpr):
    first, places = tl.program_id(0), tl.arange(0, WIDE)
    biases = _read(bias, first * 0, columns, places)
    total = tl.zeros([WIDE], tl.float32)
    row = first
    while row < rows:
        values = _read(x, row, columns, places) + biases
        share = _gelu_share(values, TANH)
        if TANH:
            slope = share + values * share * (1.0 - share) * 1.5957691216057308 * (1.0 + 0.134145 * values * values)
        else:
            slope = share + values * 0.3989422804014327 * tl.exp(-0.5 * values * values)
        found = _read(gradient, row, columns, places) * slope
        _write(of_x, row, columns, places, found)
        total += found
        row += programs
    tl.store(of_bias + first * columns + places, total, mask=places < columns)


@triton.jit
def _cross_entropy(logits, targets, scales, losses, sums, words, smoothing, z_loss, WIDE: tl.constexpr,
                   DIFFERENTIATES: tl.constexpr):
    row = tl.program_id(0)
    target = tl.load(targets + row)
    counted = target >= 0
    start = logits + row.to(tl.int64) * words
    own = tl.load(start + tl.maximum(target, 0), mask=target < words, other=float("nan")).to(tl.float32)
    largest, total, mean = -float("inf"), 0.0, 0.0
    for first in range(0, words, WIDE):
        places = first + tl.arange(0, WIDE)
        values = tl.load(start + places, mask=places < words, other=-float("inf")).to(tl.float32)
        higher = tl.maximum(largest, tl.max(values, 0))
        base = tl.where(higher == -float("inf"), 0.0, higher)  # all words so far may be masked
        total = total * tl.exp(largest - base) + tl.sum(tl.exp(values - base), 0)
        largest = higher
        mean += tl.sum(tl.where(places < words, values, 0.0), 0)
    z = largest + tl.log(total)
    loss = z - (1.0 - smoothing) * own + z_loss * z * z
    if smoothing > 0:
        loss -= smoothing / words * mean
    tl.store(losses + row, tl.where(counted, loss, 0.0))
    tl.store(sums + row, tl.where(counted, z, 0.0))
    if DIFFERENTIATES:
        scale = tl.where(counted, tl.load(scales + row), 0.0)
        factor, less = scale * (1.0 + 2.0 * z_loss * z), scale * smoothing / words
        for first in range(0, words, WIDE):
            places = first + tl.arange(0, WIDE)
            values = tl.load(start + places, mask=places < words, other=-float("inf")).to(tl.float32)
            found = tl.exp(values - z) * factor - less
            found -= tl.where(places == target, scale * (1.0 - smoothing), 0.0)
            found = tl.where(counted, found, 0.0)
            tl.store(start + places, found.to(logits.dtype.element_ty), mask=places < words)
