"""1-bit LAMB: LAMB by gradients that come as signs in part.

    step t <= freeze_step    LAMB (lamb.py), everything sent as it is;    a = coeff_beta a + (1 - coeff_beta) c
    step t >  freeze_step    m, v and u as 1-bit Adam has them (onebit.py),    c = a r
                             r = (|w| / |u|) / a, within [factor_min, factor_max], and within
                                 [1 - factor_threshold, 1 + factor_threshold] times the r before

What is late and in parts makes |u|, and with it the trust ratio, a noisy number. So its average over the warm-up stands for
it, and it moves away from that within bounds and by small steps (Li et al. 2021, arXiv 2104.06069, Algorithm 1). In the
paper r follows a second variance, of the gradients that the momenta stand for, since that by which it steps is frozen; here
the variance goes on, and r follows LAMB's own ratio.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from types import EllipsisType
from typing import Any

import torch
from torch import Tensor

from shoal.errors import ConfigError
from shoal.optim.compressed import CompressedOptimizer, time_of
from shoal.optim.lamb import Constants, Lamb
from shoal.optim.masks import kept_of
from shoal.optim.onebit import bounded, check_group

__all__ = ["OneBitLamb"]

_AVERAGE, _FACTOR = "coefficient", "factor"


class OneBitLamb(Lamb, CompressedOptimizer):  # pyright: ignore[reportIncompatibleMethodOverride]  torch overloads `step`
    """Step whole parameters by 1-bit LAMB; an engine steps slices of them alike. By itself, nothing travels.

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
        more = {"freeze_step": freeze_step, "coeff_beta": coeff_beta, "factor_max": factor_max, "factor_min": factor_min,
                "factor_threshold": factor_threshold, "variance_floor": variance_floor, "look_ahead": look_ahead}
        self.defaults.update(more)
        for group in self.param_groups:
            for key, value in more.items():
                group.setdefault(key, value)
            check_group("OneBitLamb", group, ("freeze_step",))

    def warm_up(self, group: Mapping[str, Any]) -> int:
        return group["freeze_step"]

    def taken(self, weight: Tensor, group: Mapping[str, Any]) -> Tensor:
        return kept_of(self, weight, group)

    def begin(self, group: Mapping[str, Any], state: dict[str, Any], moment: Callable[[str], Tensor]) -> None:
        """Count a step of one tensor's `state`; before the first, `moment` gives zeros of its shape by name."""
        super().begin(group, state, moment)
        state.setdefault(_AVERAGE, 0.0)
        state.setdefault(_FACTOR, 1.0)

    def advance(self, weight: Tensor, gradient: Tensor, group: Mapping[str, Any], addend: Tensor | None = None,
                addends: int = 1) -> None:
        """Let the moments of `weight` take its `gradient`, of so many `addends`, of which `addend`, if given, is exact."""
        if addend is None:
            super().advance(weight, gradient, group)
            return
        state = self.state[weight]
        self.begin(group, state, lambda moment: torch.zeros_like(weight))
        c, momentum = self.constants(group, state), state["exp_avg"].lerp_(gradient, 1 - group["betas"][0])
        variance = state["exp_avg_sq"].mul_(c.keep_second).addcmul_(addend, addend, value=c.into_second * addends)
        variance.addcmul_(momentum, momentum, value=c.into_second * (1 - 1 / addends))

    def constants(self, group: Mapping[str, Any], state: Mapping[str, Any]) -> Constants:
        """Return the constants of the step that `state` counts by now."""
        plain, beta1 = super().constants(group, state), group["betas"][0]
        if not self._compressed(group, state):
            return plain
        return replace(plain, again=group["look_ahead"] * (1 - beta1) / beta1 if beta1 else 0.0,
                       floor=group["variance_floor"])

    def direction(self, weight: Tensor, group: Mapping[str, Any], part: slice | EllipsisType = ...,
                  gradient: Tensor | None = None) -> Tensor:
        state = self.state[weight]
        c, momentum = self.constants(group, state), state["exp_avg"][part]
        if gradient is not None and c.again:
            momentum = momentum.lerp(gradient[part], c.again)
        below = bounded(state["exp_avg_sq"][part], c.floor).mul_(c.second).add_(c.inside).sqrt_()
        update = (momentum * c.first).div_(below.add_(c.outside))
        return update.add_(weight[part], alpha=c.decay) if c.decay else update

    def coefficient(self, group: Mapping[str, Any], state: dict[str, Any], weight: float, update: float) -> float:
        """Return what the update of a parameter is multiplied by, by the sums of squares of `weight` and of `update`."""
        found = super().coefficient(group, state, weight, update)
        if not self._compressed(group, state):
            beta = group["coeff_beta"]
            state[_AVERAGE] = beta * state[_AVERAGE] + (1 - beta) * found if state[_AVERAGE] else found
            return found
        average = state[_AVERAGE] or found
        ratio, before, most = found / average, state[_FACTOR], group["factor_threshold"]
        ratio = min(max(ratio, group["factor_min"]), group["factor_max"])
        state[_FACTOR] = min(max(ratio, (1 - most) * before), (1 + most) * before)
        return average * state[_FACTOR]

    def _compressed(self, group: Mapping[str, Any], state: Mapping[str, Any]) -> bool:
        return time_of(group, state) > self.warm_up(group)
