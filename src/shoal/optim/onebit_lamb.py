"""1-bit LAMB: LAMB on 1-bit compressed gradients, with a bounded trust ratio.

    step t <= freeze_step    LAMB (lamb.py), sent uncompressed;    a = coeff_beta a + (1 - coeff_beta) c
    step t >  freeze_step    m, v and u as in 1-bit Adam (onebit.py);    c = a r
                             r = (|w| / |u|) / a, within [factor_min, factor_max], and within
                                 [1 - factor_threshold, 1 + factor_threshold] times the previous r

The compression error makes |u|, and with it the trust ratio, noisy. The average ratio a over the warm-up therefore replaces
it, times a factor r that is bounded and changes by small steps (Li et al. 2021, arXiv 2104.06069, Algorithm 1). The paper
freezes the variance and derives r from a second one, of gradients reconstructed from the momenta. Here the variance is
updated at every step, and r is derived from LAMB's own ratio.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from types import EllipsisType
from typing import Any

import torch
from torch import Tensor

from shoal.errors import ConfigError
from shoal.optim.compressed import CompressedOptimizer, step_number
from shoal.optim.lamb import Constants, Lamb
from shoal.optim.masks import masked_gradient
from shoal.optim.onebit import check_group, floored_variance

__all__ = ["OneBitLamb"]

_AVERAGE, _FACTOR = "coefficient", "factor"


class OneBitLamb(Lamb, CompressedOptimizer):  # pyright: ignore[reportIncompatibleMethodOverride]  torch overloads `step`
    """Step whole parameters by 1-bit LAMB; an engine steps slices alike. Without an engine nothing is compressed.

    Raises `ConfigError` for values out of range.
    """

    def __init__(self, params: Iterable[Tensor] | Iterable[dict[str, Any]], lr: float | Tensor = 1e-3,
                 freeze_step: int = 100_000, bias_correction: bool = True, betas: tuple[float, float] = (0.9, 0.999),
                 eps: float = 1e-8, eps_inside_sqrt: bool = False, weight_decay: float = 0.0, max_coeff: float = 10.0,
                 min_coeff: float = 0.01, *, coeff_beta: float = 0.9, factor_max: float = 4.0, factor_min: float = 0.5,
                 factor_threshold: float = 0.1, variance_floor: float = 0.01, look_ahead: float = 1.0) -> None:
        if not (0 <= coeff_beta < 1 and 0 <= factor_threshold < 1 and 0 < factor_min <= 1 <= factor_max):
            raise ConfigError(f"OneBitLamb: got coeff_beta={coeff_beta}, factor_threshold={factor_threshold}, factor_min="
                              f"{factor_min}, factor_max={factor_max}; the first two must be at least 0 and below 1, and "
                              f"the bounds of the factor, which begins at 1, above 0 and on either side of 1")
        super().__init__(params, lr, bias_correction, betas, eps, eps_inside_sqrt, weight_decay, max_coeff=max_coeff,
                         min_coeff=min_coeff)
        options = {"freeze_step": freeze_step, "coeff_beta": coeff_beta, "factor_max": factor_max, "factor_min": factor_min,
                   "factor_threshold": factor_threshold, "variance_floor": variance_floor, "look_ahead": look_ahead}
        self.defaults.update(options)
        for group in self.param_groups:
            for key, value in options.items():
                group.setdefault(key, value)
            check_group("OneBitLamb", group, ("freeze_step",))

    def warmup_steps(self, group: Mapping[str, Any]) -> int:
        return group["freeze_step"]

    def effective_gradient(self, weight: Tensor, group: Mapping[str, Any]) -> Tensor:
        return masked_gradient(self, weight, group)

    def begin_step(self, group: Mapping[str, Any], state: dict[str, Any], moment: Callable[[str], Tensor]) -> None:
        """Count a step in one tensor's `state`; before the first, `moment` allocates zeros of its shape by name."""
        super().begin_step(group, state, moment)
        state.setdefault(_AVERAGE, 0.0)
        state.setdefault(_FACTOR, 1.0)

    def update_moments(self, weight: Tensor, gradient: Tensor, group: Mapping[str, Any], addend: Tensor | None = None,
                       addends: int = 1) -> None:
        """Update the moments of `weight` by its `gradient`, the sum of `addends` addends; `addend` is the uncompressed one,
        None if all are.
        """
        if addend is None:
            super().update_moments(weight, gradient, group)
            return
        state = self.state[weight]
        self.begin_step(group, state, lambda moment: torch.zeros_like(weight))
        c, momentum = self.constants(group, state), state["exp_avg"].lerp_(gradient, 1 - group["betas"][0])
        variance = state["exp_avg_sq"].mul_(c.beta2).addcmul_(addend, addend, value=c.one_minus_beta2 * addends)
        variance.addcmul_(momentum, momentum, value=c.one_minus_beta2 * (1 - 1 / addends))

    def constants(self, group: Mapping[str, Any], state: Mapping[str, Any]) -> Constants:
        """Return the constants of the present step of `state`."""
        plain, beta1 = super().constants(group, state), group["betas"][0]
        if not self._compressed(group, state):
            return plain
        return replace(plain, look_ahead=group["look_ahead"] * (1 - beta1) / beta1 if beta1 else 0.0,
                       variance_floor=group["variance_floor"])

    def compute_update(self, weight: Tensor, group: Mapping[str, Any], part: slice | EllipsisType = ...,
                       gradient: Tensor | None = None) -> Tensor:
        state = self.state[weight]
        c, momentum = self.constants(group, state), state["exp_avg"][part]
        if gradient is not None and c.look_ahead:
            momentum = momentum.lerp(gradient[part], c.look_ahead)
        variance = floored_variance(state["exp_avg_sq"][part], c.variance_floor).mul_(c.variance_correction)
        denominator = variance.add_(c.eps_inside_sqrt).sqrt_().add_(c.eps_outside_sqrt)
        update = (momentum * c.momentum_correction).div_(denominator)
        return update.add_(weight[part], alpha=c.decay) if c.decay else update

    def trust_ratio(self, group: Mapping[str, Any], state: dict[str, Any], weight: float, update: float) -> float:
        """Return c from the sums of squares of `weight` and `update`; store the average ratio or the factor in `state`."""
        measured = super().trust_ratio(group, state, weight, update)
        if not self._compressed(group, state):
            beta = group["coeff_beta"]
            state[_AVERAGE] = beta * state[_AVERAGE] + (1 - beta) * measured if state[_AVERAGE] else measured
            return measured
        average = state[_AVERAGE] or measured
        ratio, before, threshold = measured / average, state[_FACTOR], group["factor_threshold"]
        ratio = min(max(ratio, group["factor_min"]), group["factor_max"])
        state[_FACTOR] = min(max(ratio, (1 - threshold) * before), (1 + threshold) * before)
        return average * state[_FACTOR]

    def _compressed(self, group: Mapping[str, Any], state: Mapping[str, Any]) -> bool:
        return step_number(group, state) > self.warmup_steps(group)
