"""LAMB: Adam's update scaled to a bounded multiple of the weight's norm (You et al. 2020, Algorithm 2).

    m = beta1 m + (1 - beta1) g          m' = m / (1 - beta1^t)
    v = beta2 v + (1 - beta2) g^2        v' = v / (1 - beta2^t)
    u = m' / (sqrt(v') + eps) + weight_decay w
    c = |w| / |u| within [min_coeff, max_coeff], and 1 where either is 0
    w = w - lr c u

AdamW is LAMB with c = 1. Every line but one is elementwise: the trust ratio c is one number per parameter, computed from
norms over the whole parameter. A sharded step therefore makes two passes: the first calls `update_moments`; the second
computes u again by `compute_update` instead of storing it. (layerwise.py)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from math import sqrt
from types import EllipsisType
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from shoal.errors import ConfigError

__all__ = ["CHUNK_ELEMENTS", "Constants", "Lamb", "constants", "sum_of_squares"]

CHUNK_ELEMENTS = 1 << 16
"""Elements that torch processes at a time on the host, so that temporaries stay in the cache."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Constants:
    """The constants of one step, equal for all elements of a tensor. Native code takes them in this order."""

    one_minus_beta1: float
    beta2: float
    one_minus_beta2: float
    momentum_correction: float
    """m' / m."""
    variance_correction: float
    """v' / v."""
    eps_inside_sqrt: float
    """Added to v' before the square root."""
    eps_outside_sqrt: float
    """Added to the square root."""
    decay: float
    look_ahead: float = 0.0
    """Weight of the gradient in m + look_ahead (g - m), which replaces m in the update (onebit.py)."""
    variance_floor: float = 0.0
    """Lower bound of v as a fraction of the mean of its block (onebit.py)."""


