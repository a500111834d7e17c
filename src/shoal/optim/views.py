"""The inner optimizer's parameters: one contiguous view of the master per unit and optimizer group.

Few large tensors suit any elementwise optimizer, and its moments are sharded like the views. Plain PyTorch skips a parameter
without a gradient. To do exactly the same, a view is split permanently between slots with and without a gradient, and each
part keeps its own state and step count. (docs/decisions/0004-views-split-where-gradients-are-missing.md)
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from inspect import signature
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shoal.device import HOST
from shoal.errors import OptimizerError, UsageError
from shoal.optim.own_attributes import copied
from shoal.tier import ResidentSpan, fetched
from shoal.zero.layout import ALIGNMENT, Part
from shoal.zero.trainable_unit import TrainableUnit

__all__ = ["CAST_ELEMENTS", "STATE_IS_KEPT", "MasterView", "OffloadedStateView", "OptimizerFactory", "OptimizerGroups",
           "Views"]

CAST_ELEMENTS = 1 << 27
"""Elements of a step whose 16-bit gradients are cast to fp32 at once: 512 MiB."""

STATE_IS_KEPT = ("the engine keeps it in slices, and takes over no other values: clear it to begin the moments anew, load "
                 "one by optimizer.load_state_dict, or write one by "
                 "shoal.compat.parameters.safe_set_full_optimizer_state(param, value, 'exp_avg')")
"""The reason and the remedy in errors of writes to `optimizer.state`."""

OptimizerFactory = Callable[[list[dict[str, Any]]], Optimizer]
"""Builds an optimizer over parameter groups."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MasterView:
    """Elements [start, stop) of this rank's master, as one parameter of the optimizer.

    A view includes the padding after its last slot, so it is a whole number of vectors. A kernel would round the elements of
    a partial vector differently, and so differently for another number of ranks.
    """

    unit: TrainableUnit
    group: int
    start: int
    stop: int
    parts: tuple[Part, ...]
    """Its parts of slots; offsets count from the start of the rank's master."""
    parameter: nn.Parameter

    @property
    def part(self) -> range:
        return range(self.start, self.stop)

    def number_device(self, options: Mapping[str, object]) -> torch.device:
        """Return the device of state that is one number: the parameter's if a kernel of its group reads it, or the host.

        `options` are those of the group. (torch's fused and capturable steps refuse a number on the host.)
        """
        return self.parameter.device if options.get("fused") or options.get("capturable") else HOST

    def gradient(self, factor: float | Tensor, *, preserve: bool = False) -> Tensor:
        """Return the reduced gradient of its elements times `factor`, in the master's dtype.

        A gradient that is stored in that dtype is multiplied in place, unless `preserve` keeps it for another read.
        """
        gradient = self.unit.gradient.at_rest(self.part)
        wide = gradient.to(self.parameter.dtype)
        if not isinstance(factor, Tensor) and factor == 1:  # to compare a tensor would wait for the device
            return wide
        return wide * factor if preserve and wide is gradient else wide.mul_(factor)


class Views:
    """The master views of all units."""

    def __init__(self, units: list[TrainableUnit]):
        self.views = [view for unit in units for view in _views_of(unit)]

    def of_group(self, group: int) -> list[nn.Parameter]:
        """Return the parameters of one optimizer group."""
        return [view.parameter for view in self.views if view.group == group]

    def attach_grads(self, views: Sequence[MasterView], factor: float | Tensor) -> None:
        """Set `grad` of the parameters of `views` to their reduced gradients times `factor`."""
        for view in views:
            view.parameter.grad = view.gradient(factor)

    def detach_grads(self, views: Sequence[MasterView]) -> None:
        """Set `grad` of the parameters of `views` to None."""
        for view in views:
            view.parameter.grad = None

    def with_grad(self, slots_with_grad: dict[TrainableUnit, int], optimizer: Optimizer) -> list[MasterView]:
        """Split views between slots with and without a gradient; return those with one."""
        self.split(lambda view, part: slots_with_grad[view.unit] >> part.slot & 1, optimizer)
        return [view for view in self.views if slots_with_grad[view.unit] >> view.parts[0].slot & 1]

    def split(self, key: Callable[[MasterView, Part], Hashable], optimizer: Optimizer) -> None:
        """Split every view where `key` changes from one slot to the next."""
        views: list[MasterView] = []
        for view in self.views:
            keys = [key(view, part) for part in view.parts]
            views += _split_view(view, keys, optimizer) if len(set(keys)) > 1 else [view]
        self.views = views

    def states(self, optimizer: Optimizer) -> Iterator[tuple[MasterView, str, Tensor | float]]:
        """Yield every piece of optimizer state: (view, name, tensor of the view's shape or a scalar)."""
        for view in self.views:
            for name, value in optimizer.state.get(view.parameter, {}).items():
                if not isinstance(value, Tensor) or value.dim() == 0 or value.shape == view.parameter.shape:
                    yield view, name, value
                else:
                    raise OptimizerError(
                        f"{type(optimizer).__name__} keeps state '{name}' of shape {tuple(value.shape)} for slices of shape "
                        f"{tuple(view.parameter.shape)}: only elementwise state can be sharded")


