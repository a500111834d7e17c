"""The torch interface of an engine's optimizer: scripts, schedules and clients call it, and the engine answers.

`step`, `zero_grad` and the state dicts are the engine's; `param_groups` and `state` are those of the inner optimizer.
Scripts can register torch's hooks on it. The step itself is in sharded.py.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol
from weakref import ReferenceType, ref

import torch
from torch import Tensor
from torch.optim import Optimizer

from shoal.errors import UsageError
from shoal.optim.compressed import CompressedOptimizer
from shoal.optim.own_attributes import OwnAttributes
from shoal.optim.views import STATE_IS_KEPT, OffloadedStateView, Views

__all__ = ["EngineOptimizer", "StepOwner", "hooks_of"]


class StepOwner(Protocol):
    """The engine whose optimizer this is: it counts microbatches, and decides whether a call of `step` is a step."""

    def backward_by_optimizer(self, loss: Tensor, *, retain_graph: bool) -> None:
        """Run the backward pass that a call of `optimizer.backward(loss)` asks for."""
        ...

    def step_by_optimizer(self) -> None:
        """Take the step that a call of `optimizer.step()` asks for."""
        ...

    def zero_grad_by_optimizer(self) -> None:
        """Discard the gradients that a call of `optimizer.zero_grad()` means."""
        ...

    def optimizer_state_dict(self) -> dict[str, Any]:
        """Return the portable state dict of the optimizer."""
        ...

    def load_optimizer_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a portable state dict into the optimizer."""
        ...


