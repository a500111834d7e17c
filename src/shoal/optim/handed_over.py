"""The torch optimizer that a script handed to `initialize`: its calls reach the engine.

    step              the engine's step
    zero_grad         the engine's
    param_groups      the model's parameters, and the options of the next step: schedules and scripts change them here
    state             the sharded optimizer's by the model's parameters, where every rank holds all of it; it may be cleared
    state_dict        the sharded optimizer's, as load_state_dict and add_param_group
    hooks             those of both; the engine's steps call them too

The engine steps slices by a copy of it. Its own `step` would step whole parameters past the engine, or nothing at all. So
its class is changed to a subclass of the same name, as that of a released parameter is (zero/guard.py). The reference to the
sharded optimizer is an attribute: wrappers of clients, such as LightningOptimizer, derive from the class and have attributes
alone in common with the optimizer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn
from weakref import ref

from torch import Tensor
from torch.optim import Optimizer

from shoal.errors import UsageError
from shoal.optim.parameter_state import ReplicatedState, SlicedState
from shoal.optim.sharded import ShardedOptimizer

__all__ = ["hand_back", "hand_over"]

_classes: dict[type[Optimizer], type[Optimizer]] = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class _HandedOver:
    """The optimizer that steps for a script's, and the script's own groups, which both share, and empty state."""

    sharded: ref[ShardedOptimizer]
    groups: list[dict[str, Any]]
    state: Mapping[Tensor, Any]


def hand_over(optimizer: Optimizer, sharded: ShardedOptimizer) -> None:
    """Have the calls of the script's `optimizer` reach `sharded`."""
    plain = hand_back(optimizer)
    if plain not in _classes:
        kept = {name: getattr(plain, name) for name in ("__doc__", "__module__", "__qualname__")}
        _classes[plain] = type(plain.__name__, (plain,), {**_METHODS, **kept})
    vars(optimizer).pop("step", None)  # of a schedule
    vars(optimizer)["_handed_over"] = _HandedOver(sharded=ref(sharded), groups=optimizer.param_groups, state=optimizer.state)
    optimizer.__class__ = _classes[plain]
    sharded.share(optimizer)


def hand_back(optimizer: Optimizer) -> type[Optimizer]:
    """Give the script's `optimizer` its own class back, and return it: another engine may take the optimizer over."""
    plain = type(optimizer)
    if plain in _classes.values():
        plain = plain.__mro__[1]
        optimizer.__class__ = plain
        del vars(optimizer)["_handed_over"]
    return plain


def _handed_over(optimizer: Any) -> _HandedOver:
    """Return what is kept of `optimizer`, a script's, a copy, or a wrapper of it."""
    return optimizer._handed_over


def _target(optimizer: Optimizer, call: str) -> ShardedOptimizer:
    sharded = _handed_over(optimizer).sharded()
    if sharded is None:
        raise UsageError(f"optimizer.{call}: the engine that took this {type(optimizer).__name__} over is gone; hand it to "
                         f"shoal.initialize again, or build another optimizer")
    return sharded


def _step(self: Optimizer, closure: Callable[[], Any] | None = None) -> Any:
    return _target(self, "step").step(closure)


def _zero_grad(self: Optimizer, set_to_none: bool = True) -> None:
    _target(self, "zero_grad").zero_grad(set_to_none)


def _state_dict(self: Optimizer) -> dict[str, Any]:
    return _target(self, "state_dict").state_dict()


def _load_state_dict(self: Optimizer, state_dict: Mapping[str, Any]) -> None:
    _target(self, "load_state_dict").load_state_dict(state_dict)


def _add_param_group(self: Optimizer, param_group: Mapping[str, Any]) -> None:
    _target(self, "add_param_group").add_param_group(param_group)


def _get_groups(self: Optimizer) -> list[dict[str, Any]]:
    return _handed_over(self).groups


def _set_groups(self: Optimizer, groups: list[dict[str, Any]]) -> None:
    _target(self, "param_groups").replace_groups(groups)


def _get_state(self: Optimizer) -> Any:
    handed = _handed_over(self)
    sharded = handed.sharded()
    if sharded is None:
        return handed.state
    return ReplicatedState(sharded) if ReplicatedState.exists(sharded) else SlicedState(sharded)


def _set_state(self: Optimizer, value: Mapping[Tensor, Any]) -> None:
    _target(self, "state").replace_state(value)


def _copy(self: Optimizer) -> Optimizer:
    """Return an optimizer with the same groups and state, as torch's `copy.copy` does: its calls reach the same engine."""
    other = object.__new__(type(self))
    vars(other).update(vars(self))
    return other


def _refuse_to_serialize(self: Optimizer, protocol: object) -> NoReturn:
    raise UsageError(f"optimizer: this {type(self).__name__} belongs to an engine, which can be neither pickled nor deeply "
                     f"copied; take optimizer.state_dict(), or engine.save_checkpoint")


def _no_scaling(self: Optimizer) -> bool:
    return False


def _ignore(self: Optimizer, value: object) -> None:
    """Keep `_no_scaling`: torch's fused optimizers say that they divide by the scale of a GradScaler themselves."""


vars(_step)["_wrapped_by_lr_sched"] = True  # torch's schedules wrap `step` to warn if it was not called before theirs
_METHODS: dict[str, Any] = {
    "step": _step, "zero_grad": _zero_grad, "state": property(_get_state, _set_state),
    "param_groups": property(_get_groups, _set_groups), "state_dict": _state_dict,
    "load_state_dict": _load_state_dict, "add_param_group": _add_param_group, "_opt_called": True,
    "__copy__": _copy, "__reduce_ex__": _refuse_to_serialize,
    "_step_supports_amp_scaling": property(_no_scaling, _ignore)}
