"""Tests written for the CPU on another device: batches and operands that a test left on the host go to the device.

A program of a user moves its batch to `engine.device`; most tests of Shoal do not, since they were written where that is the
host. Operands of calls from within Shoal are left as they are: one on the wrong device there is a fault.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode

import shoal

__all__ = ["move_operands"]

_NAMES = ("add", "sub", "mul", "matmul", "addmm", "eq", "ne", "lt", "cat", "stack", "where", "allclose", "equal")
_OPERATORS = ("add", "radd", "sub", "rsub", "mul", "rmul", "matmul", "truediv", "eq", "ne")
_FUNCTIONS: set[object] = {
    F.linear, F.embedding, F.embedding_bag, F.conv1d, F.conv2d, F.layer_norm, F.scaled_dot_product_attention,
    F.cross_entropy, F.nll_loss, F.mse_loss, F.l1_loss, F.binary_cross_entropy_with_logits,
    *(vars(torch)[name] for name in _NAMES),
    *(vars(torch._C.TensorBase)[name] for name in _NAMES if name in vars(torch._C.TensorBase)),
    *(getattr(Tensor, f"__{name}__") for name in _OPERATORS),
}
_SHOAL = str(Path(shoal.__file__).parent)


class MovesOperands(TorchFunctionMode):
    """Within the context, computation that a test calls for on tensors of two devices takes place on the accelerator."""

    def __torch_function__(self, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (),
                           kwargs: Mapping[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if func in _FUNCTIONS and not sys._getframe(1).f_code.co_filename.startswith(_SHOAL):
            device = _accelerator_of([*args, *kwargs.values()])
            if device is not None:
                args = [_moved(each, device) for each in args]
                kwargs = {name: _moved(each, device) for name, each in kwargs.items()}
        return func(*args, **kwargs)


def move_operands() -> None:
    """Move operands and batches, for the life of this process."""
    MovesOperands().__enter__()
    register_module_forward_pre_hook(_move_batch)


def _move_batch(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """Move the positional arguments of an engine's call to its device."""
    if isinstance(module, shoal.Engine):
        return tuple(_moved(each, module.device) for each in args)
    return None


def _accelerator_of(values: Sequence[object]) -> torch.device | None:
    for value in values:
        if isinstance(value, Tensor) and value.device.type not in ("cpu", "meta"):
            return value.device
        if isinstance(value, list | tuple) and (found := _accelerator_of(value)) is not None:
            return found
    return None


def _moved(value: Any, device: torch.device) -> Any:
    if isinstance(value, Tensor):
        return value.to(device) if value.device.type == "cpu" and value.dim() else value
    return type(value)(_moved(each, device) for each in value) if type(value) in (list, tuple) else value