class EngineOptimizer(Optimizer):
    """A torch optimizer whose calls an engine answers. `ShardedOptimizer`, its subclass, takes the steps.

    It is a torch optimizer by its interface alone: schedules and scripts use its groups, and its `step` is the engine's.
    """

    def __init__(self, optimizer: Optimizer, views: Views):  # torch's own __init__ would take parameters over
        self.optimizer = optimizer
        """The inner optimizer, over views of the masters."""
        self.views = views
        self.defaults = optimizer.defaults
        self._members = [list(group["params"]) for group in optimizer.param_groups]
        """The parameters of each group, as `initialize` laid them out over the ranks."""
        vars(self).update({name: OrderedDict() for name in hooks_of(optimizer)})
        self._hooked: Optimizer = self
        self.own = OwnAttributes(optimizer)
        self._owner: ReferenceType[StepOwner] | None = None
        self._allocates_state = bool(optimizer.state)  # Adagrad, when it is built

    def finish_before_read(self) -> None:
        """Complete the last step, so that a reader sees its state."""
        raise NotImplementedError

    def share(self, optimizer: Optimizer) -> None:
        """Have the attributes of the script's `optimizer` from now on, and call its hooks with it.

        Both have the parameters of the model.
        """
        self.own.share(optimizer)
        vars(self).update(hooks_of(optimizer))
        self._hooked = optimizer

    def call_step_hooks(self, when: str) -> None:
        """Call the step hooks of scripts, the "pre" or the "post" ones: once a step, on every rank."""
        for hook in [*vars(self)[f"_optimizer_step_{when}_hooks"].values()]:
            if hook(self._hooked, (self._hooked,), {}) is not None:
                raise UsageError("optimizer: a step hook returned other arguments for step(), which takes none; return None")

    def _call_hooks(self, name: str, value: Any = None) -> Any:
        """Call the hooks of a state dict, with `value` where there is one; return it, or what a hook gave in its place."""
        for hook in [*vars(self)[f"_optimizer_{name}_hooks"].values()]:
            result = hook(self._hooked) if value is None else hook(self._hooked, value)
            value = value if value is None or result is None else result
        return value

    def set_owner(self, owner: StepOwner) -> None:
        """Have `step` and `zero_grad` be those of the engine `owner`."""
        self._owner = ref(owner)

    def _engine(self, call: str) -> StepOwner:
        owner = None if self._owner is None else self._owner()
        if owner is None:
            raise UsageError(f"optimizer.{call}: the engine of this optimizer is gone; keep what initialize returns first")
        return owner

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # pyright: ignore[reportIncompatibleVariableOverride]  one list
        """The inner optimizer's groups, with the model's parameters. Groups of the same parameters may replace them."""
        return self.optimizer.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        self.replace_groups(groups)

    def replace_groups(self, groups: list[dict[str, Any]]) -> None:
        """Take the options of `groups` over. Raises `UsageError` unless they have the present parameters."""
        self._check_members(groups)
        self.optimizer.param_groups[:] = groups

    def _check_members(self, groups: Iterable[Mapping[str, Any]]) -> None:
        """Raise `UsageError` unless `groups` have the parameters that they had at `initialize`."""
        found = [list(group["params"]) for group in groups]
        if [[*map(id, members)] for members in found] != [[*map(id, members)] for members in self._members]:
            raise UsageError(f"optimizer.param_groups: got groups of {[*map(len, found)]} parameters, and initialize laid "
                             f"out {[*map(len, self._members)]}, which stay: change options such as lr within the groups, "
                             f"freeze a parameter by requires_grad_(False), or call initialize with the other groups")

    @property
    def state(self) -> Mapping[Tensor, dict[str, Any]]:  # pyright: ignore[reportIncompatibleVariableOverride]  no dict
        """The inner optimizer's state, for reading; access reads a copy of moments that are on disk.

        An empty mapping may replace it, on every rank, which begins the moments anew.
        """
        return OffloadedStateView(self.views, self.optimizer, self.finish_before_read, self.reset_state)

    @state.setter
    def state(self, state: Mapping[Tensor, Any]) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        self.replace_state(state)

    def replace_state(self, state: Mapping[Tensor, Any]) -> None:
        """Begin the moments anew if `state` is empty; raise `UsageError` otherwise."""
        if state:
            raise UsageError(f"optimizer.state: {STATE_IS_KEPT}")
        self.reset_state()

    def reset_state(self) -> None:
        """Begin the moments anew, as an empty `state` does in torch; every rank calls it. Weights and masters stay."""
        self.finish_before_read()
        if self._allocates_state or isinstance(self.optimizer, CompressedOptimizer):
            raise UsageError(f"optimizer.state: {type(self.optimizer).__name__} cannot step from an empty state: load one "
                             f"by optimizer.load_state_dict, or call initialize with a new optimizer")
        self.optimizer.state.clear()

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take the engine's step, after `closure`, whose loss is returned: the same as `engine.step()`."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._engine("step").step_by_optimizer()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Discard gradients as `engine.zero_grad()` does, which keeps those of an accumulation under way.

        Where boundaries are set by hand, all are discarded. With `set_to_none` false the parameters that have had a gradient
        are stepped with a gradient of zeros where they get no other, as by torch.
        """
        self._engine("zero_grad").zero_grad_by_optimizer()
        self.keep_zeros(keep=not set_to_none)

    def keep_zeros(self, *, keep: bool) -> None:
        """Step the parameters that have had a gradient with one of zeros where they get no other; or no longer."""
        raise NotImplementedError

    def state_dict(self) -> dict[str, Any]:
        """Return the state by parameter names, of full shapes: on rank 0, and on the others the groups alone.

        Every rank calls it. A torch optimizer over the same groups loads it too (engine/full_optimizer_state.py).
        """
        self.finish_before_read()
        self._call_hooks("state_dict_pre")
        return self._call_hooks("state_dict_post", self._build_state_dict())

    def _build_state_dict(self) -> dict[str, Any]:
        return self._engine("state_dict").optimizer_state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load what `state_dict` returned, on any number of ranks, or the state dict of a torch optimizer of these groups.

        Every rank calls it, with the state on one of them or on all. Raises `UsageError` for a dict that does not fit.
        """
        self.finish_before_read()
        state_dict = self._call_hooks("load_state_dict_pre", {**state_dict})
        self._engine("load_state_dict").load_optimizer_state_dict(state_dict)
        self._call_hooks("load_state_dict_post")

    def add_param_group(self, param_group: Mapping[str, Any]) -> None:
        """Raise `UsageError`: the parameters are laid out over the ranks once."""
        raise UsageError("optimizer.add_param_group: the parameters were laid out over the ranks by initialize; give it all "
                         "groups, and freeze what is for later by requires_grad_(False) after it")


def hooks_of(optimizer: Optimizer) -> dict[str, OrderedDict[int, Any]]:
    """Return the hooks that are registered on `optimizer`, by the attributes in which torch keeps them."""
    return {name: hooks for name, hooks in vars(optimizer).items() if name.endswith("_hooks")}
