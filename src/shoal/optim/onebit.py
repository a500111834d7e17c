"""Adam between gradients that come as signs in part, one addend of each element apart, which is exact.

    m = beta1 m + (1 - beta1) g                                             g is the sum of N addends, of which a is exact
    v = beta2 v + (1 - beta2) (N a^2 + (1 - 1/N) m^2)                       (1 - beta2) g^2 where all addends are exact
    w = w - lr (m' / (sqrt(max(v', floor)) + eps) + weight_decay w)         m' = m + again (g - m), v' bias-corrected

A step by signs is linear in the gradient but for v, so that what one step's signs do not say can be said by the next. v
takes squares, which cannot be made up for. But the square of a sum of N addends of mean mu/N and variance s/N is mu^2 + s in
the mean, and that of one of them (mu/N)^2 + s/N: N times that, and (1 - 1/N) mu^2, with m for mu, is what was wanted. So the
variance goes on, where 1-bit Adam (Tang et al. 2021, arXiv 2102.02888) freezes it, and 0/1 Adam (Lu et al. 2022, arXiv
2202.06009) takes exact gradients for it every now and then. There every rank compresses its momentum; here its gradient, and
the owner of a slice alone keeps the momentum of it, which is what lets state be sharded: docs/compression.md.

Signs have one magnitude for a block of elements, and an element whose variance is far below its block's would be stepped far
too far by it: v counts as at least `variance_floor` times the mean of its block.

Weights that follow their masters by signs are about a step behind them. So the masters go ahead of where Adam would be by
`look_ahead` of its updates u: y = x + look_ahead u is stepped instead of x, by (1 + look_ahead) u - look_ahead u', where u'
is the update before. As the momentum is m = beta1 m' + (1 - beta1) g, that is Adam's step by m + again (g - m), with
again = look_ahead (1 - beta1) / beta1: for 1, the momentum of Nesterov as Adam has it (Dozat 2016).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shoal.errors import ConfigError
from shoal.optim.compressing import Compressing, time_of

__all__ = ["BLOCK", "OneBitAdam", "SignedAdam", "ZeroOneAdam", "bounded", "check_count"]

Params = Iterable[Tensor] | Iterable[dict[str, Any]]
BLOCK = 1024
"""Elements whose variance has a common lower bound."""


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
    """How far the momentum takes the gradient once more."""
    floor: float
    """What fraction of its block's mean a variance counts as at least."""


class SignedAdam(Compressing):
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
            raise ConfigError(f"{name}: got a group with exp_avg_mask, which is not supported: leave it out; what signs say "
                              f"of an element that never has a gradient adds up to nothing anyway")

    def begin(self, group: Mapping[str, Any], state: dict[str, Any], moment: Callable[[str], Tensor], *,
              exact: bool) -> Terms:
        """Count a step of one tensor's `state`, and return its terms. Before the first one `moment` gives zeros by name.

        A gradient that came `exact` holds what signs have left before, unless the step is a measured one: the variance
        passes it over.
        """
        if "exp_avg" not in state:
            state.update(step=torch.zeros(()), taken=torch.zeros(()), exp_avg=moment("exp_avg"),
                         exp_avg_sq=moment("exp_avg_sq"))
        state["step"] += 1
        time, (beta1, beta2) = time_of(group, state), group["betas"]
        compressed, takes = time > self.warm_up(group), not exact or self.measures(group, time)
        state["taken"] += takes
        count, corrected = int(state["taken"].item()), group["bias_correction"]
        return Terms(beta2=beta2 if takes else 1.0, first=1 - beta1 ** int(state["step"].item()) if corrected else 1.0,
                     second=1 - beta2**count if corrected and count else 1.0,
                     again=group["look_ahead"] * (1 - beta1) / beta1 if compressed and beta1 else 0.0,
                     floor=group["variance_floor"] if compressed else 0.0)

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
                    self.take(weight, weight.grad, group, addend=weight.grad, addends=1)
        return loss

    @torch.no_grad()
    def take(self, weight: Tensor, gradient: Tensor, group: Mapping[str, Any], *, addend: Tensor | None,
             addends: int) -> None:
        """Step `weight`, a parameter or a slice, by a `gradient` of so many `addends`, of which `addend` is exact.

        It is the gradient itself where there is one; none where all of several are exact.
        """
        state, lr = self.state[weight], float(group["lr"])
        terms = self.begin(group, state, lambda kind: torch.zeros_like(weight), exact=addend is None)
        momentum, variance = state["exp_avg"], state["exp_avg_sq"]
        momentum.lerp_(gradient, 1 - group["betas"][0])
        if terms.beta2 != 1:
            exact, many = (gradient, 1) if addend is None else (addend, addends)
            variance.mul_(terms.beta2).addcmul_(exact, exact, value=(1 - terms.beta2) * many)
            if many > 1:
                variance.addcmul_(momentum, momentum, value=(1 - terms.beta2) * (1 - 1 / many))
        below = bounded(variance, terms.floor).div_(terms.second)
        denominator = below.add_(group["eps"]).sqrt_() if group["eps_inside_sqrt"] else below.sqrt_().add_(group["eps"])
        ahead = momentum.lerp(gradient, terms.again) if terms.again else momentum
        weight.mul_(1 - lr * group["weight_decay"]).addcdiv_(ahead, denominator, value=-lr / terms.first)