class Lamb(Optimizer):
    """Step whole parameters by LAMB; an engine steps slices with the same result.

    `bias_correction` false leaves m and v as they are; `eps_inside_sqrt` adds eps to v' instead of its root. Raises
    `ConfigError` for values out of range, and for the published options `amsgrad` and `max_grad_norm`.
    """

    def __init__(self, params: Iterable[Tensor] | Iterable[dict[str, Any]], lr: float | Tensor = 1e-3,
                 bias_correction: bool = True, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8,
                 eps_inside_sqrt: bool = False, weight_decay: float = 0.0, max_grad_norm: float = 0.0,
                 max_coeff: float = 10.0, min_coeff: float = 0.01, amsgrad: bool = False) -> None:
        beta1, beta2 = betas
        if not (lr >= 0 and eps >= 0 and weight_decay >= 0):
            raise ConfigError(f"Lamb: got lr={lr}, eps={eps}, weight_decay={weight_decay}; none may be negative")
        if not (0 <= beta1 < 1 and 0 <= beta2 < 1):
            raise ConfigError(f"Lamb: got betas={betas}; both must be at least 0 and below 1")
        if not 0 < min_coeff <= max_coeff:
            raise ConfigError(f"Lamb: got min_coeff={min_coeff}, max_coeff={max_coeff}; the bounds of the trust ratio must "
                              f"be above 0, and the lower one not above the upper one")
        if amsgrad:
            raise ConfigError("Lamb: got amsgrad=True; LAMB has no such variant: remove it")
        if max_grad_norm:
            raise ConfigError(f"Lamb: got max_grad_norm={max_grad_norm}; no optimizer clips by itself: set "
                              f"gradient_clipping in the configuration, or call torch.nn.utils.clip_grad_norm_")
        self.lamb_coeffs: list[float] = []
        """The trust ratios of the last step, of the parameters that had a gradient, in the order of the groups."""
        super().__init__(params, {"lr": lr, "bias_correction": bias_correction, "betas": (beta1, beta2), "eps": eps,
                                  "eps_inside_sqrt": eps_inside_sqrt, "weight_decay": weight_decay,
                                  "max_coeff": max_coeff, "min_coeff": min_coeff})

    def get_lamb_coeffs(self) -> list[float]:
        """Return `lamb_coeffs`."""
        return self.lamb_coeffs

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # pyright: ignore[reportIncompatibleMethodOverride]  torch overloads it
        """Apply one step to every parameter with a gradient; return the loss of `closure`, if one is given."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.lamb_coeffs = []
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    gradient = self.effective_gradient(weight, group)
                    self.update_moments(weight, gradient, group)
                    ratio = self.trust_ratio(group, self.state[weight], *self.norm_squares(weight, group).tolist())
                    weight.add_(self.compute_update(weight, group, ..., gradient), alpha=-float(group["lr"]) * ratio)
                    self.lamb_coeffs.append(ratio)
        return loss

    def effective_gradient(self, weight: Tensor, group: Mapping[str, Any]) -> Tensor:
        """Return the gradient that a step of a whole parameter uses."""
        assert weight.grad is not None
        return weight.grad

    def update_moments(self, weight: Tensor, gradient: Tensor, group: Mapping[str, Any], addend: Tensor | None = None,
                       addends: int = 1) -> None:
        """Update the moments of `weight`, a parameter or a slice, by its `gradient`; the weight is unchanged.

        LAMB itself ignores `addend` and `addends`, which 1-bit LAMB needs.
        """
        state = self.state[weight]
        self.begin_step(group, state, lambda moment: torch.zeros_like(weight, memory_format=torch.preserve_format))
        c = self.constants(group, state)
        state["exp_avg"].lerp_(gradient, c.one_minus_beta1)
        state["exp_avg_sq"].mul_(c.beta2).addcmul_(gradient, gradient, value=c.one_minus_beta2)

    def begin_step(self, group: Mapping[str, Any], state: dict[str, Any], moment: Callable[[str], Tensor]) -> None:
        """Count a step in one tensor's `state`; before the first, `moment` allocates zeros of its shape by name."""
        if not state:
            state.update(step=torch.zeros((), dtype=torch.float32, device="cpu"), exp_avg=moment("exp_avg"),
                         exp_avg_sq=moment("exp_avg_sq"))
        state["step"] += 1

    def constants(self, group: Mapping[str, Any], state: Mapping[str, Any]) -> Constants:
        """Return the constants of the present step of `state`."""
        return constants(group, state["step"].item())

    def norm_squares(self, weight: Tensor, group: Mapping[str, Any], part: slice | EllipsisType = ...) -> Tensor:
        """Return the sums of squares of `weight` (or of a part of it) and of its update, shape (2,), fp64."""
        return torch.stack([sum_of_squares(weight[part]), sum_of_squares(self.compute_update(weight, group, part))])

    def compute_update(self, weight: Tensor, group: Mapping[str, Any], part: slice | EllipsisType = ...,
                       gradient: Tensor | None = None) -> Tensor:
        """Return u of `weight`, or of a part of it, from the updated moments. Only 1-bit LAMB uses `gradient`."""
        state = self.state[weight]
        c = self.constants(group, state)
        denominator = (state["exp_avg_sq"][part] * c.variance_correction).add_(c.eps_inside_sqrt).sqrt_()
        denominator.add_(c.eps_outside_sqrt)
        update = (state["exp_avg"][part] * c.momentum_correction).div_(denominator)
        return update.add_(weight[part], alpha=c.decay) if c.decay else update

    def trust_ratio(self, group: Mapping[str, Any], state: dict[str, Any], weight: float, update: float) -> float:
        """Return c from the sums of squares of `weight` and `update`; NaN if one of them is NaN."""
        if weight == 0 or update == 0:
            return 1.0
        ratio = sqrt(weight / update)
        return min(max(ratio, group["min_coeff"]), group["max_coeff"])


def constants(group: Mapping[str, Any], time: float) -> Constants:
    """Return the constants of a group's step number `time`, counted from 1."""
    (beta1, beta2), eps, inside_sqrt = group["betas"], group["eps"], group["eps_inside_sqrt"]
    corrected = group["bias_correction"]
    return Constants(
        one_minus_beta1=1 - beta1, beta2=beta2, one_minus_beta2=1 - beta2,
        momentum_correction=1 / (1 - beta1**time) if corrected else 1.0,
        variance_correction=1 / (1 - beta2**time) if corrected else 1.0,
        eps_inside_sqrt=eps if inside_sqrt else 0.0, eps_outside_sqrt=0.0 if inside_sqrt else eps,
        decay=group["weight_decay"])


def sum_of_squares(tensor: Tensor) -> Tensor:
    """Return the sum of squares of `tensor` as a scalar tensor in fp64: fp32 over millions is wrong in the fourth digit."""
    if tensor.device.type != "cpu":
        return torch.linalg.vector_norm(tensor, dtype=torch.float64).square()
    total = torch.zeros((), dtype=torch.float64, device="cpu")
    for piece in tensor.reshape(-1).split(CHUNK_ELEMENTS):
        wide = piece.double()
        total += wide.dot(wide)
    return total
