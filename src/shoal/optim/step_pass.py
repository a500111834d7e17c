"""How the masters take their step: in one native pass over memory, or by the optimizer's own `step` on lent gradients.

Both leave the same state behind, under torch's names, so that a checkpoint does not know which it was. Moments
lie in the spans of their unit's state where that rests away, so that they rest with it.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from math import sqrt
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer

from shoal.errors import OptimizerError
from shoal.native.step import DTYPES, Rule, available, step
from shoal.optim.elementwise import LAYERWISE
from shoal.optim.lion import Lion
from shoal.optim.masks import MASK
from shoal.optim.onebit import CompressedAdam, OneBitAdam, ZeroOneAdam
from shoal.optim.views import MasterView, Views
from shoal.tier.streams import staging_buffers
from shoal.zero.optimizer_state import WHOLE_STEP, Use

__all__ = [
    "Options",
    "StepPass",
    "Stepping",
    "by_native",
    "by_optimizer",
    "by_signs",
    "fits",
    "is_native",
    "is_plain",
    "is_unhooked",
    "moments_of",
    "natively",
    "options_of",
    "rounding",
    "settle",
]

Options = list[dict[str, Any]]
"""The options of each group when the step was decided on: a schedule may have changed them since."""
Stepping = Callable[[Sequence[MasterView], float, Options], None]
"""Steps views that are in memory by their reduced gradients times a factor, and rounds them to where the weights rest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPass:
    """One pass over views: what is done to each, and what of its state that needs."""

    step: Stepping
    factor: float
    options: Options
    use: Use = WHOLE_STEP


_State = dict[str, Any]
_Plan = tuple[Rule, list[Tensor], list[float]]
"""The rule of a view's step, the moments, and the constants."""
_Moment = Callable[[str], Tensor]
"""Gives the moments of a view by name, zeros at first."""
_Planner = Callable[[dict[str, Any], _State, _Moment], _Plan]


def by_optimizer(optimizer: Optimizer, views: Views) -> Stepping:
    """Return the way by the optimizer itself."""
    def stepping(some: Sequence[MasterView], factor: float, options: Options) -> None:
        views.lend(some, factor)
        with _set(optimizer, options):
            optimizer.step()
        views.take_back(some)
        for view in some:
            settle(view, optimizer)
            round_off(view)

    return stepping


@contextmanager
def _set(optimizer: Optimizer, options: Options) -> Generator[None]:
    """Have the groups hold `options`, those of when the step was decided on, where somebody has changed them since."""
    since = [{name: group[name] for name, value in then.items() if not _same(group[name], value)}
             for group, then in zip(optimizer.param_groups, options, strict=False)]
    for group, now, then in zip(optimizer.param_groups, since, options, strict=False):
        group.update({name: then[name] for name in now})
    try:
        yield
    finally:
        for group, now in zip(optimizer.param_groups, since, strict=False):
            group.update(now)


def _same(one: object, other: object) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one is other or torch.equal(one, other)
    return type(one) is type(other) and one == other


def natively(optimizer: Optimizer) -> Stepping | None:
    """Return the native way for views of which `is_native` was true when their step was decided; None if there is none."""
    plan = _PLANS.get(type(optimizer))
    if plan is None or not available():
        return None

    def stepping(some: Sequence[MasterView], factor: float, options: Options) -> None:
        for view in some:
            _step(view, plan(options[view.group], optimizer.state[view.parameter], moments_of(view)), factor)
    return stepping


def by_native(optimizer: Optimizer, otherwise: Stepping) -> Stepping:
    """Return the native way where it can step a view as `optimizer` would, else the other.

    Whether it can depends on the options of the step, and on the optimizer's hooks, which may change: it is asked each time.
    """
    way = natively(optimizer)
    if way is None:
        return otherwise

    def stepping(some: Sequence[MasterView], factor: float, options: Options) -> None:
        native = [view for view in some if fits(view)] if is_plain(optimizer, options) else []
        way(native, factor, options)
        if others := [view for view in some if view not in native]:
            otherwise(others, factor, options)
    return stepping