def bounded(variance: Tensor, floor: float) -> Tensor:
    """Return `variance`, of any shape, each element at least `floor` times the mean of its block."""
    copy = torch.clone(variance, memory_format=torch.contiguous_format)
    flat, whole = copy.view(-1), copy.numel() // BLOCK * BLOCK
    for blocks in (flat[:whole].view(-1, BLOCK), flat[whole:].view(1, -1)):
        if floor and blocks.numel():
            torch.maximum(blocks, blocks.mean(1, keepdim=True) * floor, out=blocks)
    return copy


class OneBitAdam(SignedAdam):
    """Step parameters by 1-bit Adam: `freeze_step` steps are Adam's; 15 to 25 % of training is what the paper warms up for.
    Raises `ConfigError` for values out of range.
    """

    def __init__(self, params: Params, lr: float | Tensor = 1e-3, freeze_step: int = 100_000, bias_correction: bool = True,
                 betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8, eps_inside_sqrt: bool = False,
                 weight_decay: float = 0.0, *, variance_floor: float = 0.01, look_ahead: float = 1.0) -> None:
        check_count("OneBitAdam", "freeze_step", freeze_step)
        super().__init__(params, {"lr": lr, "freeze_step": freeze_step, "bias_correction": bias_correction, "betas": betas,
                                  "eps": eps, "eps_inside_sqrt": eps_inside_sqrt, "weight_decay": weight_decay,
                                  "variance_floor": variance_floor, "look_ahead": look_ahead})

    def warm_up(self, group: Mapping[str, Any]) -> int:
        return group["freeze_step"]


class ZeroOneAdam(SignedAdam):
    """Step parameters by 0/1 Adam: the first `var_update_scaler` steps are measured, then as many at every second step, as
    many at every fourth, and so on until `var_freeze_step`. Raises `ConfigError` for values out of range.
    """

    def __init__(self, params: Params, lr: float | Tensor = 1e-3, var_freeze_step: int = 100_000,
                 var_update_scaler: int = 16, bias_correction: bool = True, betas: tuple[float, float] = (0.9, 0.999),
                 eps: float = 1e-8, eps_inside_sqrt: bool = False, weight_decay: float = 0.0, *,
                 variance_floor: float = 0.01, look_ahead: float = 1.0) -> None:
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
        doubled = (before // many + 1).bit_length() - 1  # the binary logarithm, rounded down
        return (before - many * (2**doubled - 1)) % 2**doubled == 0


def check_count(name: str, key: str, value: object) -> None:
    """Raise `ConfigError` unless `value` of the option `key` is a whole number above 0."""
    if isinstance(value, bool) or not isinstance(value, int | float) or value < 1 or value != int(value):
        raise ConfigError(f"{name}: {key}: got {value!r}; give a whole number, 1 or more")
