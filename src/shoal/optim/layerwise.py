"""The step of slices whose update is multiplied by one number of the whole parameter, in two sweeps.

    measure   the moments take the gradient; weight and update are squared and summed, over the elements that this rank owns
    agree     the ranks that hold a parameter add their sums, in rank order
    apply     the weights change by the update, which is computed again, times the coefficient

Every element has one owner (mesh/parameter_groups.py), so it counts once, and every rank finds the same bits. What tensor
ranks cut is added up over them as well. One message carries the sums of all parameters that the same ranks hold: 16 bytes
for each.
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
from shoal.optim.lamb import AT_ONCE, Lamb
from shoal.optim.step_pass import Options, StepPass, fits, is_unhooked, moments_of, round_off, rounding, settle
from shoal.optim.views import MasterView
from shoal.transport.collectives import Communicator
from shoal.zero.optimizer_state import Use
from shoal.zero.trainable_unit import TrainableUnit

__all__ = ["Layerwise"]

MEASURE, APPLY, AHEAD = Use(weights=False), Use(gradient=False, moments=False), Use(moments=False)


class Layerwise:
    """What of a step is more than elementwise, for one optimizer."""

    def __init__(self, optimizer: Lamb, parameter_groups: ParameterGroups, *, native: bool):
        """With `native` the sweeps are passes of native code where it can take them."""
        self._optimizer = optimizer
        # Such an optimizer keeps numbers of each parameter, and gradients for the second pass
        self._keeps = isinstance(optimizer, CompressedOptimizer)
        self._parameter_groups = parameter_groups
        self._native = native
        self._cutting = parameter_groups.communicator("tensor") if parameter_groups.mesh.size("tensor") > 1 else None
        self._sums: dict[TrainableUnit, Tensor] = {}
        self._scales: dict[TrainableUnit, list[float]] = {}
        self.coefficients: dict[str, float] = {}
        """By parameter: those that the last step multiplied updates by."""

    def measure(self, factor: float, options: Options) -> StepPass:
        """Return the sweep that consumes the gradients, times `factor`."""
        if not is_unhooked(self._optimizer):
            raise OptimizerError(f"optimizer: {type(self._optimizer).__name__} has a step hook, or another step in place of "
                                 f"its own, which nobody calls: its step is taken in two sweeps over slices; remove them")
        return StepPass(step=self._measure, factor=factor, options=options, use=MEASURE)

    def apply(self, factor: float, options: Options) -> StepPass:
        """Return the sweep that changes the weights, once the ranks agree; `factor` and `options` are those of `measure`."""
        return StepPass(step=self._apply, factor=factor, options=options, use=AHEAD if self._keeps else APPLY)

    def agree(self, touched: Mapping[TrainableUnit, int], views: Sequence[MasterView], options: Options) -> None:
        """Add up what the ranks have measured; all ranks call it, with all units that they train.

        `touched` has a bit for each slot that was stepped, and `views` are of those.
        """
        sums = {unit: self._sums.pop(unit, _nothing(unit)) for unit in touched}
        for communicator in self._parameter_groups.communicators:
            _add_up(communicator, sums, [unit for unit in sums if unit.communicator is communicator])
        if self._cutting is not None:
            _add_up(self._cutting, sums, [unit for unit in sums if not unit.replica_group.tensor_replicated])
        states: dict[tuple[TrainableUnit, int], list[dict[str, Any]]] = {}
        for view in views:
            for part in view.parts:
                states.setdefault((view.unit, part.slot), []).append(self._optimizer.state[view.parameter])
        self.coefficients, self._scales = {}, {}
        for unit, found in sums.items():
            self._scales[unit] = [0.0] * len(unit.layout.slots)
            for index, (slot, (first, second)) in enumerate(zip(unit.layout.slots, found.tolist(), strict=True)):
                if touched[unit] >> index & 1:
                    group, here = options[slot.group], states.get((unit, index), [])
                    if not (here or self._keeps):
                        here = [{}]  # this rank steps no part of it, but knows as much of it as those that do
                    for state in here:
                        self.coefficients[slot.name] = self._optimizer.coefficient(group, state, first, second)
                    if here:
                        self._scales[unit][index] = float(group["lr"]) * self.coefficients[slot.name]

    def _measure(self, some: Sequence[MasterView], factor: float, options: Options) -> None:
        for view in some:
            unit, group = view.unit, options[view.group]
            own = range(unit.span.start - unit.master_span.start, unit.span.stop - unit.master_span.start)
            stretches = list(_stretches(view, own))
            found = self._measured(view, stretches, factor, group)
            sums = self._sums.setdefault(unit, _nothing(unit))
            for stretch, row in zip(stretches, found, strict=True):
                if stretch.slot is not None:
                    sums[stretch.slot] += row

    def _measured(self, view: MasterView, stretches: list[_Stretch], factor: float, group: dict[str, Any]) -> Tensor:
        """Let the moments take the gradient, and return the two sums of squares of each stretch, of no slot anything."""
        optimizer, weight = self._optimizer, view.parameter.detach()
        addend, addends = view.unit.transport.exact_addend(view.part) or (None, 1)
        if self._is_native(view):
            state = optimizer.state[view.parameter]
            optimizer.begin(group, state, moments_of(view))
            gradient = view.unit.gradient.at_rest(view.part)
            return native.measure(weight, [state["exp_avg"], state["exp_avg_sq"]], gradient, _ends(stretches),
                                  astuple(optimizer.constants(group, state)), factor=factor, addend=addend, addends=addends)
        gradient = view.gradient(factor, again=self._keeps)
        addend = None if addend is None else addend.to(gradient.dtype) * factor
        optimizer.advance(view.parameter, gradient, group, addend, addends)
        settle(view, optimizer)
        sums = torch.zeros(len(stretches), 2, dtype=torch.float64, device=weight.device)
        for row, stretch in zip(sums, stretches, strict=True):
            for part in _at_once(stretch, weight.device):
                row += optimizer.sums(view.parameter, group, part)
        return sums

    def _apply(self, some: Sequence[MasterView], factor: float, options: Options) -> None:
        optimizer = self._optimizer
        for view in some:
            group, weight, scales = options[view.group], view.parameter.detach(), self._scales[view.unit]
            stretches = list(_stretches(view, range(view.stop)))
            lengths = [0.0 if stretch.slot is None else scales[stretch.slot] for stretch in stretches]
            if self._is_native(view):
                state, at_rest = optimizer.state[view.parameter], view.unit.gradient.at_rest
                with rounding(view) as rounded:
                    native.apply(weight, [state["exp_avg"], state["exp_avg_sq"]], _ends(stretches),
                                 astuple(optimizer.constants(group, state)), lengths, factor=factor, weight=rounded,
                                 gradient=at_rest(view.part) if self._keeps else None)
                continue
            gradient = view.gradient(factor, again=True) if self._keeps else None
            for stretch, length in zip(stretches, lengths, strict=True):
                for part in _at_once(stretch, weight.device):
                    weight[part].add_(optimizer.direction(view.parameter, group, part, gradient), alpha=-length)
            round_off(view)

    def _is_native(self, view: MasterView) -> bool:
        return self._native and native.available() and fits(view)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stretch:
    """Elements [start, stop) of a view, of one slot or of none that counts."""

    slot: int | None
    start: int
    stop: int


def _stretches(view: MasterView, within: range) -> Iterator[_Stretch]:
    """Cover a view; what of a slot does not lie `within`, counted as the master's elements are, does not count."""
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


