"""Lion: the sign of an interpolation between momentum and gradient (Chen et al. 2023, Algorithm 2).

    update = sign(beta1 * momentum + (1 - beta1) * gradient)
    weight = weight - lr * (update + weight_decay * weight)
    momentum = beta2 * momentum + (1 - beta2) * gradient

One moment, so two thirds of Adam's optimizer state (master included). Every line is elementwise.
"""

# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false
# (torch documents its foreach operations under names that begin with an underscore.)

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from shoal.errors import ConfigError

__all__ = ["Lion"]


class Lion(Optimizer):
    """Step parameters by Lion, all tensors of a group at once.

    `betas` are beta1 and beta2 of the formula above (the paper trains with 0.9 and 0.99); a good `lr` is 3 to 10 times
    smaller, and `weight_decay` as much larger, than for AdamW. Raises `ConfigError` for values out of range.
    """

    def __init__(self, params: Iterable[Tensor] | Iterable[dict[str, Any]], lr: float | Tensor = 1e-3,
                 betas: tuple[float, float] = (0.9, 0.999), weight_decay: float = 0.0) -> None:
        beta1, beta2 = betas
        if not (lr >= 0 and weight_decay >= 0):
            raise ConfigError(f"Lion: got lr={lr}, weight_decay={weight_decay}; neither may be negative")
        if not (0 <= beta1 < 1 and 0 <= beta2 < 1):
            raise ConfigError(f"Lion: got betas={betas}; both must be at least 0 and below 1")
        super().__init__(params, {"lr": lr, "betas": (beta1, beta2), "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # pyright: ignore[reportIncompatibleMethodOverride]  torch overloads it
        """Apply one step to every parameter with a gradient; return the loss of `closure`, if one is given."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            weights: list[Tensor] = [weight for weight in group["params"] if weight.grad is not None]
            if weights:
                self._step_group(group, weights)
        return loss

    def _step_group(self, group: dict[str, Any], weights: list[Tensor]) -> None:
        gradients = [weight.grad for weight in weights if weight.grad is not None]
        momenta = [self._momentum(weight) for weight in weights]
        beta1, beta2 = group["betas"]
        lr, decay = float(group["lr"]), group["weight_decay"]
        updates = torch._foreach_lerp(momenta, gradients, 1 - beta1)
        torch._foreach_sign_(updates)
        if decay:
            torch._foreach_mul_(weights, 1 - lr * decay)
        torch._foreach_add_(weights, updates, alpha=-lr)
        torch._foreach_lerp_(momenta, gradients, 1 - beta2)

    def _momentum(self, weight: Tensor) -> Tensor:
        state = self.state[weight]
        if not state:
            state["exp_avg"] = torch.zeros_like(weight, memory_format=torch.preserve_format)
        return state["exp_avg"]
