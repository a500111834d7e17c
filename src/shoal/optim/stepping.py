"""How the masters take their step: in one native pass over memory, or by the optimizer's own `step` on lent gradients.

Both leave the same state behind, under torch's names, so that a checkpoint does not know which it was.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import sqrt
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer

from shoal.gradients import scale
from shoal.native.step import DTYPES, Rule, available, step
from shoal.optim.lion import Lion
from shoal.optim.views import View, Views
from shoal.zero.unit import Unit

__all__ = ["Stepping", "by_native", "by_optimizer"]

Stepping = Callable[[Views, dict[Unit, int], float], None]
"""Steps the slots that `touched[unit]` has a bit for, by their reduced gradients times a factor."""

_State = dict[str, Any]
_Plan = tuple[Rule, list[Tensor], list[float]]
"""The rule of a view's step, the moments, and the constants."""


def by_optimizer(optimizer: Optimizer, at_once: int) -> Stepping:
    """Return the way by the optimizer itself, at most `at_once` elements (or one view) at a time."""
    def stepping(views: Views, touched: dict[Unit, int], factor: float) -> None:
        scale(list(touched), factor)
        for _ in views.lend(touched, optimizer, at_once=at_once):
            optimizer.step()

    return stepping


def by_native(optimizer: Optimizer, views: Views, otherwise: Stepping) -> Stepping:
    """Return the native way where it can step these `views` as `optimizer` would, else the other.

    Whether it can depends on the optimizer's options and hooks, which may change, and is asked at every step.
    """
    plan = _PLANS.get(type(optimizer))
    if plan is None or not all(_fits(view) for view in views.views) or not available():
        return otherwise

    def stepping(views: Views, touched: dict[Unit, int], factor: float) -> None:
        if not _is_plain(optimizer):
            otherwise(views, touched, factor)
            return
        for view in views.touched(touched, optimizer):
            assert view.unit.gradient is not None
            master = view.parameter.detach()
            rule, moments, constants = plan(optimizer.param_groups[view.group], optimizer.state[view.parameter], master)
            rounded = view.unit.rounded
            step(rule, master, moments, view.unit.gradient.reduced[view.start:view.stop], constants, factor=factor,
                 weight=None if rounded is None else rounded[view.start:view.stop])
            view.unit.is_rounded = rounded is not None
        vars(optimizer)["_opt_called"] = True  # torch's schedulers ask whether the optimizer has stepped

    return stepping


def _fits(view: View) -> bool:
    master, gradient = view.parameter, view.unit.gradient
    return (master.dtype == torch.float32 and master.device.type == "cpu" and view.unit.full.dtype in DTYPES
            and gradient is not None and gradient.reduced.dtype in DTYPES)


def _is_plain(optimizer: Optimizer) -> bool:
    """Whether nothing asks for more than the rule: no option beyond it, no hook, no step that somebody put in its place."""
    options = ("amsgrad", "maximize", "differentiable", "capturable")
    hooks = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
    patched = vars(optimizer).get("step")
    return (not any(group.get(option) for group in optimizer.param_groups for option in options)
            and not any(vars(optimizer).get(hook) for hook in hooks)
            and (patched is None or hasattr(patched, "_wrapped_by_lr_sched")))


def _adam(group: dict[str, Any], state: _State, master: Tensor, *, decoupled: bool = False) -> _Plan:
    """Adam (Kingma and Ba 2015, Algorithm 1), and with decoupled decay AdamW (Loshchilov and Hutter 2019, Algorithm 2)."""
    if not state:
        state.update(step=torch.zeros(()), exp_avg=torch.zeros_like(master), exp_avg_sq=torch.zeros_like(master))
    state["step"] += 1
    time, (beta1, beta2), lr = state["step"].item(), group["betas"], float(group["lr"])
    decoupled = group.get("decoupled_weight_decay", decoupled)
    decay = group["weight_decay"] * (lr if decoupled else 1)
    return (Rule.ADAMW if decoupled else Rule.ADAM, [state["exp_avg"], state["exp_avg_sq"]],
            [1 - beta1, beta2, 1 - beta2, lr / (1 - beta1**time), 1 / sqrt(1 - beta2**time), group["eps"], decay])


def _sgd(group: dict[str, Any], state: _State, master: Tensor) -> _Plan:
    """SGD with momentum as torch defines it: the first gradient is the first momentum."""
    momentum, into, moments = group["momentum"], 1 - group["dampening"], []
    if momentum:
        if state.get("momentum_buffer") is None:
            state["momentum_buffer"], into = torch.zeros_like(master), 1.0
        moments = [state["momentum_buffer"]]
    return (Rule.NESTEROV if group["nesterov"] else Rule.SGD, moments,
            [float(group["lr"]), momentum, into, group["weight_decay"]])


def _adagrad(group: dict[str, Any], state: _State, master: Tensor) -> _Plan:
    """Adagrad (Duchi et al. 2011), its state made by torch when the optimizer is built."""
    state["step"] += 1
    lr = float(group["lr"]) / (1 + (state["step"].item() - 1) * group["lr_decay"])
    return Rule.ADAGRAD, [state["sum"]], [lr, group["eps"], group["weight_decay"]]


def _lion(group: dict[str, Any], state: _State, master: Tensor) -> _Plan:
    """Lion (lion.py)."""
    if not state:
        state["exp_avg"] = torch.zeros_like(master)
    (beta1, beta2), lr = group["betas"], float(group["lr"])
    return Rule.LION, [state["exp_avg"]], [lr, 1 - beta1, 1 - beta2, lr * group["weight_decay"]]


_PLANS: dict[type[Optimizer], Callable[[dict[str, Any], _State, Tensor], _Plan]] = {
    Adam: _adam, AdamW: partial(_adam, decoupled=True), SGD: _sgd, Adagrad: _adagrad, Lion: _lion,
}
