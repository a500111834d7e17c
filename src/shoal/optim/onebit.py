"""1-bit Adam and 0/1 Adam: Adam on 1-bit compressed gradients, with one uncompressed addend per element.

    m = beta1 m + (1 - beta1) g                                             g is the sum of N addends; a is uncompressed
    v = beta2 v + (1 - beta2) (N a^2 + (1 - 1/N) m^2)                       (1 - beta2) g^2 if all addends are
    w = w - lr (m' / (sqrt(max(v', floor)) + eps) + weight_decay w)         m' = m + l (g - m), v' bias-corrected

*Variance.* Except for v, a step is linear in the gradient, so the next step can correct this one's compression error.
Squares cannot be corrected later. The square of a sum of N addends with mean mu/N and variance s/N each has the expectation
mu^2 + s; the square of one addend has (mu/N)^2 + s/N. N times the latter plus (1 - 1/N) mu^2, with m for mu, estimates the
former. The variance is therefore updated at every step. 1-bit Adam (Tang et al. 2021, arXiv 2102.02888) freezes it, and 0/1
Adam (Lu et al. 2022, arXiv 2202.06009) sends uncompressed gradients for it at intervals. In both papers every rank
compresses its momentum. Here every rank compresses its gradient, and only the owner of a slice keeps its momentum, so state
can be sharded (docs/compression.md).

*Variance floor.* A block of elements has one magnitude for its signs. An element whose variance is far below its block's
mean would take far too long a step, so v is at least `variance_floor` times that mean. Where v is still 0, because the
element's first gradient came at a step that does not update v, the square of that gradient is v', as at Adam's first step.

*Look-ahead.* Weights that receive 1-bit updates are about one step behind their masters. The masters are therefore ahead of
Adam by `look_ahead` updates u: the step of y = x + look_ahead u is (1 + look_ahead) u - look_ahead u', where u' is the
update before. With m = beta1 m' + (1 - beta1) g this is Adam's step by m + l (g - m), l = look_ahead (1 - beta1) / beta1.
For look_ahead = 1 it is Nesterov momentum (Dozat 2016).

*Joint steps.* If the gradients of k steps are sent together, the owner takes k steps at once, each by the mean gradient G:
m becomes beta1^k m + (1 - beta1^k) G, and the sum of the k momenta is c m + (k - c) G for the m before, with
c = beta1 (1 - beta1^k) / (1 - beta1). All k gradients were computed at the same weights, so the masters are ahead by
(k - 1) / 2 more updates: the middle of the next k steps.
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
from shoal.optim.compressed import CompressedOptimizer, next_step_number, step_number
from shoal.optim.masks import masked_gradient

__all__ = ["BLOCK", "CompressedAdam", "OneBitAdam", "ZeroOneAdam", "check_group", "floored_variance"]

Params = Iterable[Tensor] | Iterable[dict[str, Any]]
_UNSENT, _JOINT, _MAX_LR = "waiting_steps", "joined_steps", "largest_lr"
"""Options of a group: the unsent steps, the number of steps to send together, and the largest learning rate so far."""
_NEGLIGIBLE = 1e-3
"""The smallest part of the momentum that must remain after the largest joint step."""
BLOCK = 1024
"""Elements that share one lower bound of the variance."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """The constants of one step, equal for all elements of a tensor."""

    beta1: float
    """Decay of the momentum over all joint steps."""
    beta2: float
    """Decay of the variance; 1 if this step does not update it."""
    square_weight: float
    """Weight of the gradient's square in the variance; 0 if this step does not update it."""
    initial_square_weight: float
    """Weight of the gradient's square in a variance that is still 0, if this step updates no other; else 0."""
    momentum_correction: float
    """Divisor of the bias correction of the momentum."""
    variance_correction: float
    """Divisor of the bias correction of the variance."""
    look_ahead: float
    """l in m + l (g - m), which replaces m in the update; 0 before compression."""
    variance_floor: float
    """Lower bound of the variance as a fraction of its block's mean; 0 before compression."""