def _at_once(stretch: _Stretch, device: torch.device) -> Iterator[slice]:
    """Cut a stretch for torch: small parts on the host, the whole of it elsewhere."""
    step = AT_ONCE if device.type == "cpu" else stretch.stop - stretch.start
    for start in range(stretch.start, stretch.stop, step):
        yield slice(start, min(start + step, stretch.stop))


def _ends(stretches: list[_Stretch]) -> list[int]:
    return [stretch.stop for stretch in stretches]


def _nothing(unit: TrainableUnit) -> Tensor:
    """Return for each slot two sums of nothing: the squares of its weight, and of its update."""
    return torch.zeros(len(unit.layout.slots), 2, dtype=torch.float64, device=unit.master.device)


def _add_up(communicator: Communicator, sums: dict[TrainableUnit, Tensor], units: list[TrainableUnit]) -> None:
    """Let the sums of `units` be those of all ranks of `communicator`, added in the order of the ranks."""
    if not units:
        return
    mine = torch.cat([sums[unit].flatten().to(unit.full.device) for unit in units])
    total, *others = communicator.gather_words(mine.view(torch.int64)).view(torch.float64)
    for other in others:
        total += other
    for unit, found in zip(units, total.split([sums[unit].numel() for unit in units]), strict=True):
        sums[unit] = found.view(-1, 2)
