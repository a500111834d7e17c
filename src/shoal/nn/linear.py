"""Compute the products of `nn.Linear` by other kernels, without changing modules, parameters or state dicts.

`set_linear_kernels` gives each `nn.Linear` of a model a forward of its own, as an attribute of that module; hooks, ZeRO's
included, surround it as before. Autograd saves the input and the weight, as torch does. What the kernels do not serve is
torch's: other dtypes and devices, small products, autocast, torch.compile, torch.func, subclasses of tensors, and second
derivatives.
"""

# pyright: reportIncompatibleMethodOverride=false

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from functools import partial
from types import MethodType
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shoal.autograd import needs_operators
from shoal.log import warn_once
from shoal.nn.probe import Choice, check_choice, choose
from shoal.pipeline.split_backward import current_queue
from shoal.products import Products
from shoal.tensor_parallel.layers import SlicedLinear, torch_products

__all__ = ["linear", "linear_kernels_in", "set_linear_kernels"]


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, products: Products) -> Tensor:
    """Return x W^T + b as `F.linear` does, by `products` forward and backward."""
    if (needs_operators(x, weight)
            or torch.is_autocast_enabled("cpu") or current_queue() is not None or x.shape[-1:] != weight.shape[-1:]):
        return F.linear(x, weight, bias)
    return cast(Tensor, _Linear.apply(x, weight, bias, products))


def set_linear_kernels(model: nn.Module, choice: Choice) -> int:
    """Let `choice` compute the products of every `nn.Linear` and tensor-parallel layer in `model`; "torch" takes it back.

    Returns how many changed. Subclasses of `nn.Linear`, modules that have a forward of their own already, and
    tensor-parallel layers with `entered` stay as they are. Raises ConfigError for another choice, and for "onednn" where
    this torch does not have it.
    """
    check_choice(choice)
    changed = 0
    for module in _linears(model):
        if choice == "torch":
            changed += vars(module).pop("forward", None) is not None
        else:
            module.forward = MethodType(_FORWARDS[choice], module)
            changed += 1
    for module in model.modules():
        if isinstance(module, SlicedLinear):
            module.use_products(torch_products if choice == "torch" else partial(choose, choice))
            changed += 1
    return changed


@contextmanager
def linear_kernels_in(model: nn.Module, choice: Choice, device: torch.device) -> Generator[None]:
    """Give `model`, which computes on `device`, the kernels of `choice`; take them back if the context raises."""
    changed = set_linear_kernels(model, choice)
    if choice != "torch" and device.type != "cpu":
        warn_once(f"kernels.linear: the model computes on {device}, where torch's products are used: no effect")
    elif choice != "torch" and not changed:
        warn_once(f"kernels.linear: {type(model).__name__} has no nn.Linear: no effect")
    else:
        choose(choice, device)  # the probe, before a step is timed; it logs what it chose
    try:
        yield
    except BaseException:
        set_linear_kernels(model, "torch")
        raise


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, products: Products) -> Tensor:
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight if ctx.needs_input_grad[0] else None)
        ctx.products = products
        return products.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        of_x = of_weight = of_bias = None
        recorded = torch.is_grad_enabled()  # for a second derivative: by operators that torch differentiates
        flat = gradient.reshape(-1, gradient.shape[-1])
        if ctx.needs_input_grad[0]:
            of_x = gradient @ weight if recorded else ctx.products.gradient_of_input(gradient, weight)
        if ctx.needs_input_grad[1]:
            of_weight = (flat.t() @ x.reshape(-1, x.shape[-1]) if recorded
                         else ctx.products.gradient_of_weight(gradient, x))
        if ctx.needs_input_grad[2]:
            of_bias = flat.sum(0)
        return of_x, of_weight, of_bias, None


def _forward(choice: Choice) -> Callable[[nn.Linear, Tensor], Tensor]:
    def forward(self: nn.Linear, input: Tensor) -> Tensor:  # pickle finds a bound method by its name: the plain forward
        if torch.compiler.is_compiling():
            return F.linear(input, self.weight, self.bias)
        return linear(input, self.weight, self.bias, choose(choice, input.device))

    return forward


_FORWARDS = {"auto": _forward("auto"), "onednn": _forward("onednn")}


def _linears(model: nn.Module) -> Iterator[nn.Module]:
    """Yield each `nn.Linear` whose forward is torch's, and each module with one of these."""
    for module in model.modules():
        own = vars(module).get("forward")
        function = getattr(own, "__func__", None)
        plain = own is None or function is nn.Linear.forward  # an attribute of a module that was unpickled
        if (type(module) is nn.Linear and plain) or function in _FORWARDS.values():
            yield module