class CompressedAdam(CompressedOptimizer):
    """The common part of 1-bit Adam and 0/1 Adam. Without an engine nothing is compressed.

    Raises `ConfigError` for values out of range.
    """

    def __init__(self, params: Params, defaults: dict[str, Any], counts: Sequence[str]) -> None:
        """`counts` names the options that must be positive integers."""
        check_group(type(self).__name__, defaults, counts)
        super().__init__(params, defaults)
        for group in self.param_groups:
            check_group(type(self).__name__, group, counts)

    def begin_step(self, group: Mapping[str, Any], state: dict[str, Any], moment: Callable[[str], Tensor], *, exact: bool,
                   steps: int = 1) -> Terms:
        """Count `steps` joint steps in one tensor's `state` and return their constants.

        Before the first step `moment` allocates zeros by name. An `exact` gradient (all addends uncompressed) contains the
        flushed compression error, so it does not update the variance unless this is a variance step.
        """
        if "exp_avg" not in state:
            state.update(step=torch.zeros((), dtype=torch.float32, device="cpu"),
                         taken=torch.zeros((), dtype=torch.float32, device="cpu"),
                         exp_avg=moment("exp_avg"), exp_avg_sq=moment("exp_avg_sq"))
        state["step"] += steps
        time, (beta1, beta2) = step_number(group, state), group["betas"]
        compressed = time > self.warmup_steps(group)
        # The square of the mean of several gradients is no estimate of a gradient's square
        updates = steps == 1 and (not exact or self.updates_variance(group, time))
        updates = updates or not state["taken"].item()  # the first gradient: no variance yet, and no compression error
        state["taken"] += updates
        count, corrected = int(state["taken"].item()), group["bias_correction"]
        second = 1 - beta2**count if corrected else 1.0
        return Terms(beta1=beta1**steps, beta2=beta2 if updates else 1.0,
                     square_weight=(1 - beta2) * steps if updates else 0.0,
                     initial_square_weight=0.0 if updates else second * steps,
                     momentum_correction=1 - beta1 ** int(state["step"].item()) if corrected else 1.0,
                     variance_correction=second,
                     look_ahead=_look_ahead_weight(beta1, group["look_ahead"], steps) if compressed and beta1 else 0.0,
                     variance_floor=group["variance_floor"] if compressed else 0.0)

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
                    gradient = masked_gradient(self, weight, group)
                    self.step_tensor(weight, gradient, group, addend=gradient, addends=1)
        return loss

    @torch.no_grad()
    def step_tensor(self, weight: Tensor, gradient: Tensor, group: Mapping[str, Any], *, addend: Tensor | None,
                    addends: int, steps: int = 1) -> None:
        """Take `steps` joint steps of `weight`, a parameter or a slice, by a `gradient` that is a sum of `addends` addends.

        `addend` is the uncompressed one: the gradient itself if it is the only one; None if all of several are uncompressed.
        """
        state, lr = self.state[weight], steps * float(group["lr"])
        terms = self.begin_step(group, state, lambda kind: torch.zeros_like(weight), exact=addend is None, steps=steps)
        momentum, variance = state["exp_avg"], state["exp_avg_sq"]
        momentum.lerp_(gradient, 1 - terms.beta1)
        if terms.initial_square_weight:
            variance.copy_(torch.where(variance == 0, gradient.square() * terms.initial_square_weight, variance))
        else:
            exact, count = (gradient, 1) if addend is None else (addend, addends)
            variance.mul_(terms.beta2).addcmul_(exact, exact, value=terms.square_weight * count)
            if count > 1:
                variance.addcmul_(momentum, momentum, value=terms.square_weight * (1 - 1 / count))
        bounded = floored_variance(variance, terms.variance_floor).div_(terms.variance_correction)
        inside = group["eps_inside_sqrt"]
        denominator = bounded.add_(group["eps"]).sqrt_() if inside else bounded.sqrt_().add_(group["eps"])
        ahead = momentum.lerp(gradient, terms.look_ahead) if terms.look_ahead else momentum
        weight.mul_(1 - lr * group["weight_decay"]).addcdiv_(ahead, denominator, value=-lr / terms.momentum_correction)


def _look_ahead_weight(beta1: float, look_ahead: float, steps: int) -> float:
    """Return l in m + l (G - m) for `steps` joint steps by the mean gradient G; beta1 is above 0."""
    decay = beta1**steps
    past_weight = beta1 * (1 - decay) / (1 - beta1)
    ahead = (look_ahead + (steps - 1) / 2 if look_ahead else 0.0) * (1 - decay)
    return 1 - (past_weight - ahead) / (steps * decay)


def floored_variance(variance: Tensor, floor: float) -> Tensor:
    """Return a copy of `variance`, of any shape, in which each element is at least `floor` times its block's mean."""
    copy = torch.clone(variance, memory_format=torch.contiguous_format)
    flat, whole = copy.view(-1), copy.numel() // BLOCK * BLOCK
    for blocks in (flat[:whole].view(-1, BLOCK), flat[whole:].view(1, -1)):
        if floor and blocks.numel():
            torch.maximum(blocks, blocks.mean(1, keepdim=True) * floor, out=blocks)
    return copy


class OneBitAdam(CompressedAdam):
    """Step parameters by 1-bit Adam.

    The first `freeze_step` steps are Adam's; the paper warms up for 15 to 25 % of training. Raises `ConfigError` for values
    out of range.
    """

    def __init__(self, params: Params, lr: float | Tensor = 1e-3, freeze_step: int = 100_000, bias_correction: bool = True,
                 betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8, eps_inside_sqrt: bool = False,
                 weight_decay: float = 0.0, *, variance_floor: float = 0.01, look_ahead: float = 1.0) -> None:
        super().__init__(params, {"lr": lr, "freeze_step": freeze_step, "bias_correction": bias_correction, "betas": betas,
                                  "eps": eps, "eps_inside_sqrt": eps_inside_sqrt, "weight_decay": weight_decay,
                                  "variance_floor": variance_floor, "look_ahead": look_ahead}, ("freeze_step",))

    def warmup_steps(self, group: Mapping[str, Any]) -> int:
        return group["freeze_step"]


