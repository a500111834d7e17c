"""Published host optimizers keep fp32 state for 16-bit parameters, also without an engine.

The torch class that steps makes state of a parameter's dtype. So a hook widens 16-bit parameters before its step, and
another rounds them after it. In an engine, whose masters are fp32 and whose steps call the hooks too, they do nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.optim import Optimizer

from shoal.zero.ownership import owner_of

__all__ = ["keep_wide_state"]

NARROW = (torch.float16, torch.bfloat16)


def keep_wide_state(optimizer: Optimizer) -> None:
    """Have `optimizer` step its 16-bit parameters in fp32, with fp32 state; an engine that takes it over does so itself."""
    widened: dict[torch.nn.Parameter, torch.dtype] = {}

    def widen(stepped: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        for parameter in _with_gradient(stepped):
            if parameter.dtype in NARROW:
                gradient, widened[parameter] = parameter.grad, parameter.dtype
                assert gradient is not None
                state = stepped.state[parameter]
                state.update({name: value.float() for name, value in state.items()
                              if isinstance(value, torch.Tensor) and value.dtype in NARROW})
                parameter.grad = None
                parameter.data = parameter.data.float()
                parameter.grad = gradient.float()

    def narrow(stepped: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        for parameter, dtype in widened.items():
            gradient, parameter.grad = parameter.grad, None
            parameter.data = parameter.data.to(dtype)
            parameter.grad = None if gradient is None else gradient.to(dtype)
        widened.clear()

    if any(parameter.dtype in NARROW for group in optimizer.param_groups for parameter in group["params"]):
        optimizer.register_step_pre_hook(widen)
        optimizer.register_step_post_hook(narrow)


def _with_gradient(optimizer: Optimizer) -> Iterator[torch.nn.Parameter]:
    for group in optimizer.param_groups:
        yield from (parameter for parameter in group["params"] if owner_of(parameter) is None and parameter.grad is not None)
