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
too far by it: v counts as at least `variance_floor` times the mean of its block. And where v is nothing yet, as the first
gradient of an element comes at a step that v passes over, the square of that gradient is v', as at Adam's first step.

Weights that follow their masters by signs are about a step behind them. So the masters go ahead of where Adam would be by
`look_ahead` of its updates u: y = x + look_ahead u is stepped instead of x, by (1 + look_ahead) u - look_ahead u', where u'
is the update before. As the momentum is m = beta1 m' + (1 - beta1) g, that is Adam's step by m + again (g - m), with
again = look_ahead (1 - beta1) / beta1: for 1, the momentum of Nesterov as Adam has it (Dozat 2016).

Where the gradients of k steps travel together, the owner takes these steps at once, each by their mean G: m goes to
beta1^k m + (1 - beta1^k) G, and the sum of the k momenta is c m + (k - c) G for the m before, c = beta1 (1 - beta1^k) / (1 -
beta1). All gradients were taken where the first was, so the masters go ahead by (k - 1) / 2 updates more, to where the
middle of the next k steps will be.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shoal.errors import ConfigError
from shoal.optim.compressed import CompressedOptimizer, next_time, time_of
from shoal.optim.masks import kept_of

__all__ = ["BLOCK", "CompressedAdam", "OneBitAdam", "ZeroOneAdam", "bounded", "check_group"]

Params = Iterable[Tensor] | Iterable[dict[str, Any]]
_WAITING, _TOGETHER, _LARGEST = "waiting_steps", "joined_steps", "largest_lr"
"""Of a group: the gradients that wait to travel, how many are to travel together, the largest learning rate so far."""
_FORGOTTEN = 1e-3
"""What must be left of a momentum after the steps that are taken at once."""
BLOCK = 1024
"""Elements whose variance has a common lower bound."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """What is the same for all elements of a tensor in one step."""

    beta1: float
    """What is left of the momentum."""
    beta2: float
    """1 where the variance stands still."""
    into: float
    """How much of a square the variance takes."""
    fresh: float
    """As what part of its gradient's square a variance that is nothing yet begins."""
    first: float
    """The bias correction of the momentum."""
    second: float
    """The bias correction of the variance."""
    again: float
    """How far the momentum takes the gradient once more."""
    floor: float
    """What fraction of its block's mean a variance counts as at least."""


