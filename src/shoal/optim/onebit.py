"""1-bit Adam: Adam whose variance settles after a warm-up, from where on gradients and weights travel as signs.

    step t <= freeze_step       Adam (Kingma and Ba 2015, Algorithm 1, its weight decay decoupled), everything sent as it is
    step t >  freeze_step       momentum = beta1 * momentum + (1 - beta1) * gradient,    the variance as it is
                                weight = weight - lr * (momentum / (sqrt(variance) + eps) + weight_decay * weight)

With a variance that stands still the step is linear in the gradient, so that what one step's signs do not say can be said
by the next (Tang et al. 2021, arXiv 2102.02888). There every rank compresses its momentum; here its gradient, and the owner
of a slice alone keeps the momentum of it, which is what lets state be sharded: docs/compression.md.

Signs have one magnitude for a block of elements, and an element whose variance is far below its block's would be stepped far
too far by it: a settled variance is at least `variance_floor` of its block's mean. An element that never had a gradient
(variance zero) takes no step at all: its variance is infinite.
"""

# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false
# (torch documents its foreach operations under names that begin with an underscore.)

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from shoal.errors import ConfigError
from shoal.optim.compressing import EXACT, Compressing, Wire
from shoal.signs import BLOCK

__all__ = ["OneBitAdam", "one_bit_terms", "settle"]


@torch.no_grad()
def settle(variance: Tensor, correction: float, floor: float) -> None:
    """Let the running `variance` (n,) stand still from now on: divided by its bias `correction`, and bounded from below."""
    variance.div_(correction)
    never = variance == 0
    for block in variance.split(BLOCK):
        block.clamp_(min=float(block.mean()) * floor)
    variance[never] = math.inf


def one_bit_terms(group: dict[str, Any], state: dict[str, Any]) -> tuple[float, float, float]:
    """Return (beta2, the corrections of momentum and of variance) for the step that `state` counts by now.

    A variance that is to stand still from this step on is settled first.
    """
    time, freeze, (beta1, beta2) = int(state["step"].item()), group["freeze_step"], group["betas"]
    corrected = group["bias_correction"]
    if time == freeze + 1:
        settle(state["exp_avg_sq"], 1 - beta2**freeze if corrected else 1.0, group["variance_floor"])
    first = 1 - beta1**time if corrected else 1.0
    if time > freeze:
        return 1.0, first, 1.0
    return beta2, first, 1 - beta2**time if corrected else 1.0


class OneBitAdam(Compressing):
    """Step parameters by 1-bit Adam. By itself, without an engine, nothing travels, and only the variance settles.

    `freeze_step` steps are Adam's; 15 to 25 % of training is what the paper warms up for. Raises `ConfigError` for values
    out of range.
    """

    def __init__(self, params: Iterable[Tensor] | Iterable[dict[str, Any]], lr: float | Tensor = 1e-3,
                 freeze_step: int = 100_000, bias_correction: bool = True, betas: tuple[float, float] = (0.9, 0.999),
                 eps: float = 1e-8, eps_inside_sqrt: bool = False, weight_decay: float = 0.0, *,
                 variance_floor: float = 0.1) -> None:
        beta1, beta2 = betas
        if not (lr >= 0 and weight_decay >= 0 and eps >= 0 and 0 <= variance_floor <= 1):
            raise ConfigError(f"{type(self).__name__}: got lr={lr}, weight_decay={weight_decay}, eps={eps}, variance_floor="
                              f"{variance_floor}; none may be negative, and variance_floor is at most 1")
        if not (0 <= beta1 < 1 and 0 <= beta2 < 1):
            raise ConfigError(f"{type(self).__name__}: got betas={betas}; both must be at least 0 and below 1")
        if isinstance(freeze_step, bool) or freeze_step < 1 or freeze_step != int(freeze_step):
            raise ConfigError(f"{type(self).__name__}: freeze_step: got {freeze_step!r}; give a whole number, 1 or more")
        super().__init__(params, {"lr": lr, "freeze_step": freeze_step, "bias_correction": bias_correction,
                                  "betas": (beta1, beta2), "eps": eps, "eps_inside_sqrt": eps_inside_sqrt,
                                  "weight_decay": weight_decay, "variance_floor": variance_floor})
        if any("exp_avg_mask" in group for group in self.param_groups):
            raise ConfigError(f"{type(self).__name__}: got a group with exp_avg_mask, which is not supported: leave it out; "
                              f"elements that had no gradient until freeze_step take no step anyway")

    def wire(self) -> Wire:
        """Return signs for both once every group is past its warm-up."""
        compressed = all(self.applied >= group["freeze_step"] for group in self.param_groups)
        return Wire(gradient=True, weights=True) if compressed else EXACT

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # pyright: ignore[reportIncompatibleMethodOverride]  torch overloads it
        """Apply one step to every parameter with a gradient; return the loss of `closure`, if one is given."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    self._step(group, weight, weight.grad)
        return loss

    def _step(self, group: dict[str, Any], weight: Tensor, gradient: Tensor) -> None:
        state = self.state[weight]
        if "exp_avg" not in state:
            state.update(step=torch.zeros(()), exp_avg=torch.zeros_like(weight), exp_avg_sq=torch.zeros_like(weight))
        state["step"] += 1
        momentum, variance, lr = state["exp_avg"], state["exp_avg_sq"], float(group["lr"])
        beta2, first, second = one_bit_terms(group, state)
        momentum.lerp_(gradient, 1 - group["betas"][0])
        if beta2 != 1:
            variance.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        if group["eps_inside_sqrt"]:
            denominator = variance.div(second).add_(group["eps"]).sqrt_()
        else:
            denominator = variance.div(second).sqrt_().add_(group["eps"])
        weight.mul_(1 - lr * group["weight_decay"]).addcdiv_(momentum, denominator, value=-lr / first)
