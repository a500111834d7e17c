"""Adam whose variance takes some gradients only, so that the others, and the weights, can travel as signs.

    momentum = beta1 * momentum + (1 - beta1) * gradient
    variance = beta2 * variance + (1 - beta2) * gradient^2                             at measured steps (variance.py)
    ahead    = momentum + again * (gradient - momentum)                                 again = 0 during the warm-up
    weight   = weight - lr * (ahead / (sqrt(variance) + eps) + weight_decay * weight)

both moments divided by their bias corrections. While the variance stands still the step is linear in the gradient, so that
what one step's signs do not say can be said by the next. 1-bit Adam (Tang et al. 2021, arXiv 2102.02888) measures during a
warm-up; 0/1 Adam (Lu et al. 2022, arXiv 2202.06009) ever more rarely. There every rank compresses its momentum; here its
gradient, and the owner of a slice alone keeps the momentum of it, which is what lets state be sharded: docs/compression.md.

Weights that follow their masters by signs are about a step behind them. So the masters go ahead of where Adam would be by
`look_ahead` of its updates u: y = x + look_ahead u is stepped instead of x, by (1 + look_ahead) u - look_ahead u', where u'
is the update before. As the momentum is m = beta1 m' + (1 - beta1) g, that is Adam's step by `ahead`, with
again = look_ahead (1 - beta1) / beta1: for 1, the momentum of Nesterov as Adam has it (Dozat 2016).
"""

# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false
# (torch documents its foreach operations under names that begin with an underscore.)

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from math import log2
from typing import Any

import torch
from torch import Tensor

from shoal.errors import ConfigError
from shoal.optim.compressing import Compressing, time_of
from shoal.optim.variance import follow, started

__all__ = ["MeasuredAdam", "OneBitAdam", "ZeroOneAdam"]

