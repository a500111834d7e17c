"""The kinds of the arguments of attention: another kind raises an error that says so, where it is given."""

from __future__ import annotations

from operator import index
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shoal.errors import ShoalError, UsageError

__all__ = ["check_tensor", "in_memory", "true_or_false", "whole_number"]


def check_tensor(name: str, value: object, meaning: str) -> None:
    """Raise UsageError for what is no tensor, and for a sparse or nested one, whose elements lie at no strides."""
    if not isinstance(value, Tensor):
        fix = "one" if value is None else "torch.as_tensor of it"
        raise UsageError(f"{name} is a tensor {meaning}; got {type(value).__name__}: give {fix}")
    if value.is_nested:
        raise UsageError(f"{name} is a dense tensor {meaning}; got a nested one: give its to_padded_tensor(0.0), and hide "
                         f"the padding by key_padding")
    if value.layout != torch.strided:
        raise UsageError(f"{name} is a dense tensor {meaning}; got one of {value.layout}: give its to_dense()")


def in_memory(name: str, **tensors: Tensor | None) -> list[Any]:
    """Return the tensors as kernels can read them; raise UsageError for one that has no memory of its own.

    A DTensor, a tensor of FakeTensorMode or one that a collective still fills computes torch's operators itself. It reports
    a shape and a host device, and the address 0: a kernel that read it would end the process. Any operator on a
    tensor of an asynchronous collective waits for that, and returns a plain tensor. Other subclasses of Tensor have memory.
    """
    results: list[Any] = []
    for operand, given in tensors.items():
        result = given if given is None or not _is_wrapper(given) else given[...]
        if result is not None and _is_wrapper(result):
            raise UsageError(f"{name}: {operand} is a tensor with memory of its own; got {type(result).__name__}, whose "
                             f"class computes by operators alone: give a plain tensor, of a DTensor its to_local()")
        results.append(result)
    return results


def _is_wrapper(tensor: object) -> bool:
    of_tensors: Any = Tensor
    kind: Any = type(tensor)
    return isinstance(tensor, Tensor) and kind.__torch_dispatch__ is not of_tensors.__torch_dispatch__


def whole_number(name: str, value: object, allowed: str = "a whole number", *, least: int | None = None,
                 error: type[ShoalError] = UsageError) -> int:
    """Return `value`, an integer of Python, numpy or torch. Raises `error` for others, and for those below `least`."""
    try:
        number = None if isinstance(value, bool) else index(value)  # pyright: ignore[reportArgumentType]  others raise
    except (TypeError, ValueError, RuntimeError):
        number = None
    if number is None or (least is not None and number < least):
        raise error(f"{name} is {allowed}; got {value!r}")
    return number


def true_or_false(name: str, value: object, *, error: type[ShoalError] = UsageError) -> bool:
    """Return `value`, true or false of Python, numpy or torch, or 1 or 0. Raises `error` for others, such as text."""
    is_truth = isinstance(value, bool | np.bool_) or (isinstance(value, Tensor) and value.dtype == torch.bool)
    if is_truth and (not isinstance(value, Tensor) or value.numel() == 1):
        return bool(value)
    number = None if is_truth else whole_number(name, value, "true or false", error=error)
    if number not in (0, 1):
        raise error(f"{name} is true or false; got {value!r}")
    return bool(number)
