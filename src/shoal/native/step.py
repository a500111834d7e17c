"""Fused optimizer steps of a flat slice, in one pass over memory (step.cpp).

The kernel scales a gradient of 16 or 32 bits, updates the fp32 master and its moments, and writes the new weight in its own
dtype: 7 accesses of 4 bytes per element for Adam, where torch adds passes for scaling, casting and rounding. LAMB takes two
passes, and 10 accesses.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from enum import IntEnum

import torch
from torch import Tensor

from shoal.native.build import load

__all__ = ["DTYPES", "Rule", "apply", "available", "measure", "step"]

_VERSION = 5
DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""The dtypes that gradients and weights may have, by their number in rounding.h."""
_NONE = 3


class Rule(IntEnum):
    """The rules of step.cpp, with their constants (all fp32)."""

    ADAM = 0
    """1 - beta1, beta2, 1 - beta2, lr / (1 - beta1^t), 1 / sqrt(1 - beta2^t), eps, decay; decay joins the gradient"""
    ADAMW = 1
    """the same, with lr * decay, which shrinks the weight"""
    SGD = 2
    """lr, momentum, 1 - dampening (1 at the first step), decay; no moment: momentum is not used"""
    NESTEROV = 3
    """the same"""
    ADAGRAD = 4
    """lr / (1 + (t - 1) * lr_decay), eps, decay"""
    LION = 5
    """lr, 1 - beta1, 1 - beta2, lr * decay"""
    ONE_BIT_ADAM = 6
    """those of ADAMW, look-ahead, the number of addends, the variance floor as a fraction of the mean of 1024 variances, and
    the factor on the squared gradient that initializes a variance of zero"""


def available() -> bool:
    """Whether the library can be built and loaded here; the first call builds it."""
    library = load("step")
    return library is not None and library.shoal_step_version() == _VERSION


def step(rule: Rule, master: Tensor, moments: Sequence[Tensor], gradient: Tensor, constants: Sequence[float], *,
         factor: float = 1.0, weight: Tensor | None = None, addend: Tensor | None = None) -> None:
    """Step the fp32 `master` (n,) and its fp32 `moments` (n,) in place by `gradient` (n,) times `factor`.

    `weight` (n,), of 16 or 32 bits, receives the new values. `addend` (n,), of the gradient's dtype, is the uncompressed one
    of the gradient's addends, for ONE_BIT_ADAM. All tensors are contiguous, in host memory. The bits do not depend on the
    number of threads; nor, except for ONE_BIT_ADAM, on how a longer slice was cut into calls.
    """
    library = _library_for(master, moments, gradient, *(each for each in (weight, addend) if each is not None))
    assert addend is None or addend.dtype == gradient.dtype
    first, second = (_pointer(moments[index] if index < len(moments) else None) for index in range(2))
    library.shoal_step(
        int(rule), ctypes.c_int64(master.numel()), _pointer(master), first, second,
        _pointer(gradient), _pointer(addend), DTYPES[gradient.dtype], ctypes.c_float(factor),
        _pointer(weight), _NONE if weight is None else DTYPES[weight.dtype], _floats(constants), torch.get_num_threads())


def measure(master: Tensor, moments: Sequence[Tensor], gradient: Tensor, ends: Sequence[int], constants: Sequence[float], *,
            factor: float = 1.0, addend: Tensor | None = None, addends: int = 1) -> Tensor:
    """Update LAMB's fp32 `moments` (n,) by `gradient` (n,) times `factor`; return sums of squares (stretches, 2) in fp64.

    The slice consists of stretches that end at `ends`, the last at n. Column 0 is the sum of squares of a stretch of the
    `master`, column 1 that of its update. `constants` are those of `shoal.optim.lamb.Constants`, in their order. `addend`
    (n,), of the gradient's dtype, is the uncompressed one of its `addends`; None: all are uncompressed.
    """
    library = _library_for(master, moments, gradient, *([] if addend is None else [addend]))
    assert addend is None or addend.dtype == gradient.dtype
    sums = torch.empty(len(ends), 2, dtype=torch.float64, device="cpu")
    first, second = map(_pointer, moments)
    library.shoal_lamb_measure(
        ctypes.c_int64(len(ends)), (ctypes.c_int64 * len(ends))(*ends), _pointer(master), first, second, _pointer(gradient),
        _pointer(addend), ctypes.c_float(addends), DTYPES[gradient.dtype], ctypes.c_float(factor), _floats(constants),
        _pointer(sums), torch.get_num_threads())
    return sums


def apply(master: Tensor, moments: Sequence[Tensor], ends: Sequence[int], constants: Sequence[float],
          lengths: Sequence[float], *, gradient: Tensor | None = None, factor: float = 1.0,
          weight: Tensor | None = None) -> None:
    """Subtract from each stretch of the `master` (n,) its length times LAMB's update.

    `gradient` and `factor` are those given to `measure`; they are needed for look-ahead only. `weight` is as for `step`.
    """
    library = _library_for(master, moments, *(each for each in (gradient, weight) if each is not None))
    assert gradient is not None or not constants[8], "look-ahead needs the gradient"
    first, second = map(_pointer, moments)
    library.shoal_lamb_apply(
        ctypes.c_int64(len(ends)), (ctypes.c_int64 * len(ends))(*ends), _pointer(master), first, second, _pointer(gradient),
        _NONE if gradient is None else DTYPES[gradient.dtype], ctypes.c_float(factor), _pointer(weight),
        _NONE if weight is None else DTYPES[weight.dtype], _floats(constants), _floats(lengths), torch.get_num_threads())


def _library_for(master: Tensor, moments: Sequence[Tensor], *others: Tensor) -> ctypes.CDLL:
    """Return the library; assert that it can take the tensors."""
    library = load("step")
    assert library is not None
    for tensor in (master, *moments, *others):
        assert tensor.is_contiguous() and tensor.device.type == "cpu" and tensor.shape == master.shape, "not flat slices"
    assert all(tensor.dtype == torch.float32 for tensor in (master, *moments)), "masters and moments are fp32"
    return library


def _floats(values: Sequence[float]) -> ctypes.Array[ctypes.c_float]:
    return (ctypes.c_float * len(values))(*values)


def _pointer(tensor: Tensor | None) -> ctypes.c_void_p:
    return ctypes.c_void_p(None if tensor is None else tensor.data_ptr())