Params = Iterable[Tensor] | Iterable[dict[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """What is the same for all elements of a tensor in one step."""

    beta2: float
    """1 where the variance stands still."""
    first: float
    """The bias correction of the momentum."""
    second: float
    """The bias correction of the variance."""
    again: float


class MeasuredAdam(Compressing):
    """What 1-bit Adam and 0/1 Adam have in common. By itself, without an engine, nothing travels.

    Raises `ConfigError` for values out of range.
    """

    def __init__(self, params: Params, defaults: dict[str, Any]) -> None:
        name, (beta1, beta2) = type(self).__name__, defaults["betas"]
        values = {key: defaults[key] for key in ("lr", "weight_decay", "eps", "variance_floor", "look_ahead")}
        if not (all(value >= 0 for value in values.values()) and values["variance_floor"] <= 1):
            raise ConfigError(f"{name}: got {', '.join(f'{key}={value}' for key, value in values.items())}; none may be "
                              f"negative, and variance_floor is at most 1")
        if not (0 <= beta1 < 1 and 0 <= beta2 < 1):
            raise ConfigError(f"{name}: got betas={defaults['betas']}; both must be at least 0 and below 1")
        super().__init__(params, defaults)
        if any("exp_avg_mask" in group for group in self.param_groups):
            raise ConfigError(f"{name}: got a group with exp_avg_mask, which is not supported: leave it out; elements that "
                              f"had no gradient while the variance was measured take no step anyway")

    def begin(self, group: Mapping[str, Any], state: dict[str, Any],
              moment: Callable[[str], Tensor]) -> Terms:
        """Count a step of one tensor's `state`, and return its terms. Before the first one `moment` gives zeros by name."""
        if "exp_avg" not in state:
            state.update(step=torch.zeros(()), exp_avg=moment("exp_avg"), exp_avg_sq=moment("exp_avg_sq"))
            started(state)
        state["step"] += 1
        (beta1, beta2), corrected = group["betas"], group["bias_correction"]
        time = time_of(group, state)
        measured = self.measures(group, time)
        count = follow(state, measured=measured, floor=group["variance_floor"])
        first = 1 - beta1 ** int(state["step"].item()) if corrected else 1.0
        second = 1 - beta2**count if corrected and count else 1.0
        ahead = group["look_ahead"] if beta1 and time > self.warm_up(group) else 0.0
        return Terms(beta2=beta2 if measured else 1.0, first=first, second=second,
                     again=ahead * (1 - beta1) / (beta1 or 1.0))

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
        state, lr = self.state[weight], float(group["lr"])
        terms = self.begin(group, state, lambda kind: torch.zeros_like(weight))
        momentum, variance = state["exp_avg"], state["exp_avg_sq"]
        momentum.lerp_(gradient, 1 - group["betas"][0])
        if terms.beta2 != 1:
            variance.mul_(terms.beta2).addcmul_(gradient, gradient, value=1 - terms.beta2)
        if group["eps_inside_sqrt"]:
            denominator = variance.div(terms.second).add_(group["eps"]).sqrt_()
        else:
            denominator = variance.div(terms.second).sqrt_().add_(group["eps"])
        ahead = momentum.lerp(gradient, terms.again) if terms.again else momentum
        weight.mul_(1 - lr * group["weight_decay"]).addcdiv_(ahead, denominator, value=-lr / terms.first)


class OneBitAdam(MeasuredAdam):
    """Step parameters by 1-bit Adam: `freeze_step` steps are Adam's, and measured; 15 to 25 % of training is what the paper
    warms up for. Raises `ConfigError` for values out of range.
    """

    def __init__(self, params: Params, lr: float | Tensor = 1e-3, freeze_step: int = 100_000, bias_correction: bool = True,
                 betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8, eps_inside_sqrt: bool = False,
                 weight_decay: float = 0.0, *, variance_floor: float = 0.1, look_ahead: float = 1.0) -> None:
        check_count("OneBitAdam", "freeze_step", freeze_step)
        super().__init__(params, {"lr": lr, "freeze_step": freeze_step, "bias_correction": bias_correction, "betas": betas,
                                  "eps": eps, "eps_inside_sqrt": eps_inside_sqrt, "weight_decay": weight_decay,
                                  "variance_floor": variance_floor, "look_ahead": look_ahead})

    def warm_up(self, group: Mapping[str, Any]) -> int:
        return group["freeze_step"]


class ZeroOneAdam(MeasuredAdam):
    """Step parameters by 0/1 Adam: the first `var_update_scaler` steps are measured, then as many at every second step, as
    many at every fourth, and so on until `var_freeze_step`. Raises `ConfigError` for values out of range.
    """

    def __init__(self, params: Params, lr: float | Tensor = 1e-3, var_freeze_step: int = 100_000,
                 var_update_scaler: int = 16, bias_correction: bool = True, betas: tuple[float, float] = (0.9, 0.999),
                 eps: float = 1e-8, eps_inside_sqrt: bool = False, weight_decay: float = 0.0, *,
                 variance_floor: float = 0.1, look_ahead: float = 1.0) -> None:
        check_count("ZeroOneAdam", "var_freeze_step", var_freeze_step)
        check_count("ZeroOneAdam", "var_update_scaler", var_update_scaler)
        super().__init__(params, {"lr": lr, "var_freeze_step": var_freeze_step, "var_update_scaler": var_update_scaler,
                                  "bias_correction": bias_correction, "betas": betas, "eps": eps,
                                  "eps_inside_sqrt": eps_inside_sqrt, "weight_decay": weight_decay,
                                  "variance_floor": variance_floor, "look_ahead": look_ahead})

    def warm_up(self, group: Mapping[str, Any]) -> int:
        return min(group["var_update_scaler"], group["var_freeze_step"])

    def measures(self, group: Mapping[str, Any], time: int) -> bool:
        """Whether `time` begins one of the intervals, of which there are `var_update_scaler` of each length 1, 2, 4, ...

        (arXiv 2202.06009, section 6: the policy of the variance.)
        """
        if time > group["var_freeze_step"]:
            return False
        many, before = group["var_update_scaler"], time - 1
        doubled = int(log2(before / many + 1))
        return (before - many * (2**doubled - 1)) % 2**doubled == 0


def check_count(name: str, key: str, value: object) -> None:
    """Raise `ConfigError` unless `value` of the option `key` is a whole number above 0."""
    if isinstance(value, bool) or not isinstance(value, int | float) or value < 1 or value != int(value):
        raise ConfigError(f"{name}: {key}: got {value!r}; give a whole number, 1 or more")
