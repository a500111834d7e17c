"""Optimizers by name, for `optimizer.type` of the configuration; users can register their own.

Registered names match in any case. Every elementwise class of `torch.optim` is available under its exact name.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from shoal.device import steps_fused
from shoal.errors import ConfigError
from shoal.log import warn_once
from shoal.optim.adam import BiasedAdam
from shoal.optim.elementwise import WHOLE_TENSOR, check_elementwise
from shoal.optim.lamb import Lamb
from shoal.optim.lion import Lion
from shoal.optim.onebit import OneBitAdam, ZeroOneAdam
from shoal.optim.onebit_lamb import OneBitLamb
from shoal.registry import Registry

__all__ = ["Groups", "check_optimizer_name", "make_optimizer", "register_optimizer"]

Groups = list[Tensor] | list[dict[str, Any]]
F = TypeVar("F", bound=Callable[..., Optimizer])

_LATER = frozenset({"muon", "muadam", "muadamw", "musgd"})
_TORCH: dict[str, Callable[..., Optimizer]] = {
    name: member for name, member in vars(torch.optim).items()
    if inspect.isclass(member) and issubclass(member, Optimizer) and member is not Optimizer
    and member not in WHOLE_TENSOR
}  # fmt: skip
_WHOLE_TENSOR = {member.__name__: member for member in WHOLE_TENSOR if member.__name__.lower() not in _LATER}
_PUBLISHED = frozenset({"adam", "adamw", "lion", "sgd", "adagrad", "lamb", "onebitadam", "onebitlamb", "zerooneadam"})
_native_names: set[str] = set(_PUBLISHED)
"""Names whose optimizers step in native code where supported, in lower case."""
_optimizers: Registry[Optimizer] = Registry("optimizer", library=_TORCH, later=_LATER)


def register_optimizer(name: str, *, native: bool = False) -> Callable[[F], F]:
    """Make an optimizer class, or a function that returns one, known as `name` in `optimizer.type`.

    It is called with the parameters or groups first and `optimizer.params` as keywords. Use it as a decorator or as
    `register_optimizer("mine")(Mine)`. With `native` it steps in native code where its class has some. Raises `UsageError`
    when another one has the name.
    """
    def register(factory: F) -> F:
        if native:
            _native_names.add(name.lower())
        return _optimizers.register(name, factory)

    return register


def make_optimizer(type: str, params: Mapping[str, object] | None,
                   groups: Iterable[Tensor | dict[str, Any]]) -> Optimizer:
    """Build the optimizer called `type` over `groups` (tensors or torch's group dicts) with the keywords `params`.

    Raises `ConfigError` naming what is allowed for an unknown name or keyword or a bad value, `NotSupportedYet` for a
    published name of a later version, `OptimizerError` for a class of `torch.optim` that cannot step slices.
    """
    if type in _WHOLE_TENSOR:
        check_elementwise(_WHOLE_TENSOR[type], {})
    params = {key: value for key, value in (params or {}).items() if key != "max_grad_norm" or value}  # 0 is no clipping
    if "max_grad_norm" in params:
        raise ConfigError("optimizer.params.max_grad_norm: the engine clips, not the optimizer; set gradient_clipping "
                          "at the top of the configuration")
    if type.lower() in _PUBLISHED or type in _TORCH:  # a registered class may use these keywords for something else
        _check_values(params)
    return _optimizers.make(type, params, list(groups))


def check_optimizer_name(type: str) -> None:
    """Raise `ConfigError` for a name that no optimizer is registered under, `NotSupportedYet` for one of a later version."""
    _optimizers.check_name(type)


@register_optimizer("Adam")
def adam(groups: Groups, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8,
         weight_decay: float | None = None, *, amsgrad: bool = False, adam_w_mode: bool = True,
         torch_adam: bool = False, bias_correction: bool = True, fp32_optimizer_states: bool = True,
         set_grad_none: bool = True, maximize: bool = False, foreach: bool | None = None,
         fused: bool | None = None) -> Optimizer:
    """Build torch's AdamW, or Adam with decay in the gradient when `adam_w_mode` is false.

    Without `bias_correction` it is a `BiasedAdam`.

    `weight_decay` defaults to 0, or with `torch_adam` to the default of torch's class. `fused` (one pass over memory) is
    used where torch has it. On CPU, torch's fused kernels round the last, partial vector of a tensor
    differently (seen in torch 2.13): a slice steps bitwise as the whole does if it starts and ends at multiples of 16
    elements, else an element in some thousands differs by one rounding.
    """
    _always_true("fp32_optimizer_states", fp32_optimizer_states)
    _always_true("set_grad_none", set_grad_none)
    if weight_decay is None:
        weight_decay = 0.01 if torch_adam and adam_w_mode else 0.0
    if not bias_correction:
        return BiasedAdam(groups, lr, (betas[0], betas[1]), eps, weight_decay, bias_correction=False, amsgrad=amsgrad,
                          maximize=maximize, foreach=foreach, fused=fused, decoupled_weight_decay=adam_w_mode)
    if fused is None and foreach is None and _fusable(groups):
        fused = True
    build = torch.optim.AdamW if adam_w_mode else torch.optim.Adam
    return build(groups, lr=lr, betas=(betas[0], betas[1]), eps=eps, weight_decay=weight_decay, amsgrad=amsgrad,
                 maximize=maximize, foreach=foreach, fused=fused)


@register_optimizer("AdamW")
@functools.wraps(adam, assigned=())
def adamw(groups: Groups, **keywords: Any) -> Optimizer:
    """Build `adam` with decoupled weight decay; `adam_w_mode` has no effect."""
    keywords["adam_w_mode"] = True
    return adam(groups, **keywords)


@register_optimizer("Lion")
def lion(groups: Groups, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.999), weight_decay: float = 0.0, *,
         fp32_optimizer_states: bool = True, set_grad_none: bool = True) -> Optimizer:
    """Build Lion with the published defaults."""
    _always_true("fp32_optimizer_states", fp32_optimizer_states)
    _always_true("set_grad_none", set_grad_none)
    return Lion(groups, lr=lr, betas=(betas[0], betas[1]), weight_decay=weight_decay)


register_optimizer("Lamb")(Lamb)


@register_optimizer("OneBitAdam")
def one_bit_adam(groups: Groups, lr: float = 1e-3, freeze_step: int = 100_000, bias_correction: bool = True,
                 betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8, eps_inside_sqrt: bool = False,
                 weight_decay: float = 0.0, *, variance_floor: float = 0.01, look_ahead: float = 1.0,
                 amsgrad: bool = False, cuda_aware: bool = False, comm_backend_name: str = "nccl") -> Optimizer:
    """Build 1-bit Adam with the published defaults. `cuda_aware` and `comm_backend_name` have no effect, since one
    transport serves every backend; `amsgrad` is not defined for it.
    """
    _transport(amsgrad, cuda_aware, comm_backend_name)
    return OneBitAdam(groups, lr, freeze_step, bias_correction, (betas[0], betas[1]), eps, eps_inside_sqrt, weight_decay,
                      variance_floor=variance_floor, look_ahead=look_ahead)


@register_optimizer("ZeroOneAdam")
def zero_one_adam(groups: Groups, lr: float = 1e-3, var_freeze_step: int = 100_000, var_update_scaler: int = 16,
                  local_step_scaler: int = 32_678, local_step_clipper: int = 16, bias_correction: bool = True,
                  betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8, eps_inside_sqrt: bool = False,
                  weight_decay: float = 0.0, *, variance_floor: float = 0.01, look_ahead: float = 1.0,
                  amsgrad: bool = False, cuda_aware: bool = False, comm_backend_name: str = "nccl") -> Optimizer:
    """Build 0/1 Adam with the published defaults."""
    _transport(amsgrad, cuda_aware, comm_backend_name)
    return ZeroOneAdam(groups, lr, var_freeze_step, var_update_scaler, local_step_scaler, local_step_clipper,
                       bias_correction, (betas[0], betas[1]), eps, eps_inside_sqrt, weight_decay,
                       variance_floor=variance_floor, look_ahead=look_ahead)


@register_optimizer("OneBitLamb")
def one_bit_lamb(groups: Groups, lr: float = 1e-3, freeze_step: int = 100_000, bias_correction: bool = True,
                 betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8, eps_inside_sqrt: bool = False,
                 weight_decay: float = 0.0, max_coeff: float = 10.0, min_coeff: float = 0.01, *, coeff_beta: float = 0.9,
                 factor_max: float = 4.0, factor_min: float = 0.5, factor_threshold: float = 0.1,
                 variance_floor: float = 0.01, look_ahead: float = 1.0, amsgrad: bool = False, cuda_aware: bool = False,
                 comm_backend_name: str = "nccl") -> Optimizer:
    """Build 1-bit LAMB with the published defaults."""
    _transport(amsgrad, cuda_aware, comm_backend_name)
    return OneBitLamb(groups, lr, freeze_step, bias_correction, (betas[0], betas[1]), eps, eps_inside_sqrt, weight_decay,
                      max_coeff, min_coeff, coeff_beta=coeff_beta, factor_max=factor_max, factor_min=factor_min,
                      factor_threshold=factor_threshold, variance_floor=variance_floor, look_ahead=look_ahead)


def _transport(amsgrad: bool, cuda_aware: bool, comm_backend_name: str) -> None:
    _always_false("amsgrad", amsgrad)
    if cuda_aware or comm_backend_name != "nccl":
        warn_once("optimizer.params.cuda_aware and comm_backend_name have no effect: compressed tensors are sent "
                  "over the job's own process groups")


# As torch builds them, fused only on request: they step bitwise like a plain torch script.
register_optimizer("SGD")(torch.optim.SGD)
register_optimizer("Adagrad")(torch.optim.Adagrad)


def _check_values(params: Mapping[str, object]) -> None:
    """Raise `ConfigError`, naming the key, for values that are no numbers."""
    for name in ("lr", "eps", "weight_decay", "momentum", "dampening", "lr_decay", "alpha", "max_coeff", "min_coeff"):
        value = params.get(name, 0.0)
        if value not in (None, "auto") and (isinstance(value, bool) or not isinstance(value, int | float | Tensor)):
            raise ConfigError(f"optimizer.params.{name}: got {value!r}; give a number")
    betas = params.get("betas", "auto")
    if betas == "auto":
        return
    numbers = list[object](betas) if isinstance(betas, list | tuple) else []
    if len(numbers) < 2 or not all(isinstance(beta, int | float | Tensor) for beta in numbers):
        raise ConfigError(f"optimizer.params.betas: got {betas!r}; give two numbers, such as [0.9, 0.999]")


def prefers_native(type: str | None, params: Mapping[str, object]) -> bool:
    """Whether the optimizer called `type` uses native code where supported: names registered so, unless `params` select a
    kernel of torch (`torch_adam`, `fused`, `foreach`).
    """
    kernels = ("torch_adam", "fused", "foreach")
    return (type or "").lower() in _native_names and not any(params.get(name) for name in kernels)


def _always_true(keyword: str, value: bool) -> None:
    if not value:
        raise ConfigError(f"optimizer.params.{keyword}: got false; only true is supported: remove it")


def _always_false(keyword: str, value: bool) -> None:
    if value:
        raise ConfigError(f"optimizer.params.{keyword}: got true; only false is supported: remove it")


def _fusable(groups: Groups) -> bool:
    return all(steps_fused(tensor.device) and tensor.is_floating_point() for tensor in _tensors(groups))


def _tensors(groups: Groups) -> Iterable[Tensor]:
    for group in groups:
        members: Any = group["params"] if isinstance(group, dict) else [group]
        for member in [members] if isinstance(members, Tensor) else members:
            yield member[1] if isinstance(member, tuple) else member
