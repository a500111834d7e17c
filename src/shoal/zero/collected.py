"""The gradient of one parameter leaves it for the addend of its unit, as soon as autograd has written it."""

from __future__ import annotations

import torch
from torch import nn

from shoal.interrupts import unbroken
from shoal.zero.unit import Unit


def collect(unit: Unit, slot: int, parameter: nn.Parameter, *, again: bool = False) -> bool:
    """Take the gradient of one slot, of a pass within the pass or not; return whether it was the last of the pass."""
    if type(parameter) is nn.Parameter:
        gradient, parameter.grad = parameter.grad, None
    else:  # released, or of the script's own class
        with torch._C.DisableTorchFunctionSubclass():  # pyright: ignore[reportPrivateUsage]
            gradient, parameter.grad = parameter.grad, None
    if gradient is None:  # a node that leaves the weight's gradient for later leads here all the same
        return False
    assert unit.gradient is not None
    unit.gradient.again |= again
    if not torch.is_grad_enabled():  # as in any pass but one with create_graph
        return unit.gradient.addend.collect(slot, gradient)
    with torch.no_grad():
        return unit.gradient.addend.collect(slot, gradient)


@unbroken
def collect_late(unit: Unit, slot: int, parameter: nn.Parameter) -> None:
    """Take a gradient of a unit that several stages hold, of whose passes none is the last."""
    collect(unit, slot, parameter)


def drop(parameter: nn.Parameter) -> None:
    """Forget the gradient of a parameter that nobody steps."""
    parameter.grad = None