class CompressedAdam(CompressedOptimizer):
    """What 1-bit Adam and 0/1 Adam have in common. By itself, without an engine, nothing travels.

    Raises `ConfigError` for values out of range.
    """

    def __init__(self, params: Params, defaults: dict[str, Any], counts: Sequence[str]) -> None:
        """`counts` are the options that are whole numbers above 0."""
        check_group(type(self).__name__, defaults, counts)
        super().__init__(params, defaults)
        for group in self.param_groups:
            check_group(type(self).__name__, group, counts)

    def begin(self, group: Mapping[str, Any], state: dict[str, Any], moment: Callable[[str], Tensor], *, exact: bool,
              steps: int = 1) -> Terms:
        """Count `steps` at once of one tensor's `state`, and return their terms. Before the first `moment` gives zeros by
        name.

        A gradient that came `exact` holds what signs have left before, unless the step is a measured one: the variance
        passes it over.
        """
        if "exp_avg" not in state:
            state.update(step=torch.zeros(()), taken=torch.zeros(()), exp_avg=moment("exp_avg"),
                         exp_avg_sq=moment("exp_avg_sq"))
        state["step"] += steps
        time, (beta1, beta2) = time_of(group, state), group["betas"]
        compressed = time > self.warm_up(group)
        takes = steps == 1 and (not exact or self.measures(group, time))  # the square of a mean is not that of a gradient
        takes = takes or not state["taken"].item()  # there is nothing else, and nothing that signs have left
        state["taken"] += takes
        count, corrected = int(state["taken"].item()), group["bias_correction"]
        second = 1 - beta2**count if corrected else 1.0
        return Terms(beta1=beta1**steps, beta2=beta2 if takes else 1.0, into=(1 - beta2) * steps if takes else 0.0,
                     fresh=0.0 if takes else second * steps,
                     first=1 - beta1 ** int(state["step"].item()) if corrected else 1.0, second=second,
                     again=_again(beta1, group["look_ahead"], steps) if compressed and beta1 else 0.0,
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
                    gradient = kept_of(self, weight, group)
                    self.take(weight, gradient, group, addend=gradient, addends=1)
        return loss

    @torch.no_grad()
    def take(self, weight: Tensor, gradient: Tensor, group: Mapping[str, Any], *, addend: Tensor | None,
             addends: int, steps: int = 1) -> None:
        """Step `weight`, a parameter or a slice, by a `gradient` of so many `addends`, of which `addend` is exact: `steps`
        times at once.

        It is the gradient itself where there is one; none where all of several are exact.
        """
        state, lr = self.state[weight], steps * float(group["lr"])
        terms = self.begin(group, state, lambda kind: torch.zeros_like(weight), exact=addend is None, steps=steps)
        momentum, variance = state["exp_avg"], state["exp_avg_sq"]
        momentum.lerp_(gradient, 1 - terms.beta1)
        if terms.fresh:
            variance.copy_(torch.where(variance == 0, gradient.square() * terms.fresh, variance))
        else:
            exact, many = (gradient, 1) if addend is None else (addend, addends)
            variance.mul_(terms.beta2).addcmul_(exact, exact, value=terms.into * many)
            if many > 1:
                variance.addcmul_(momentum, momentum, value=terms.into * (1 - 1 / many))
        below = bounded(variance, terms.floor).div_(terms.second)
        denominator = below.add_(group["eps"]).sqrt_() if group["eps_inside_sqrt"] else below.sqrt_().add_(group["eps"])
        ahead = momentum.lerp(gradient, terms.again) if terms.again else momentum
        weight.mul_(1 - lr * group["weight_decay"]).addcdiv_(ahead, denominator, value=-lr / terms.first)


def _again(beta1: float, look_ahead: float, steps: int) -> float:
    """Return how far the momentum takes the mean gradient of so many steps once more, beta1 being above 0."""
    left = beta1**steps
    sum_of_past = beta1 * (1 - left) / (1 - beta1)
    ahead = (look_ahead + (steps - 1) / 2 if look_ahead else 0.0) * (1 - left)
    return 1 - (sum_of_past - ahead) / (steps * left)


def bounded(variance: Tensor, floor: float) -> Tensor:
    """Return `variance`, of any shape, each element at least `floor` times the mean of its block."""
    copy = torch.clone(variance, memory_format=torch.contiguous_format)
    flat, whole = copy.view(-1), copy.numel() // BLOCK * BLOCK
    for blocks in (flat[:whole].view(-1, BLOCK), flat[whole:].view(1, -1)):
        if floor and blocks.numel():
            torch.maximum(blocks, blocks.mean(1, keepdim=True) * floor, out=blocks)
    return copy


class OneBitAdam(CompressedAdam):
    """Step parameters by 1-bit Adam: `freeze_step` steps are Adam's; 15 to 25 % of training is what the paper warms up for.
    Raises `ConfigError` for values out of range.
    """

    def __init__(self, params: Params, lr: float | Tensor = 1e-3, freeze_step: int = 100_000, bias_correction: bool = True,
                 betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8, eps_inside_sqrt: bool = False,
                 weight_decay: float = 0.0, *, variance_floor: float = 0.01, look_ahead: float = 1.0) -> None:
        super().__init__(params, {"lr": lr, "freeze_step": freeze_step, "bias_correction": bias_correction, "betas": betas,
                                  "eps": eps, "eps_inside_sqrt": eps_inside_sqrt, "weight_decay": weight_decay,
                                  "variance_floor": variance_floor, "look_ahead": look_ahead}, ("freeze_step",))

    def warm_up(self, group: Mapping[str, Any]) -> int:
        return group["freeze_step"]


class ZeroOneAdam(CompressedAdam):
    """Step parameters by 0/1 Adam: the first `var_update_scaler` steps are measured, then as many at every second step, as
    many at every fourth, and so on until `var_freeze_step`. From then on the gradients of 1 step travel for
    `local_step_scaler` steps, then those of 2 together for as many, of 4, and so on up to `local_step_clipper`, but never of
    so many that they go farther than one step at the largest learning rate did; the steps between are still. Raises
    `ConfigError` for values out of range.
    """

    def __init__(self, params: Params, lr: float | Tensor = 1e-3, var_freeze_step: int = 100_000,
                 var_update_scaler: int = 16, local_step_scaler: int = 32_678, local_step_clipper: int = 16,
                 bias_correction: bool = True, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8,
                 eps_inside_sqrt: bool = False, weight_decay: float = 0.0, *, variance_floor: float = 0.01,
                 look_ahead: float = 1.0) -> None:
        counts = {"var_freeze_step": var_freeze_step, "var_update_scaler": var_update_scaler,
                  "local_step_scaler": local_step_scaler, "local_step_clipper": local_step_clipper}
        super().__init__(params, {"lr": lr, **counts, "bias_correction": bias_correction, "betas": betas, "eps": eps,
                                  "eps_inside_sqrt": eps_inside_sqrt, "weight_decay": weight_decay,
                                  "variance_floor": variance_floor, "look_ahead": look_ahead}, tuple(counts))
        for group in self.param_groups:
            self._check_still(group)

    def _check_still(self, group: Mapping[str, Any]) -> None:
        """Raise `ConfigError` where still steps would be of some groups alone, or outlast the momentum."""
        first, beta1 = self.param_groups[0], group["betas"][0]
        for key in ("var_freeze_step", "local_step_scaler", "local_step_clipper"):
            if group[key] != first[key]:
                raise ConfigError(f"ZeroOneAdam: {key}: got {first[key]} and {group[key]} in two groups; give all the same, "
                                  f"for a step travels or it does not")
        if beta1 and beta1 ** group["local_step_clipper"] < _FORGOTTEN:
            most = int(math.log(_FORGOTTEN, beta1))
            raise ConfigError(f"ZeroOneAdam: local_step_clipper: got {group['local_step_clipper']}; a momentum of beta1 "
                              f"{beta1} is forgotten in so many steps: give {most} at most")

    def joined(self, group: Mapping[str, Any]) -> int:
        """Return of how many steps the gradient is that travels at the next step, 0 if that is still.

        (arXiv 2202.06009, algorithm 1, its steps without communication. There a rank steps by its own momentum meanwhile.)
        """
        number = self.waiting(group) + 1
        return number if number >= group.get(_TOGETHER, 1) else 0

    def waiting(self, group: Mapping[str, Any]) -> int:
        return group.get(_WAITING, 0)

    def reach(self, group: Mapping[str, Any]) -> int:
        """Return of how many steps at the present learning rate one at the largest was."""
        rate = float(group["lr"])
        return max(1, int(group.get(_LARGEST, rate) / rate)) if rate else sys.maxsize

    def count_step(self) -> None:
        """Count a step that was applied, and say how many are to travel together next: the rate may have risen since."""
        still = not all(map(self.due, self.param_groups))
        super().count_step()
        first = self.param_groups[0]
        together = min(first.get(_TOGETHER, 1) if still else self._doubled(first), *map(self.reach, self.param_groups))
        for group in self.param_groups:
            group[_WAITING] = group.get(_WAITING, 0) + 1 if still else 0
            group[_TOGETHER] = together
            group[_LARGEST] = max(group.get(_LARGEST, 0.0), float(group["lr"]))

    def drop(self) -> None:
        for group in self.param_groups:
            group[_WAITING] = 0

    def _doubled(self, group: Mapping[str, Any]) -> int:
        """Return of how many steps, from the next on, the gradients would travel together at the least rate."""
        since = next_time(group) - 1 - group["var_freeze_step"]
        doubled = 2 ** min(since // group["local_step_scaler"], 64) if since >= 0 else 1
        return min(doubled, group["local_step_clipper"])

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


def check_group(name: str, options: Mapping[str, Any], counts: Sequence[str]) -> None:
    """Raise `ConfigError` unless the `options` of the optimizer `name` are in range; `counts` are whole numbers above 0."""
    values = {key: options[key] for key in ("lr", "weight_decay", "eps", "variance_floor", "look_ahead")}
    said = ", ".join(f"{key}={value!r}" for key, value in values.items())
    if not all(isinstance(value, int | float | Tensor) for value in values.values()):
        raise ConfigError(f"{name}: got {said}; give numbers")
    if not (all(value >= 0 for value in values.values()) and values["variance_floor"] <= 1):
        raise ConfigError(f"{name}: got {said}; none may be negative, and variance_floor is at most 1")
    beta1, beta2 = options["betas"]
    if not (0 <= beta1 < 1 and 0 <= beta2 < 1):
        raise ConfigError(f"{name}: got betas={options['betas']}; both must be at least 0 and below 1")
    for key in counts:
        value = options[key]
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not (number and 1 <= value < math.inf and value == int(value)):
            raise ConfigError(f"{name}: {key}: got {value!r}; give a whole number, 1 or more")
