"""Two-pass step for layerwise optimizers, whose update is scaled by one trust ratio per parameter.

    measure       update the moments; sum the squares of weight and update over the elements that this rank owns
    reduce_sums   the ranks that hold a parameter add their sums in rank order
    apply         compute the update again, and subtract it times learning rate and trust ratio from the weights

Every element has one owner (mesh/parameter_groups.py), so it counts once, and every rank gets the same bits. The sums of
tensor-parallel slices are added over the tensor ranks as well. One message carries the sums of all parameters that the same
ranks hold: 16 bytes per parameter.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import Any

import torch
from torch import Tensor

from shoal.errors import OptimizerError
from shoal.mesh.parameter_groups import ParameterGroups
from shoal.native import step as native
from shoal.optim.compressed import CompressedOptimizer
from shoal.optim.lamb import CHUNK_ELEMENTS, Lamb
from shoal.optim.step_pass import (
    Factor,
    Options,
    StepPass,
    cast_view_to_weights,
    is_unhooked,
    moment_allocator,
    move_moments_to_store,
    supports_native,
    weight_output,
)
from shoal.optim.views import MasterView
from shoal.transport.collectives import Communicator
from shoal.zero.optimizer_state import StateAccess
from shoal.zero.trainable_unit import TrainableUnit

__all__ = ["Layerwise"]

MEASURE = StateAccess(writes_weights=False)
APPLY = StateAccess(reads_gradient=False, writes_moments=False)
APPLY_WITH_GRADIENT = StateAccess(writes_moments=False)
"""For look-ahead, which computes the update from the gradient again."""


class Layerwise:
    """The measuring pass, the reduction and the applying pass of one LAMB optimizer."""

    def __init__(self, optimizer: Lamb, parameter_groups: ParameterGroups, *, native: bool):
        """With `native`, both passes run in native code where it supports a view."""
        self._optimizer = optimizer
        # 1-bit LAMB keeps scalars per parameter, and its second pass reads the gradient again
        self._keeps_gradients = isinstance(optimizer, CompressedOptimizer)
        self._parameter_groups = parameter_groups
        self._native = native
        self._tensor_communicator = (parameter_groups.communicator("tensor") if parameter_groups.mesh.size("tensor") > 1
                                     else None)
        self._sums: dict[TrainableUnit, Tensor] = {}
        self._scales: dict[TrainableUnit, list[float]] = {}
        self.coefficients: dict[str, float] = {}
        """The trust ratios of the last step, by parameter name."""

    def measure(self, factor: Factor, options: Options) -> StepPass:
        """Return the pass that consumes the gradients, times `factor`."""
        if not is_unhooked(self._optimizer):
            raise OptimizerError(f"optimizer: {type(self._optimizer).__name__} has a step hook, or its step() was replaced; "
                                 f"neither is called when slices are stepped in two passes: remove them")
        return StepPass(step=self._measure, factor=factor, options=options, access=MEASURE)

    def apply(self, factor: Factor, options: Options) -> StepPass:
        """Return the pass that changes the weights, after `reduce_sums`; `factor` and `options` are those of `measure`."""
        access = APPLY_WITH_GRADIENT if self._keeps_gradients else APPLY
        return StepPass(step=self._apply, factor=factor, options=options, access=access)

    def reduce_sums(self, slots_with_grad: Mapping[TrainableUnit, int], views: Sequence[MasterView],
                    options: Options) -> None:
        """Add the measured sums over the ranks and compute the trust ratios; collective, over all trainable units.

        `slots_with_grad` is `GradStats.slots_with_grad`, and `views` are the views of these slots.
        """
        sums = {unit: self._sums.pop(unit, _zero_sums(unit)) for unit in slots_with_grad}
        for communicator in self._parameter_groups.communicators:
            _sum_over_ranks(communicator, sums, [unit for unit in sums if unit.communicator is communicator])
        if self._tensor_communicator is not None:
            _sum_over_ranks(self._tensor_communicator, sums,
                            [unit for unit in sums if not unit.replica_group.tensor_replicated])
        states: dict[tuple[TrainableUnit, int], list[dict[str, Any]]] = {}
        for view in views:
            for part in view.parts:
                states.setdefault((view.unit, part.slot), []).append(self._optimizer.state[view.parameter])
        self.coefficients, self._scales = {}, {}
        totals = iter(torch.cat([*sums.values()]).tolist() if sums else [])
        for unit in sums:
            self._scales[unit] = [0.0] * len(unit.layout.slots)
            for index, (slot, (first, second)) in enumerate(zip(unit.layout.slots, totals, strict=False)):
                if slots_with_grad[unit] >> index & 1:
                    group, local_states = options[slot.group], states.get((unit, index), [])
                    if not (local_states or self._keeps_gradients):
                        local_states = [{}]  # this rank steps no part of it, but has its sums
                    for state in local_states:
                        self.coefficients[slot.name] = self._optimizer.trust_ratio(group, state, first, second)
                    if local_states:
                        self._scales[unit][index] = float(group["lr"]) * self.coefficients[slot.name]

    def _measure(self, views: Sequence[MasterView], factor: Factor, options: Options) -> None:
        for view in views:
            unit, group = view.unit, options[view.group]
            own = range(unit.saved_range.start - unit.master_range.start, unit.saved_range.stop - unit.master_range.start)
            stretches = list(_stretches(view, own))
            squares = self._measure_view(view, stretches, factor, group)
            sums = self._sums.setdefault(unit, _zero_sums(unit))
            for stretch, row in zip(stretches, squares, strict=True):
                if stretch.slot is not None:
                    sums[stretch.slot] += row

    def _measure_view(self, view: MasterView, stretches: list[_Stretch], factor: Factor, group: dict[str, Any]) -> Tensor:
        """Update the moments; return the sums of squares of weight and update of each stretch, shape (stretches, 2)."""
        optimizer, weight = self._optimizer, view.parameter.detach()
        addend, addends = view.unit.transport.exact_addend(view.part) or (None, 1)
        if self._is_native(view):
            state = optimizer.state[view.parameter]
            optimizer.begin_step(group, state, moment_allocator(view))
            gradient = view.unit.gradient.at_rest(view.part)
            return native.measure(weight, [state["exp_avg"], state["exp_avg_sq"]], gradient, _ends(stretches),
                                  astuple(optimizer.constants(group, state)), factor=float(factor), addend=addend,
                                  addends=addends)
        gradient = view.gradient(factor, preserve=self._keeps_gradients)
        addend = None if addend is None else addend.to(gradient.dtype) * factor
        optimizer.update_moments(view.parameter, gradient, group, addend, addends)
        move_moments_to_store(view, optimizer)
        sums = torch.zeros(len(stretches), 2, dtype=torch.float64, device=weight.device)
        for row, stretch in zip(sums, stretches, strict=True):
            for part in _chunks(stretch, weight.device):
                row += optimizer.norm_squares(view.parameter, group, part)
        return sums

    def _apply(self, views: Sequence[MasterView], factor: Factor, options: Options) -> None:
        optimizer = self._optimizer
        for view in views:
            group, weight, scales = options[view.group], view.parameter.detach(), self._scales[view.unit]
            stretches = list(_stretches(view, range(view.stop)))
            lengths = [0.0 if stretch.slot is None else scales[stretch.slot] for stretch in stretches]
            if self._is_native(view):
                state, at_rest = optimizer.state[view.parameter], view.unit.gradient.at_rest
                with weight_output(view) as resting:
                    native.apply(weight, [state["exp_avg"], state["exp_avg_sq"]], _ends(stretches),
                                 astuple(optimizer.constants(group, state)), lengths, factor=float(factor), weight=resting,
                                 gradient=at_rest(view.part) if self._keeps_gradients else None)
                continue
            gradient = view.gradient(factor, preserve=True) if self._keeps_gradients else None
            for stretch, length in zip(stretches, lengths, strict=True):
                for part in _chunks(stretch, weight.device):
                    weight[part].add_(optimizer.compute_update(view.parameter, group, part, gradient), alpha=-length)
            cast_view_to_weights(view)

    def _is_native(self, view: MasterView) -> bool:
        return self._native and native.available() and supports_native(view)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stretch:
    """Elements [start, stop) of a view that belong to one slot, or to none: padding, or elements of another owner."""

    slot: int | None
    start: int
    stop: int


def _stretches(view: MasterView, within: range) -> Iterator[_Stretch]:
    """Cut a view into stretches. Elements outside `within`, in offsets of the rank's master, belong to no slot."""
    at = 0
    for part in view.parts:
        start = max(part.offset, within.start) - view.start
        stop = min(part.offset + part.stop - part.start, within.stop) - view.start
        if start < stop:
            if at < start:
                yield _Stretch(slot=None, start=at, stop=start)
            yield _Stretch(slot=part.slot, start=start, stop=stop)
            at = stop
    if at < view.stop - view.start:
        yield _Stretch(slot=None, start=at, stop=view.stop - view.start)


