"""Step functions over master views: one native pass over memory, or the optimizer's own `step` on attached gradients.

Both keep the same state under torch's names, so a checkpoint of one resumes with the other. The moments of an offloaded unit
are stored in the spans of its `OptimizerState`, so they are fetched and committed with the master.
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

from shoal.device import HOST
from shoal.errors import OptimizerError
from shoal.native.step import DTYPES, Rule, available, step
from shoal.optim.adam import BiasedAdam
from shoal.optim.elementwise import LAYERWISE, arithmetic_class
from shoal.optim.lion import Lion
from shoal.optim.masks import MASK
from shoal.optim.onebit import CompressedAdam, OneBitAdam, ZeroOneAdam
from shoal.optim.own_attributes import OwnAttributes
from shoal.optim.views import MasterView, Views
from shoal.zero.optimizer_state import WHOLE_STEP, StateAccess

__all__ = [
    "Factor",
    "Options",
    "StepFunction",
    "StepPass",
    "call_without_views",
    "can_step_natively",
    "compressed_step_fn",
    "has_native_options",
    "is_unhooked",
    "moment_allocator",
    "move_moments_to_store",
    "native_or_optimizer_step_fn",
    "native_step_fn",
    "optimizer_step_fn",
    "snapshot_options",
    "supports_native",
    "weight_output",
]

Options = list[dict[str, Any]]
"""The options of each parameter group when the step was decided; a schedule may change the live ones before it runs."""
Factor = float | Tensor
"""A number, or a tensor of no dimensions on the device, which only torch's own steps take without reading it."""
StepFunction = Callable[[Sequence[MasterView], Factor, Options], None]
"""Steps fetched views by their reduced gradients times a factor, and casts the masters to the resting weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPass:
    """One pass over views: the function that steps them, and the state that it accesses."""

    step: StepFunction
    factor: Factor
    options: Options
    access: StateAccess = WHOLE_STEP


_State = dict[str, Any]
_Plan = tuple[Rule, list[Tensor], list[float]]
"""The native rule of a view's step, its moments, and the rule's constants."""
_Moment = Callable[[str], Tensor]
"""Allocates moments of a view, zeros, by name."""
_Planner = Callable[[dict[str, Any], _State, _Moment], _Plan]


def optimizer_step_fn(optimizer: Optimizer, views: Views, own: OwnAttributes) -> StepFunction:
    """Return the step function that attaches gradients and calls `optimizer.step`; `own` are the optimizer's attributes."""
    def step_views(batch: Sequence[MasterView], factor: Factor, options: Options) -> None:
        views.attach_grads(batch, factor)
        own.begin_call()
        with _use_groups(optimizer, options, batch):
            optimizer.step()
        views.detach_grads(batch)
        for view in batch:
            move_moments_to_store(view, optimizer)
            cast_view_to_weights(view)

    return step_views


def call_without_views(optimizer: Optimizer, options: Options) -> None:
    """Call `optimizer.step` on a rank that has no slice to step: what it counts on itself goes up as on the others."""
    with _use_groups(optimizer, options, []):
        optimizer.step()


@contextmanager
def _use_groups(optimizer: Optimizer, options: Options, views: Sequence[MasterView]) -> Generator[None]:
    """Put `views` and the `options` of the step into the groups of `optimizer`, and restore what was there."""
    changed = [{name: group[name] for name, value in then.items() if not _equal(group[name], value)}
               for group, then in zip(optimizer.param_groups, options, strict=True)]
    former = [{"params": group["params"], **now} for group, now in zip(optimizer.param_groups, changed, strict=True)]
    for index, (group, now) in enumerate(zip(optimizer.param_groups, changed, strict=True)):
        group.update({name: options[index][name] for name in now})
        group["params"] = [view.parameter for view in views if view.group == index]
    try:
        yield
    finally:
        for group, values in zip(optimizer.param_groups, former, strict=True):
            group.update(values)