def by_signs(optimizer: CompressedAdam, *, native: bool) -> Stepping:
    """Return the way of gradients of which one addend may be exact: in `native` code where it can, else by torch."""
    def stepping(some: Sequence[MasterView], factor: float, options: Options) -> None:
        if not is_unhooked(optimizer):
            raise OptimizerError(f"optimizer: {type(optimizer).__name__} has a step hook, or another step in place of its "
                                 f"own, which nobody calls: slices are stepped by what came as signs of them; remove them")
        for view in some:
            group, exact = options[view.group], view.unit.transport.exact_addend(view.part)
            steps = min(optimizer.due(group), optimizer.reach(group))
            if not view.unit.transport.is_compressible:  # the gradient is its only addend
                exact = view.unit.gradient.at_rest(view.part), 1
            addend, addends = (None, 1) if exact is None else exact
            if native and available() and fits(view) and not group["eps_inside_sqrt"]:
                _step_signed(optimizer, view, group, factor, addend, addends, steps)
                continue
            gradient = view.gradient(factor)
            if addend is not None:
                addend = gradient if addends == 1 else addend.to(gradient.dtype) * factor
            optimizer.take(view.parameter, gradient, group, addend=addend, addends=addends, steps=steps)
            settle(view, optimizer)
            round_off(view)

    return stepping


def _step_signed(optimizer: CompressedAdam, view: MasterView, group: dict[str, Any], factor: float, addend: Tensor | None,
                 addends: int, steps: int) -> None:
    state, lr = optimizer.state[view.parameter], steps * float(group["lr"])
    terms = optimizer.begin(group, state, moments_of(view), exact=addend is None, steps=steps)
    constants = [1 - terms.beta1, terms.beta2, terms.into, lr / terms.first, 1 / sqrt(terms.second), group["eps"],
                 lr * group["weight_decay"]]
    more = [terms.again, addends, terms.floor, terms.fresh]
    plain = addends == 1 and not (terms.again or terms.floor or terms.fresh)
    with rounding(view) as weight:
        step(Rule.ADAMW if plain else Rule.ONE_BIT_ADAM, view.parameter.detach(), [state["exp_avg"], state["exp_avg_sq"]],
             view.unit.gradient.at_rest(view.part), [*constants, *more], factor=factor, weight=weight,
             addend=None if addends == 1 else addend)


def is_native(optimizer: Optimizer, views: Sequence[MasterView], options: Options) -> bool:
    """Whether native code steps all `views` by itself with these `options`, which any thread may do."""
    known = type(optimizer) in _PLANS or type(optimizer) in SIGNED
    suits = is_unhooked(optimizer) if type(optimizer) in LAYERWISE else known and is_plain(optimizer, options)
    return suits and available() and all(fits(view) for view in views)


def settle(view: MasterView, optimizer: Optimizer) -> None:
    """Move moments that the optimizer made by itself into the spans of the unit's state."""
    if view.unit.state.store.granule is None:  # they are always there, wherever they lie
        return
    state = optimizer.state.get(view.parameter, {})
    for kind, value in state.items():
        if isinstance(value, Tensor) and value.dim() and value.shape == view.parameter.shape:
            there = view.unit.state.moment(kind, value.dtype)[view.start:view.stop]
            if there.data_ptr() != value.data_ptr():
                state[kind] = there.copy_(value)


def round_off(view: MasterView) -> None:
    """Bring the master of a view, rounded, to where the weights rest."""
    if view.unit.state.rounded is not None:
        view.unit.state.rounded.tensor[view.start:view.stop].copy_(view.parameter)


@contextmanager
def rounding(view: MasterView) -> Generator[Tensor | None]:
    """Give where native code is to write the rounded weights of a view, and bring them to where they rest."""
    rounded = None if view.unit.state.rounded is None else view.unit.state.rounded.tensor[view.start:view.stop]
    if rounded is None or rounded.device.type == "cpu":
        yield rounded
        return
    staging = staging_buffers(rounded.device)
    weight = staging.borrow(rounded.numel(), rounded.dtype)
    yield weight
    staging.send(weight, rounded)


def options_of(optimizer: Optimizer) -> Options:
    """Return the options of each group as they are now."""
    return [{name: value if name == MASK else _as_it_is(value) for name, value in group.items() if name != "params"}
            for group in optimizer.param_groups]


def _as_it_is(value: object) -> object:
    """Return `value`, or a copy of one that may change in place."""
    if isinstance(value, Tensor):
        return value.clone()
    return deepcopy(value) if isinstance(value, list | dict) else value


