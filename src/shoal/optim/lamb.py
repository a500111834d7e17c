"""LAMB: Adam's update, made as long as a bounded multiple of the weight it changes (You et al. 2020, Algorithm 2).

    m = beta1 m + (1 - beta1) g          m' = m / (1 - beta1^t)
    v = beta2 v + (1 - beta2) g^2        v' = v / (1 - beta2^t)
    u = m' / (sqrt(v') + eps) + weight_decay w
    c = |w| / |u| within [min_coeff, max_coeff], and 1 where either is 0
    w = w - lr c u

Adam with decoupled decay is LAMB with c = 1. Every line but one is elementwise: c, the trust ratio, is one number per
parameter, of norms over the whole of it. So a step can sweep twice over the elements, wherever they rest: `advance` changes
the moments, `direction` is u, which is computed again in the second sweep rather than kept. (layerwise.py)
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

__all__ = ["AT_ONCE", "Constants", "Lamb", "constants", "squares"]

AT_ONCE = 1 << 16
"""Elements that torch works on at a time on the host, so that what it makes of them stays in the cache."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Constants:
    """What is the same for all elements of a group in one step."""

    into_first: float
    keep_second: float
    into_second: float
    first: float
    """m' / m"""
    second: float
    """v' / v"""
    inside: float
    """Added to v' under the root."""
    outside: float
    """Added to the root."""
    decay: float
    again: float = 0.0
    """How far the momentum takes the gradient once more."""
    floor: float = 0.0
    """What fraction of its block's mean a variance counts as at least."""


class Lamb(Optimizer):
    """Step whole parameters by LAMB; an engine steps slices of them alike.

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
                    gradient = self.taken(weight, group)
                    self.advance(weight, gradient, group)
                    found = self.coefficient(group, self.state[weight], *self.sums(weight, group).tolist())
                    weight.add_(self.direction(weight, group, ..., gradient), alpha=-float(group["lr"]) * found)
                    self.lamb_coeffs.append(found)
        return loss

    def taken(self, weight: Tensor, group: Mapping[str, Any]) -> Tensor:
        """Return what a step takes of the gradient of a whole parameter, which has one."""
        assert weight.grad is not None
        return weight.grad

    def advance(self, weight: Tensor, gradient: Tensor, group: Mapping[str, Any], addend: Tensor | None = None,
                addends: int = 1) -> None:
        """Let the moments of `weight`, a parameter or a slice, take its `gradient`; the weight stays as it is.

        LAMB itself does not ask for one of the `addends` of the gradient.
        """
        state = self.state[weight]
        self.begin(group, state, lambda moment: torch.zeros_like(weight, memory_format=torch.preserve_format))
        c = self.constants(group, state)
        state["exp_avg"].lerp_(gradient, c.into_first)
        state["exp_avg_sq"].mul_(c.keep_second).addcmul_(gradient, gradient, value=c.into_second)

    def begin(self, group: Mapping[str, Any], state: dict[str, Any], moment: Callable[[str], Tensor]) -> None:
        """Count a step of one tensor's `state`; before the first, `moment` gives zeros of its shape by name."""
        if not state:
            state.update(step=torch.zeros(()), exp_avg=moment("exp_avg"), exp_avg_sq=moment("exp_avg_sq"))
        state["step"] += 1

    def constants(self, group: Mapping[str, Any], state: Mapping[str, Any]) -> Constants:
        """Return the constants of the step that `state` counts by now."""
        return constants(group, state["step"].item())

    def sums(self, weight: Tensor, group: Mapping[str, Any], part: slice | EllipsisType = ...) -> Tensor:
        """Return what of `weight`, or of a part of it, adds up to what `coefficient` asks for: two numbers in fp64."""
        return torch.stack([squares(weight[part]), squares(self.direction(weight, group, part))])

    def direction(self, weight: Tensor, group: Mapping[str, Any], part: slice | EllipsisType = ...,
                  gradient: Tensor | None = None) -> Tensor:
        """Return u of `weight`, or of a part of it, by moments that have taken the gradient."""
        state = self.state[weight]
        c = self.constants(group, state)
        below = (state["exp_avg_sq"][part] * c.second).add_(c.inside).sqrt_().add_(c.outside)
        update = (state["exp_avg"][part] * c.first).div_(below)
        return update.add_(weight[part], alpha=c.decay) if c.decay else update

    def coefficient(self, group: Mapping[str, Any], state: dict[str, Any], weight: float, update: float) -> float:
        """Return c of a parameter, by the sums of squares of `weight` and of `update`; NaN where one of them is."""
        if weight == 0 or update == 0:
            return 1.0
        ratio = sqrt(weight / update)
        return min(max(ratio, group["min_coeff"]), group["max_coeff"])

def constants(group: Mapping[str, Any], time: float) -> Constants:
    """Return the constants of a group's step number `time`, counted from 1."""
    (beta1, beta2), eps, inside = group["betas"], group["eps"], group["eps_inside_sqrt"]
    corrected = group["bias_correction"]
    return Constants(
        into_first=1 - beta1, keep_second=beta2, into_second=1 - beta2,
        first=1 / (1 - beta1**time) if corrected else 1.0, second=1 / (1 - beta2**time) if corrected else 1.0,
        inside=eps if inside else 0.0, outside=0.0 if inside else eps, decay=group["weight_decay"])


def squares(tensor: Tensor) -> Tensor:
    """Return the sum of squares of `tensor` in fp64, a tensor without dims: over millions fp32 errs in the fourth digit."""
    if tensor.device.type != "cpu":
        return torch.linalg.vector_norm(tensor, dtype=torch.float64).square()
    total = torch.zeros((), dtype=torch.float64)
    for piece in tensor.reshape(-1).split(AT_ONCE):
        wide = piece.double()
        total += wide.dot(wide)
    return total
