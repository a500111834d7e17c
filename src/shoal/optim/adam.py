"""Adam whose moments may be used without bias correction, by parameter group.

With `bias_correction` a step is that of torch's Adam or AdamW. Without it the moments are used as they are:

    m = beta1 * m + (1 - beta1) * gradient
    v = beta2 * v + (1 - beta2) * gradient^2
    weight = weight - lr * m / (sqrt(v) + eps)

with `weight_decay * weight` added to the gradient, or with decoupled decay `lr * weight_decay * weight` taken off before the
step. Every line is elementwise.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Adam

from shoal.errors import ConfigError

__all__ = ["BiasedAdam"]

_torch_step: Callable[..., Any] = inspect.unwrap(Adam.step)
"""Torch's step without the wrapper that calls step hooks, which this class's own wrapper calls."""


class BiasedAdam(Adam):
    """Adam (Kingma and Ba 2015, Algorithm 1) with an option `bias_correction` in each group; the other options are torch's.

    Raises `ConfigError` for an option of torch's Adam that a step without the correction does not have.
    """

    def __init__(self, params: Iterable[Tensor] | Iterable[dict[str, Any]], lr: float | Tensor = 1e-3,
                 betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8, weight_decay: float = 0.0, *,
                 bias_correction: bool = True, amsgrad: bool = False, maximize: bool = False, foreach: bool | None = None,
                 fused: bool | None = None, decoupled_weight_decay: bool = False) -> None:
        super().__init__(params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, amsgrad=amsgrad, maximize=maximize,
                         foreach=foreach, fused=fused, decoupled_weight_decay=decoupled_weight_decay)
        self.defaults["bias_correction"] = bias_correction
        for group in self.param_groups:
            group.setdefault("bias_correction", bias_correction)
            if not group["bias_correction"] and (group["amsgrad"] or group["maximize"]):
                raise ConfigError("Adam: got bias_correction=False with amsgrad or maximize; a step without the correction "
                                  "has neither: leave one out")

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # pyright: ignore[reportIncompatibleMethodOverride]  torch overloads it
        """Apply one step to every parameter with a gradient; return the loss of `closure`, if one is given."""
        groups = self.param_groups
        try:
            self.param_groups = [group for group in groups if group.get("bias_correction", True)]
            loss = _torch_step(self, closure)
        finally:
            self.param_groups = groups
        for group in groups:
            if not group.get("bias_correction", True):
                for weight in group["params"]:
                    if weight.grad is not None:
                        self._step_uncorrected(group, weight, weight.grad)
        return loss

    def _step_uncorrected(self, group: dict[str, Any], weight: Tensor, gradient: Tensor) -> None:
        state, (beta1, beta2), lr = self.state[weight], group["betas"], float(group["lr"])
        if not state:
            state.update(step=torch.zeros((), dtype=torch.float32, device="cpu"), exp_avg=torch.zeros_like(weight),
                         exp_avg_sq=torch.zeros_like(weight))
        state["step"] += 1
        if group["decoupled_weight_decay"]:
            weight.mul_(1 - lr * group["weight_decay"])
        elif group["weight_decay"]:
            gradient = gradient.add(weight, alpha=group["weight_decay"])
        state["exp_avg"].lerp_(gradient, 1 - beta1)
        state["exp_avg_sq"].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        weight.addcdiv_(state["exp_avg"], state["exp_avg_sq"].sqrt().add_(group["eps"]), value=-lr)