def _chunks(stretch: _Stretch, device: torch.device) -> Iterator[slice]:
    """Cut a stretch for torch: chunks that stay in the cache on the host, one slice on other devices."""
    step = CHUNK_ELEMENTS if device.type == "cpu" else stretch.stop - stretch.start
    for start in range(stretch.start, stretch.stop, step):
        yield slice(start, min(start + step, stretch.stop))


def _ends(stretches: list[_Stretch]) -> list[int]:
    return [stretch.stop for stretch in stretches]


def _zero_sums(unit: TrainableUnit) -> Tensor:
    """Return zero sums of squares of weight and update for each slot, shape (slots, 2), fp64."""
    return torch.zeros(len(unit.layout.slots), 2, dtype=torch.float64, device=unit.master.device)


def _sum_over_ranks(communicator: Communicator, sums: dict[TrainableUnit, Tensor], units: list[TrainableUnit]) -> None:
    """Replace the sums of `units` by their totals over the ranks of `communicator`, added in rank order."""
    if not units:
        return
    mine = torch.cat([sums[unit].flatten().to(unit.full.device) for unit in units])
    total, *others = communicator.gather_words(mine.view(torch.int64)).view(torch.float64)
    for other in others:
        total += other
    for unit, values in zip(units, total.split([sums[unit].numel() for unit in units]), strict=True):
        sums[unit] = values.view(-1, 2)
