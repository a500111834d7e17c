"""1-bit LAMB: LAMB whose variance and trust ratios settle after a warm-up, when gradients and weights begin to be signs.

    step t <= freeze_step    LAMB (lamb.py), everything sent as it is;    a = coeff_beta a + (1 - coeff_beta) c
    step t >  freeze_step    m = beta1 m + (1 - beta1) g,    v as it is,    f = beta2 f + (1 - beta2) g^2    from f = v
                             r = mean of sqrt(v / f), within [factor_min, factor_max] and [1 - factor_threshold,
                                 1 + factor_threshold] times the r before
                             w = w - lr a r (m' / (sqrt(v) + eps) + weight_decay w)

A trust ratio cannot be computed from momenta that arrive late and in parts, and so its running average a stands for it. How
the gradients have grown or shrunk since the freeze, which LAMB would answer by c, is in the fresh variance f of what arrived
(Li et al. 2021, arXiv 2104.06069, Algorithm 1). The paper takes the largest of the ratios where r is their mean: among
millions, some element nearly always has a variance that has vanished, so that the largest is factor_max whatever happens.

m' goes ahead as that of 1-bit Adam does, and v is settled as its is (onebit.py, variance.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from math import inf
from types import EllipsisType
from typing import Any

import torch
from torch import Tensor

from shoal.errors import ConfigError
from shoal.optim.compressing import Compressing, next_time, time_of
from shoal.optim.lamb import Constants, Lamb, constants
from shoal.optim.onebit import check_count
from shoal.optim.variance import follow, started

__all__ = ["OneBitLamb"]

_FRESH, _AVERAGE, _FACTOR = "exp_avg_sq_fresh", "coefficient", "factor"


class OneBitLamb(Lamb, Compressing):  # pyright: ignore[reportIncompatibleMethodOverride]  torch overloads `step`
    """Step whole parameters by 1-bit LAMB; an engine steps slices of them alike. By itself, nothing travels.

    Raises `ConfigError` for values out of range.
    """

    def __init__(self, params: Iterable[Tensor] | Iterable[dict[str, Any]], lr: float | Tensor = 1e-3,
                 freeze_step: int = 100_000, bias_correction: bool = True, betas: tuple[float, float] = (0.9, 0.999),
                 eps: float = 1e-8, eps_inside_sqrt: bool = False, weight_decay: float = 0.0, max_coeff: float = 10.0,
                 min_coeff: float = 0.01, *, coeff_beta: float = 0.9, factor_max: float = 4.0, factor_min: float = 0.5,
                 factor_threshold: float = 0.1, variance_floor: float = 0.1, look_ahead: float = 1.0) -> None:
        check_count("OneBitLamb", "freeze_step", freeze_step)
        if not (0 <= coeff_beta < 1 and 0 <= factor_threshold < 1 and 0 < factor_min <= 1 <= factor_max):
            raise ConfigError(f"OneBitLamb: got coeff_beta={coeff_beta}, factor_threshold={factor_threshold}, factor_min="
                              f"{factor_min}, factor_max={factor_max}; the first two must be at least 0 and below 1, and "
                              f"the bounds of the factor, which begins at 1, above 0 and on either side of 1")
        if not (0 <= variance_floor <= 1 and look_ahead >= 0):
            raise ConfigError(f"OneBitLamb: got variance_floor={variance_floor}, look_ahead={look_ahead}; neither may be "
                              f"negative, and variance_floor is at most 1")
        super().__init__(params, lr, bias_correction, betas, eps, eps_inside_sqrt, weight_decay, max_coeff=max_coeff,
                         min_coeff=min_coeff)
        more = {"freeze_step": freeze_step, "coeff_beta": coeff_beta, "factor_max": factor_max, "factor_min": factor_min,
                "factor_threshold": factor_threshold, "variance_floor": variance_floor, "look_ahead": look_ahead}
        self.defaults.update(more)
        for group in self.param_groups:
            for key, value in more.items():
                group.setdefault(key, value)

    def warm_up(self, group: Mapping[str, Any]) -> int:
        return group["freeze_step"]

    def begin(self, group: Mapping[str, Any], state: dict[str, Any], moment: Callable[[str], Tensor]) -> None:
        """Count a step of one tensor's `state`; before the first, `moment` gives zeros of its shape by name."""
        super().begin(group, state, moment)
        if _AVERAGE not in state:
            state.update({_AVERAGE: 0.0, _FACTOR: 1.0})
            started(state)
        measured = self.measures(group, time_of(group, state))
        if not measured and _FRESH not in state:
            state[_FRESH] = moment(_FRESH).copy_(state["exp_avg_sq"])
        follow(state, measured=measured, floor=group["variance_floor"])

    def constants(self, group: Mapping[str, Any], state: Mapping[str, Any]) -> Constants:
        return constants(group, state["step"].item(), measured=None if _FRESH not in state else state["measured"].item())

    def advance(self, weight: Tensor, gradient: Tensor, group: Mapping[str, Any]) -> None:
        super().advance(weight, gradient, group)
        if (fresh := self.state[weight].get(_FRESH)) is not None:
            beta2 = group["betas"][1]
            fresh.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)

    def sums(self, weight: Tensor, group: Mapping[str, Any], part: slice | EllipsisType = ...) -> Tensor:
        """Return Lamb's sums, or once the variance stands still the sum of sqrt(v / f) and the number of elements in it."""
        state = self.state[weight]
        if _FRESH not in state:
            return super().sums(weight, group, part)
        fresh = constants(group, state["step"].item()).second
        ratios = (state["exp_avg_sq"][part] * self.constants(group, state).second).div_(state[_FRESH][part] * fresh).sqrt_()
        ratios = ratios[ratios < inf].double()  # what never had a gradient has no ratio
        return torch.stack([ratios.sum(), torch.tensor(float(ratios.numel()), dtype=torch.float64, device=weight.device)])

    def direction(self, weight: Tensor, group: Mapping[str, Any], part: slice | EllipsisType = ...,
                  gradient: Tensor | None = None) -> Tensor:
        state, beta1 = self.state[weight], group["betas"][0]
        update = super().direction(weight, group, part)
        if _FRESH not in state or gradient is None or not beta1 or not group["look_ahead"]:
            return update
        c, again = self.constants(group, state), group["look_ahead"] * (1 - beta1) / beta1
        below = (state["exp_avg_sq"][part] * c.second).add_(c.inside).sqrt_().add_(c.outside)
        return update.add_((gradient[part] - state["exp_avg"][part]).mul_(c.first * again).div_(below))

    def coefficient(self, group: Mapping[str, Any], state: dict[str, Any], weight: float, update: float) -> float:
        """Return what the update of a parameter is multiplied by, by what `sums` gave of all of it."""
        if _FRESH not in state:
            found, beta = super().coefficient(group, state, weight, update), group["coeff_beta"]
            state[_AVERAGE] = beta * state[_AVERAGE] + (1 - beta) * found if state.get(_AVERAGE) else found
            return found
        ratio, before, most = weight / update if update else 1.0, state[_FACTOR], group["factor_threshold"]
        ratio = min(max(ratio, group["factor_min"]), group["factor_max"])
        state[_FACTOR] = min(max(ratio, (1 - most) * before), (1 + most) * before)
        return (state[_AVERAGE] or 1.0) * state[_FACTOR]

    def in_native_sweeps(self, group: Mapping[str, Any]) -> bool:
        return self.measures(group, next_time(group))