class ZeroOneAdam(CompressedAdam):
    """Step parameters by 0/1 Adam.

    The first `var_update_scaler` steps are variance steps, then as many at every second step, as many at every fourth, and
    so on until `var_freeze_step`. From then on every step communicates for `local_step_scaler` steps, then every second one
    for as many, every fourth, and so on up to every `local_step_clipper`-th. A joint step is never longer than one step at
    the largest learning rate so far. Raises `ConfigError` for values out of range.
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
            self._check_skipped_steps(group)

    def _check_skipped_steps(self, group: Mapping[str, Any]) -> None:
        """Raise `ConfigError` if groups would skip different steps, or if a joint step would erase the momentum."""
        first, beta1 = self.param_groups[0], group["betas"][0]
        for key in ("var_freeze_step", "local_step_scaler", "local_step_clipper"):
            if group[key] != first[key]:
                raise ConfigError(f"ZeroOneAdam: {key}: got {first[key]} and {group[key]} in two groups; give all the "
                                  f"same value, since a step communicates for all groups or for none")
        if beta1 and beta1 ** group["local_step_clipper"] < _NEGLIGIBLE:
            most = int(math.log(_NEGLIGIBLE, beta1))
            raise ConfigError(f"ZeroOneAdam: local_step_clipper: got {group['local_step_clipper']}; with beta1 "
                              f"{beta1} no momentum is left after so many steps: give {most} at most")

    def steps_to_send(self, group: Mapping[str, Any]) -> int:
        """Return the number of steps whose gradients the next step sends; 0 if it skips communication.

        These are the local steps of arXiv 2202.06009, Algorithm 1. (There each rank steps by its own momentum.)
        """
        steps = self.unsent_steps(group) + 1
        return steps if steps >= group.get(_JOINT, 1) else 0

    def unsent_steps(self, group: Mapping[str, Any]) -> int:
        return group.get(_UNSENT, 0)

    def max_joint_steps(self, group: Mapping[str, Any]) -> int:
        """Return the number of steps that, at the present learning rate, are as long as one at the largest so far."""
        rate = float(group["lr"])
        return max(1, int(group.get(_MAX_LR, rate) / rate)) if rate else sys.maxsize

    def count_step(self) -> None:
        """Count an applied step, and set how many steps the next communication joins, by the present learning rate."""
        skipped = not all(map(self.steps_in_gradient, self.param_groups))
        super().count_step()
        first = self.param_groups[0]
        joint = min(first.get(_JOINT, 1) if skipped else self._scheduled_joint_steps(first),
                    *map(self.max_joint_steps, self.param_groups))
        for group in self.param_groups:
            group[_UNSENT] = group.get(_UNSENT, 0) + 1 if skipped else 0
            group[_JOINT] = joint
            group[_MAX_LR] = max(group.get(_MAX_LR, 0.0), float(group["lr"]))

    def drop_unsent(self) -> None:
        for group in self.param_groups:
            group[_UNSENT] = 0

    def _scheduled_joint_steps(self, group: Mapping[str, Any]) -> int:
        """Return the number of steps to join from the next step on, were it not for `max_joint_steps`."""
        since = next_step_number(group) - 1 - group["var_freeze_step"]
        doubled = 2 ** min(since // group["local_step_scaler"], 64) if since >= 0 else 1
        return min(doubled, group["local_step_clipper"])

    def warmup_steps(self, group: Mapping[str, Any]) -> int:
        return min(group["var_update_scaler"], group["var_freeze_step"])

    def updates_variance(self, group: Mapping[str, Any], time: int) -> bool:
        """Whether `time` begins an interval. There are `var_update_scaler` intervals of each length 1, 2, 4, ...

        This is the variance update policy of arXiv 2202.06009, section 6.
        """
        if time > group["var_freeze_step"]:
            return False
        count, before = group["var_update_scaler"], time - 1
        doubled = (before // count + 1).bit_length() - 1  # the binary logarithm, rounded down
        return (before - count * (2**doubled - 1)) % 2**doubled == 0


def check_group(name: str, options: Mapping[str, Any], counts: Sequence[str]) -> None:
    """Raise `ConfigError` unless the `options` of the optimizer `name` are in range; `counts` names positive integers."""
    values = {key: options[key] for key in ("lr", "weight_decay", "eps", "variance_floor", "look_ahead")}
    listed = ", ".join(f"{key}={value!r}" for key, value in values.items())
    if not all(isinstance(value, int | float | Tensor) for value in values.values()):
        raise ConfigError(f"{name}: got {listed}; give numbers")
    if not (all(value >= 0 for value in values.values()) and values["variance_floor"] <= 1):
        raise ConfigError(f"{name}: got {listed}; none may be negative, and variance_floor is at most 1")
    beta1, beta2 = options["betas"]
    if not (0 <= beta1 < 1 and 0 <= beta2 < 1):
        raise ConfigError(f"{name}: got betas={options['betas']}; both must be at least 0 and below 1")
    for key in counts:
        value = options[key]
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not (number and 1 <= value < math.inf and value == int(value)):
            raise ConfigError(f"{name}: {key}: got {value!r}; give a whole number, 1 or more")
