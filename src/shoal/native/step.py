"""The optimizer step of a flat slice in one pass over memory (step.cpp), by the rules that it knows.

A gradient of 16 or 32 bits comes in, is scaled, steps the fp32 master and its moments, and the new weight goes out in the
dtype in which it rests: 7 accesses of 4 bytes per element for Adam, where torch adds passes for scaling, casting and
rounding. LAMB takes two passes, and 10 accesses.
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
"""The dtypes that gradients and weights may have, by their number in step.cpp."""
_NOWHERE = 3


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
    """those of ADAMW, how far the momentum takes the gradient once more, the number of addends, the fraction of the mean of
    1024 variances that each counts at least as, and what part of its gradient's square a variance is that is nothing yet"""


def available() -> bool:
    """Whether the library can be used here; the first call builds it."""
    library = load("step")
    return library is not None and library.shoal_step_version() == _VERSION


def step(rule: Rule, master: Tensor, moments: Sequence[Tensor], gradient: Tensor, constants: Sequence[float], *,
         factor: float = 1.0, weight: Tensor | None = None, addend: Tensor | None = None) -> None:
    """Step the fp32 `master` (n,) and its fp32 `moments` (n,) in place by `gradient` (n,) times `factor`.

    `weight` (n,), of 16 or 32 bits, receives the new values. `addend` (n,), of the gradient's dtype, is the exact one of
    those that are summed in it, where a rule asks for one. All are contiguous and on the host. The result has the same bits
    however many threads work, and but for ONE_BIT_ADAM wherever a longer slice was cut.
    """
    library = _checked(master, moments, gradient, *(each for each in (weight, addend) if each is not None))
    assert addend is None or addend.dtype == gradient.dtype
    first, second = (_pointer(moments[index] if index < len(moments) else None) for index in range(2))
    library.shoal_step(
        int(rule), ctypes.c_int64(master.numel()), _pointer(master), first, second,
        _pointer(gradient), _pointer(addend), DTYPES[gradient.dtype], ctypes.c_float(factor),
        _pointer(weight), _NOWHERE if weight is None else DTYPES[weight.dtype], _floats(constants), torch.get_num_threads())


def measure(master: Tensor, moments: Sequence[Tensor], gradient: Tensor, ends: Sequence[int], constants: Sequence[float], *,
            factor: float = 1.0, addend: Tensor | None = None, addends: int = 1) -> Tensor:
    """Let LAMB's fp32 `moments` (n,) take `gradient` (n,) times `factor`; return sums of squares (stretches, 2) in fp64.

    The slice is stretches that end at `ends`, the last at n; of each, the squares of the `master` are added up, and those
    of its update. `constants` are those of `shoal.optim.lamb.Constants`, in their order. `addend` (n,), of the gradient's
    dtype, is the exact one of its `addends`, if not all are.
    """
    library = _checked(master, moments, gradient, *([] if addend is None else [addend]))
    assert addend is None or addend.dtype == gradient.dtype
    sums = torch.empty(len(ends), 2, dtype=torch.float64)
    first, second = map(_pointer, moments)
    library.shoal_lamb_measure(
        ctypes.c_int64(len(ends)), (ctypes.c_int64 * len(ends))(*ends), _pointer(master), first, second, _pointer(gradient),
        _pointer(addend), ctypes.c_float(addends), DTYPES[gradient.dtype], ctypes.c_float(factor), _floats(constants),
        _pointer(sums), torch.get_num_threads())
    return sums


def apply(master: Tensor, moments: Sequence[Tensor], ends: Sequence[int], constants: Sequence[float],
          lengths: Sequence[float], *, gradient: Tensor | None = None, factor: float = 1.0,
          weight: Tensor | None = None) -> None:
    """Change the `master` (n,) by LAMB's update times minus the length of each stretch.

    `gradient` and `factor` are as `measure` had them, where the momentum takes the gradient once more; `weight` is as `step`
    has it.
    """
    library = _checked(master, moments, *(each for each in (gradient, weight) if each is not None))
    assert gradient is not None or not constants[8], "the momentum takes a gradient once more"
    first, second = map(_pointer, moments)
    library.shoal_lamb_apply(
        ctypes.c_int64(len(ends)), (ctypes.c_int64 * len(ends))(*ends), _pointer(master), first, second, _pointer(gradient),
        _NOWHERE if gradient is None else DTYPES[gradient.dtype], ctypes.c_float(factor), _pointer(weight),
        _NOWHERE if weight is None else DTYPES[weight.dtype], _floats(constants), _floats(lengths), torch.get_num_threads())


def _checked(master: Tensor, moments: Sequence[Tensor], *others: Tensor) -> ctypes.CDLL:
    """Return the library, once the tensors are what it takes."""
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