def _views_of(unit: TrainableUnit) -> Iterator[MasterView]:
    """Cut a unit at the borders of optimizer groups, and at multiples of what is fetched, or of what is cast, at once."""
    granule = unit.state.granule or CAST_ELEMENTS
    parts = [piece for part in unit.layout.parts(unit.master_range) for piece in _pieces(part, granule)]

    def border(part: Part) -> tuple[int, int]:
        return unit.layout.slots[part.slot].group, part.offset // granule

    for (group, _), adjacent in groupby(parts, border):
        yield _view(unit, group, tuple(adjacent))


def _pieces(part: Part, granule: int) -> Iterator[Part]:
    """Cut a part at multiples of `granule` from the start of the rank's master."""
    start = part.start
    while start < part.stop:
        offset = part.offset + start - part.start
        stop = min(part.stop, start + granule - offset % granule)
        yield Part(slot=part.slot, start=start, stop=stop, offset=offset)
        start = stop


def _view(unit: TrainableUnit, group: int, parts: tuple[Part, ...]) -> MasterView:
    start, stop = parts[0].offset, parts[-1].offset + parts[-1].stop - parts[-1].start
    stop += -stop % ALIGNMENT
    return MasterView(unit=unit, group=group, start=start, stop=stop, parts=parts,
                      parameter=nn.Parameter(unit.master[start:stop]))


def _split_view(view: MasterView, keys: list[Hashable], optimizer: Optimizer) -> Iterator[MasterView]:
    """Split a view, and its state, where the key of its parts changes."""
    state = optimizer.state.pop(view.parameter, {})
    for _, adjacent in groupby(zip(view.parts, keys, strict=True), lambda pair: pair[1]):
        part = _view(view.unit, view.group, tuple(part for part, _ in adjacent))
        if state:
            cut = slice(part.start - view.start, part.stop - view.start)
            optimizer.state[part.parameter] = {
                name: _slice_state(value, view.parameter.shape, cut) for name, value in state.items()}
        yield part