def _equal(one: object, other: object) -> bool:
    """Whether two options are known to be equal; tensors of a device are not, for the host would wait to compare them."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one is other or (one.device == other.device == HOST and torch.equal(one, other))
    return type(one) is type(other) and one == other


def native_step_fn(optimizer: Optimizer) -> StepFunction | None:
    """Return the native step function of the optimizer's class, None if there is none.

    Its views must have passed `can_step_natively` when their step was decided.
    """
    plan = _PLANS.get(arithmetic_class(type(optimizer)))
    if plan is None or not available():
        return None

    def step_views(batch: Sequence[MasterView], factor: Factor, options: Options) -> None:
        for view in batch:
            planned = plan(options[view.group], optimizer.state[view.parameter], moment_allocator(view))
            _native_step(view, planned, float(factor))
    return step_views


def native_or_optimizer_step_fn(optimizer: Optimizer, fallback: StepFunction) -> StepFunction:
    """Return a function that steps each view natively if native code gives the result of `optimizer`, else by `fallback`.

    It checks at each call, because the options of the step and the optimizer's hooks may change.
    """
    native_fn = native_step_fn(optimizer)
    if native_fn is None:
        return fallback

    def step_views(batch: Sequence[MasterView], factor: Factor, options: Options) -> None:
        native = [view for view in batch if supports_native(view)] if has_native_options(optimizer, options) else []
        native_fn(native, factor, options)
        if others := [view for view in batch if view not in native]:
            fallback(others, factor, options)
    return step_views


def compressed_step_fn(optimizer: CompressedAdam, *, native: bool) -> StepFunction:
    """Return the step function for 1-bit gradients, whose own-rank addend is uncompressed; `native` where supported."""
    def step_views(batch: Sequence[MasterView], factor: Factor, options: Options) -> None:
        if not is_unhooked(optimizer):
            raise OptimizerError(f"optimizer: {type(optimizer).__name__} has a step hook, or its step() was replaced; "
                                 f"neither is called when slices are stepped by compressed gradients: remove them")
        for view in batch:
            group, exact = options[view.group], view.unit.transport.exact_addend(view.part)
            steps = min(optimizer.steps_in_gradient(group), optimizer.max_joint_steps(group))
            if not view.unit.transport.is_compressible:  # the gradient is its only addend
                exact = view.unit.gradient.at_rest(view.part), 1
            addend, addends = (None, 1) if exact is None else exact
            if native and available() and supports_native(view) and not group["eps_inside_sqrt"]:
                _native_compressed_step(optimizer, view, group, float(factor), addend, addends, steps)
                continue
            gradient = view.gradient(factor)
            if addend is not None:
                addend = gradient if addends == 1 else addend.to(gradient.dtype) * factor
            optimizer.step_tensor(view.parameter, gradient, group, addend=addend, addends=addends, steps=steps)
            move_moments_to_store(view, optimizer)
            cast_view_to_weights(view)

    return step_views


def _native_compressed_step(optimizer: CompressedAdam, view: MasterView, group: dict[str, Any], factor: float,
                            addend: Tensor | None, addends: int, steps: int) -> None:
    state, lr = optimizer.state[view.parameter], steps * float(group["lr"])
    terms = optimizer.begin_step(group, state, moment_allocator(view), exact=addend is None, steps=steps)
    constants = [1 - terms.beta1, terms.beta2, terms.square_weight, lr / terms.momentum_correction,
                 1 / sqrt(terms.variance_correction), group["eps"], lr * group["weight_decay"]]
    more = [terms.look_ahead, addends, terms.variance_floor, terms.initial_square_weight]
    plain = addends == 1 and not (terms.look_ahead or terms.variance_floor or terms.initial_square_weight)
    with weight_output(view) as weight:
        step(Rule.ADAMW if plain else Rule.ONE_BIT_ADAM, view.parameter.detach(), [state["exp_avg"], state["exp_avg_sq"]],
             view.unit.gradient.at_rest(view.part), [*constants, *more], factor=factor, weight=weight,
             addend=None if addends == 1 else addend)


def can_step_natively(optimizer: Optimizer, views: Sequence[MasterView], options: Options) -> bool:
    """Whether native code alone steps all `views` with these `options`. Such a step may run in any thread."""
    kind = arithmetic_class(type(optimizer))
    known = kind in _PLANS or kind in COMPRESSED
    suits = is_unhooked(optimizer) if kind in LAYERWISE else known and has_native_options(optimizer, options)
    return suits and available() and all(supports_native(view) for view in views)


def move_moments_to_store(view: MasterView, optimizer: Optimizer) -> None:
    """Move moments that the optimizer allocated itself into the spans of the unit's offloaded state."""
    if view.unit.state.store.granule is None:  # not offloaded: they may stay in the optimizer's own tensors
        return
    state = optimizer.state.get(view.parameter, {})
    for kind, value in state.items():
        if isinstance(value, Tensor) and value.dim() and value.shape == view.parameter.shape:
            there = view.unit.state.moment(kind, value.dtype)[view.start:view.stop]
            if there.data_ptr() != value.data_ptr():
                state[kind] = there.copy_(value)


def cast_view_to_weights(view: MasterView) -> None:
    """Cast the master of a view to the resting weights in the compute dtype, if these are separate."""
    if (weights := view.unit.state.stepped_weights) is not None:
        weights.tensor[view.start:view.stop].copy_(view.parameter)