def moments_of(view: MasterView) -> Callable[[str], Tensor]:
    """Return what gives the moments of a view by name, zeros at first."""
    return lambda kind: view.unit.state.moment(kind, torch.float32)[view.start:view.stop].zero_()


def _step(view: MasterView, plan: _Plan, factor: float) -> None:
    rule, moments, constants = plan
    gradient = view.unit.gradient.at_rest(view.part)
    with rounding(view) as weight:
        step(rule, view.parameter.detach(), moments, gradient, constants, factor=factor, weight=weight)


def fits(view: MasterView) -> bool:
    """Whether native code can step a view, whatever the rule."""
    master, gradient = view.parameter, view.unit.gradient
    return (master.dtype == torch.float32 and master.device.type == "cpu" and view.unit.full.dtype in DTYPES
            and gradient.rest.tensor.device.type == "cpu" and gradient.rest.tensor.dtype in DTYPES)


def is_plain(optimizer: Optimizer, options: Options) -> bool:
    """Whether nothing asks for more than the rule: no option, no hook, no step that somebody put in its place."""
    more = ("amsgrad", "maximize", "differentiable", "capturable", "eps_inside_sqrt")
    return is_unhooked(optimizer) and not any(group.get(option) for group in options for option in more)


def is_unhooked(optimizer: Optimizer) -> bool:
    """Whether nothing is called around its step, and nothing instead of it."""
    hooks = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
    patched = vars(optimizer).get("step")
    return (not any(vars(optimizer).get(hook) for hook in hooks)
            and (patched is None or hasattr(patched, "_wrapped_by_lr_sched")))


def _adam(group: dict[str, Any], state: _State, moment: _Moment, *, decoupled: bool = False) -> _Plan:
    """Adam (Kingma and Ba 2015, Algorithm 1), and with decoupled decay AdamW (Loshchilov and Hutter 2019, Algorithm 2)."""
    if not state:
        state.update(step=torch.zeros(()), exp_avg=moment("exp_avg"), exp_avg_sq=moment("exp_avg_sq"))
    state["step"] += 1
    time, (beta1, beta2), lr = state["step"].item(), group["betas"], float(group["lr"])
    decoupled = group.get("decoupled_weight_decay", decoupled)
    decay = group["weight_decay"] * (lr if decoupled else 1)
    return (Rule.ADAMW if decoupled else Rule.ADAM, [state["exp_avg"], state["exp_avg_sq"]],
            [1 - beta1, beta2, 1 - beta2, lr / (1 - beta1**time), 1 / sqrt(1 - beta2**time), group["eps"], decay])


def _sgd(group: dict[str, Any], state: _State, moment: _Moment) -> _Plan:
    """SGD with momentum as torch defines it: the first gradient is the first momentum."""
    momentum, into, moments = group["momentum"], 1 - group["dampening"], []
    if momentum:
        if state.get("momentum_buffer") is None:
            state["momentum_buffer"], into = moment("momentum_buffer"), 1.0
        moments = [state["momentum_buffer"]]
    return (Rule.NESTEROV if group["nesterov"] else Rule.SGD, moments,
            [float(group["lr"]), momentum, into, group["weight_decay"]])


def _adagrad(group: dict[str, Any], state: _State, moment: _Moment) -> _Plan:
    """Adagrad (Duchi et al. 2011), its state made by torch when the optimizer is built."""
    state["step"] += 1
    lr = float(group["lr"]) / (1 + (state["step"].item() - 1) * group["lr_decay"])
    return Rule.ADAGRAD, [state["sum"]], [lr, group["eps"], group["weight_decay"]]


def _lion(group: dict[str, Any], state: _State, moment: _Moment) -> _Plan:
    """Lion (lion.py)."""
    if not state:
        state["exp_avg"] = moment("exp_avg")
    (beta1, beta2), lr = group["betas"], float(group["lr"])
    return Rule.LION, [state["exp_avg"]], [lr, 1 - beta1, 1 - beta2, lr * group["weight_decay"]]


SIGNED = (OneBitAdam, ZeroOneAdam)
"""Classes whose gradients may have one exact addend."""
_PLANS: dict[type[Optimizer], _Planner] = {
    Adam: _adam, AdamW: partial(_adam, decoupled=True), SGD: _sgd, Adagrad: _adagrad, Lion: _lion,
}