def _slice_state(value: object, shape: torch.Size, cut: slice) -> object:
    if not isinstance(value, Tensor):
        return value
    return value[cut] if value.shape == shape else value.clone()


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerGroups:
    """The options of each optimizer group, and the group of each parameter.

    The user passes parameters as an optimizer instance, as groups, or as plain tensors. Groups keep their order and options;
    their parameters are replaced by views of this rank's masters.
    """

    options: tuple[dict[str, Any], ...]
    params: tuple[list[nn.Parameter], ...]
    """The parameters of each group, frozen ones too: what scripts find in `param_groups`."""
    group_of: dict[nn.Parameter, int]

    @classmethod
    def collect(cls, model: nn.Module, parameters: Iterable[Tensor | Mapping[str, Any]] | None) -> OptimizerGroups:
        """Divide `parameters` (tensors or group dicts; None or empty: all trainable ones of `model`) into groups."""
        if isinstance(parameters, str | Mapping) or not isinstance(parameters, Iterable | None):  # pyright: ignore[reportUnnecessaryIsInstance]  scripts pass modules
            raise UsageError(f"initialize: model_parameters: got a {type(parameters).__name__}; give model.parameters(), or "
                             f"a list of groups such as {{'params': [...], 'lr': 0.1}}")
        given: list[Any] = list(parameters) if parameters is not None else []
        given = given or [parameter for parameter in model.parameters() if parameter.requires_grad]
        if not given or not isinstance(given[0], Mapping):
            given = [{"params": given}]
        names = {parameter: name for name, parameter in model.named_parameters()}
        options: list[dict[str, Any]] = []
        members: list[list[nn.Parameter]] = []
        groups: dict[nn.Parameter, int] = {}
        for index, group in enumerate(given):
            if not isinstance(group, Mapping) or "params" not in group:
                got = f"keys {sorted(map(str, group))}" if isinstance(group, Mapping) else f"a {type(group).__name__}"
                raise UsageError(f"optimizer group {index}: got {got}; a group is a mapping with 'params', such as "
                                 f"{{'params': [...], 'lr': 0.1}}")
            params: Any = group["params"]
            members.append([])
            for entry in [params] if isinstance(params, Tensor) else params:
                parameter = entry[1] if isinstance(entry, tuple) else entry
                if not isinstance(parameter, nn.Parameter) or parameter not in names:
                    got = (f"a tensor of shape {tuple(parameter.shape)} that" if isinstance(parameter, Tensor)
                           else f"{parameter!r}, which")
                    raise UsageError(f"optimizer group {index}: got {got} is no parameter of the model; pass parameters of "
                                     f"the model given to initialize")
                if parameter in groups:
                    raise UsageError(f"optimizer group {index}: parameter '{names[parameter]}' appears a second time "
                                     f"(first in group {groups[parameter]}); each parameter belongs to one group")
                groups[parameter] = index
                members[-1].append(parameter)
            options.append({key: value for key, value in group.items() if key != "params"})
        return cls(options=tuple(options), params=tuple(members),
                   group_of={p: group for p, group in groups.items() if p.requires_grad})

    def build(self, factory: OptimizerFactory, views: Views) -> Optimizer:
        """Build the optimizer over the views of the masters."""
        return factory([{**options, "params": views.of_group(index)} for index, options in enumerate(self.options)])

    @staticmethod
    def check_new(optimizer: Optimizer) -> None:
        """Raise `UsageError` if the optimizer has stepped: its state would be that of whole parameters.

        Likewise if its `step` was replaced, which would step whole parameters past the engine.
        """
        replaced = vars(optimizer).get("step")
        if replaced is not None and not hasattr(replaced, "_wrapped_by_lr_sched"):
            raise UsageError(f"initialize: optimizer.step of the {type(optimizer).__name__} was replaced by "
                             f"{getattr(replaced, '__qualname__', replaced)!r}, and what it calls steps whole parameters; "
                             f"replace it after initialize: then optimizer.step() is the engine's step")
        if any(float(state.get("step", 1)) for state in optimizer.state.values()):
            raise UsageError(f"initialize: the {type(optimizer).__name__} has stepped already and holds state for whole "
                             f"parameters; pass it before its first step, or resume from a checkpoint")

    def copy_over(self, optimizer: Optimizer, views: Views) -> Optimizer:
        """Return a copy of the user's optimizer that steps the views; both have the same groups and options."""
        self.check_new(optimizer)
        inner = copied(optimizer)
        vars(inner)["state"] = defaultdict(dict)
        if optimizer.state:  # allocated at construction, as by Adagrad: allocate it for the views
            groups = [{**group, "params": views.of_group(index)} for index, group in enumerate(optimizer.param_groups)]
            inner.state.update(type(optimizer)(groups, **{name: value for name, value in optimizer.defaults.items()
                                                          if name in signature(type(optimizer)).parameters}).state)
        return inner

    def show_params(self, optimizer: Optimizer) -> None:
        """Put the model's parameters into the groups of `optimizer`, where a step puts the views instead (step_pass.py)."""
        for group, params in zip(optimizer.param_groups, self.params, strict=True):
            group["params"] = list(params)


class OffloadedStateView(Mapping[Tensor, dict[str, Any]]):
    """The optimizer's state as a read-only mapping: access returns copies of moments that are on disk.

    Writes to such a copy have no effect. `clear` begins the moments anew.
    """

    def __init__(self, views: Views, optimizer: Optimizer, finish_step: Callable[[], None], reset: Callable[[], None]):
        self._views = views
        self._state = optimizer.state
        self._finish_step = finish_step
        self.clear = reset

    def __getitem__(self, parameter: Tensor) -> dict[str, Any]:
        self._finish_step()
        if parameter not in self._state:
            raise KeyError("optimizer.state: no state by this tensor: the keys are this rank's slices of the masters. Read "
                           "it by optimizer.state_dict(), or by shoal.compat.parameters.safe_get_full_optimizer_state")
        state: dict[str, Any] = self._state[parameter]
        view = next((view for view in self._views.views if view.parameter is parameter), None)
        if view is None or view.unit.state.store.granule is None:
            return state
        return {kind: _read_copy(view, kind, value) for kind, value in state.items()}

    def __iter__(self) -> Iterator[Tensor]:
        self._finish_step()
        return iter(self._state)

    def __len__(self) -> int:
        self._finish_step()
        return len(self._state)


def _read_copy(view: MasterView, kind: str, value: Any) -> Any:
    span = view.unit.state.moments.get(kind)
    if span is None or isinstance(span, ResidentSpan):
        return value
    with fetched(span, view.start, view.stop, changed=False) as moment:
        return moment.clone()