@contextmanager
def weight_output(view: MasterView) -> Generator[Tensor | None]:
    """Yield the host tensor that native code casts a view's weights to; send it to the device if they rest there."""
    weights = view.unit.state.stepped_weights
    target = None if weights is None else weights.tensor[view.start:view.stop]
    if target is None or target.device.type == "cpu":
        yield target
        return
    with view.unit.state.weights_to_send(target) as weight:
        yield weight


def snapshot_options(optimizer: Optimizer) -> Options:
    """Return a copy of the present options of each group."""
    return [{name: value if name == MASK else _snapshot(value) for name, value in group.items() if name != "params"}
            for group in optimizer.param_groups]


def _snapshot(value: object) -> object:
    """Return `value`, or a copy if it is mutable."""
    if isinstance(value, Tensor):
        return value.clone()
    return deepcopy(value) if isinstance(value, list | dict) else value


def moment_allocator(view: MasterView) -> Callable[[str], Tensor]:
    """Return the allocator of a view's moments, which are slices of its unit's state."""
    return lambda kind: view.unit.state.moment(kind, torch.float32)[view.start:view.stop].zero_()


def _native_step(view: MasterView, plan: _Plan, factor: float) -> None:
    rule, moments, constants = plan
    gradient = view.unit.gradient.at_rest(view.part)
    with weight_output(view) as weight:
        step(rule, view.parameter.detach(), moments, gradient, constants, factor=factor, weight=weight)


def supports_native(view: MasterView) -> bool:
    """Whether native code supports the devices and dtypes of a view."""
    master, gradient = view.parameter, view.unit.gradient
    return (master.dtype == torch.float32 and master.device.type == "cpu" and view.unit.full.dtype in DTYPES
            and gradient.rest.tensor.device.type == "cpu" and gradient.rest.tensor.dtype in DTYPES)


def has_native_options(optimizer: Optimizer, options: Options) -> bool:
    """Whether the native rule gives the optimizer's result: no unsupported option, no hook, no replaced `step`."""
    unsupported = ("amsgrad", "maximize", "differentiable", "capturable", "eps_inside_sqrt")
    return is_unhooked(optimizer) and not any(group.get(option) for group in options for option in unsupported)


def is_unhooked(optimizer: Optimizer) -> bool:
    """Whether the optimizer has no step hooks and its own `step`, which a schedule may have wrapped."""
    hooks = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
    patched = vars(optimizer).get("step")
    return (not any(vars(optimizer).get(hook) for hook in hooks)
            and (patched is None or hasattr(patched, "_wrapped_by_lr_sched")))


def _adam(group: dict[str, Any], state: _State, moment: _Moment, *, decoupled: bool = False) -> _Plan:
    """Adam (Kingma and Ba 2015, Algorithm 1), and with decoupled decay AdamW (Loshchilov and Hutter 2019, Algorithm 2).

    Without `bias_correction` (`BiasedAdam`) the moments are used as they are.
    """
    if not state:
        state.update(step=torch.zeros((), dtype=torch.float32, device="cpu"), exp_avg=moment("exp_avg"),
                     exp_avg_sq=moment("exp_avg_sq"))
    state["step"] += 1
    time, (beta1, beta2), lr = state["step"].item(), group["betas"], float(group["lr"])
    decoupled = group.get("decoupled_weight_decay", decoupled)
    decay = group["weight_decay"] * (lr if decoupled else 1)
    mean, root = (1 - beta1**time, sqrt(1 - beta2**time)) if group.get("bias_correction", True) else (1.0, 1.0)
    return (Rule.ADAMW if decoupled else Rule.ADAM, [state["exp_avg"], state["exp_avg_sq"]],
            [1 - beta1, beta2, 1 - beta2, lr / mean, 1 / root, group["eps"], decay])


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
    """Adagrad (Duchi et al. 2011). Torch allocates its state when the optimizer is built."""
    state["step"] += 1
    lr = float(group["lr"]) / (1 + (state["step"].item() - 1) * group["lr_decay"])
    return Rule.ADAGRAD, [state["sum"]], [lr, group["eps"], group["weight_decay"]]


def _lion(group: dict[str, Any], state: _State, moment: _Moment) -> _Plan:
    """Lion (Chen et al. 2023, Algorithm 2)."""
    if not state:
        state["exp_avg"] = moment("exp_avg")
    (beta1, beta2), lr = group["betas"], float(group["lr"])
    return Rule.LION, [state["exp_avg"]], [lr, 1 - beta1, 1 - beta2, lr * group["weight_decay"]]


COMPRESSED = (OneBitAdam, ZeroOneAdam)
"""Classes stepped by 1-bit gradients, of which one addend is uncompressed."""
_PLANS: dict[type[Optimizer], _Planner] = {
    Adam: _adam, AdamW: partial(_adam, decoupled=True), BiasedAdam: _adam, SGD: _sgd, Adagrad: _adagrad, Lion: _lion,
}
