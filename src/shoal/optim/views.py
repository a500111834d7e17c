"""What the optimizer sees: one contiguous view of the master per (unit, optimizer group).

Few, large tensors suit any elementwise optimizer; its moments have the view's shape, and are sharded like it. Plain
PyTorch skips a parameter that received no gradient: so that skipping stays exact, a view whose slots differ in whether
they received one is split where they differ, for good, and each part keeps its own state and step count.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shoal.errors import OptimizerError
from shoal.zero.layout import ALIGNMENT, Part
from shoal.zero.trainable_unit import TrainableUnit


@dataclass(frozen=True, slots=True, kw_only=True)
class MasterView:
    """Elements [start, stop) of the master that rests on this rank, as the optimizer's parameter.

    With the padding behind its last slot: a view is whole vectors, so that no kernel takes the last elements one by one, and
    rounds them another way where a master is cut in other places.
    """

    unit: TrainableUnit
    group: int
    start: int
    stop: int
    parts: tuple[Part, ...]
    """The parts of slots in it; offsets count from the beginning of the rank's master."""
    parameter: nn.Parameter

    @property
    def part(self) -> range:
        return range(self.start, self.stop)

    def gradient(self, factor: float, *, again: bool = False) -> Tensor:
        """Return the reduced gradient of its elements times `factor`, in the master's dtype.

        Where it rests in that dtype, it is multiplied where it rests, unless somebody reads it `again`.
        """
        gradient = self.unit.gradient.at_rest(self.part)
        wide = gradient.to(self.parameter.dtype)
        if factor == 1:
            return wide
        return wide * factor if again and wide is gradient else wide.mul_(factor)


class Views:
    """The masters of all units, cut for the optimizer."""

    def __init__(self, units: list[TrainableUnit], groups: int):
        self.groups = groups
        self.views = [view for unit in units for view in _cut(unit)]

    def of_group(self, group: int) -> list[nn.Parameter]:
        """Return the parameters of one optimizer group."""
        return [view.parameter for view in self.views if view.group == group]

    def lend(self, views: Sequence[MasterView], factor: float) -> None:
        """Give `views` their reduced gradients times `factor`, for the optimizer to step."""
        for view in views:
            view.parameter.grad = view.gradient(factor)

    def take_back(self, views: Sequence[MasterView]) -> None:
        """Take the gradients of `views` back."""
        for view in views:
            view.parameter.grad = None

    def touched(self, touched: dict[TrainableUnit, int], optimizer: Optimizer) -> list[MasterView]:
        """Return the views of the slots that received a gradient, after splitting those where slots differ in that."""
        self.regroup(lambda view, part: touched[view.unit] >> part.slot & 1, optimizer)
        return [view for view in self.views if touched[view.unit] >> view.parts[0].slot & 1]

    def regroup(self, key: Callable[[MasterView, Part], Hashable], optimizer: Optimizer) -> None:
        """Split every view where `key` changes from one slot to the next."""
        views: list[MasterView] = []
        for view in self.views:
            keys = [key(view, part) for part in view.parts]
            views += _divide(view, keys, optimizer) if len(set(keys)) > 1 else [view]
        if len(views) == len(self.views):
            return
        self.views = views
        for group, options in enumerate(optimizer.param_groups[:self.groups]):
            options["params"] = self.of_group(group)

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


def _cut(unit: TrainableUnit) -> Iterator[MasterView]:
    """Cut a unit at the borders of optimizer groups, and where its state is brought piece by piece, between the pieces."""
    parts = list(unit.layout.parts(unit.master_span))
    if (granule := unit.state.granule) is not None:
        parts = [piece for part in parts for piece in _pieces(part, granule)]

    def border(part: Part) -> tuple[int, int]:
        return unit.layout.slots[part.slot].group, part.offset // granule if granule else 0

    for (group, _), found in groupby(parts, border):
        yield _view(unit, group, tuple(found))


def _pieces(part: Part, granule: int) -> Iterator[Part]:
    """Cut a part at multiples of `granule` from the beginning of the rank's master."""
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


def _divide(view: MasterView, keys: list[Hashable], optimizer: Optimizer) -> Iterator[MasterView]:
    """Split a view where the key of its parts changes; the state is divided with it."""
    state = optimizer.state.pop(view.parameter, {})
    for _, found in groupby(zip(view.parts, keys, strict=True), lambda pair: pair[1]):
        part = _view(view.unit, view.group, tuple(part for part, _ in found))
        if state:
            cut = slice(part.start - view.start, part.stop - view.start)
            optimizer.state[part.parameter] = {
                name: _cut_state(value, view.parameter.shape, cut) for name, value in state.items()}
        yield part


def _cut_state(value: object, shape: torch.Size, cut: slice) -> object:
    if not isinstance(value, Tensor):
        return value
    return value[cut] if value.shape == shape else value.clone()
