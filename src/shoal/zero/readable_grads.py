"""`p.grad` between a backward pass and the step: the gradient that the step consumes, for scripts to read and to change.

    on one rank, and at stage 0    a view of the buffer where the gradient rests
    on several, at stages 1, 2     gathered at the first read, of all parameters: a collective call
    before it is reduced           not on several ranks: within an accumulation at stages 0 and 1, and after `no_sync`

The engine takes every gradient from the attribute as autograd writes it. So from the end of a pass to the step the attribute
that a script sees is another one (grad_attribute.py). Where the pass gave none, it is the same one: what a script sets there
the step collects. A forward begins with plain parameters, for which compiled code was
made. Where the gradient is not available, reading it raises an error that says what to call.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from shoal.errors import CollectiveTimeout, UsageError
from shoal.zero.grad_attribute import hide_grads, raw_grad, set_raw_grad, show_grads
from shoal.zero.trainable_unit import TrainableUnit
from shoal.zero.unit import Unit

__all__ = ["ReadableGrads"]


class ReadableGrads:
    """The gradients of the units of one root."""

    def __init__(self, units: Sequence[Unit]):
        self._units = [unit for unit in units if isinstance(unit, TrainableUnit)]
        self._places = {member.parameter: (unit, slot) for unit in self._units for slot, member in enumerate(unit.members)}
        self._views: dict[TrainableUnit, list[Tensor]] = {}
        self._gathered = self._shown = False
        self._refusal: str | None = None  # None: no backward pass since the last step

    def open(self, refusal: str, *, shown: bool) -> None:
        """Let scripts read the gradients of the pass that has ended; with a `refusal` raise it where they do.

        One that is not `shown` yet is at the end of the forward that calls it: `autograd.grad`, for forces.
        """
        self._refusal = refusal
        if shown:
            self.show()

    def close(self, *, keep: bool) -> None:
        """Let scripts read no more: a pass or a step begins. With `keep` what they wrote counts."""
        self.hide()
        self._refusal = None
        self.end_gather(keep=keep)

    def end_gather(self, *, keep: bool) -> None:
        """Take over what was written, if `keep`; the next read gathers again."""
        views, self._views, self._gathered = self._views, {}, False
        for unit in views:
            if keep:
                for view, place in zip(views[unit], unit.layout.views(unit.gradient.gathered()), strict=True):
                    if view.data_ptr() != place.data_ptr():  # `p.grad.data = value`
                        place.copy_(view)
            unit.gradient.end_gather(keep=keep)

    def show(self) -> None:
        """Have scripts find the gradients, if a pass has ended that no step has consumed."""
        if self._refusal is not None and not self._shown:
            self._shown = True
            for unit in self._units:
                unit.serve_grads(self)
            show_grads(self._places)

    def hide(self) -> None:
        """Give the parameters their own class back."""
        if self._shown:
            self._shown = False
            for unit in self._units:
                unit.serve_grads(None)
            hide_grads(self._places)

    def read(self, parameter: nn.Parameter) -> Tensor | None:
        """Return the gradient of `parameter`, None where it has none. Raises `UsageError` where it is not available."""
        unit, slot = self._gather(parameter)
        views = self._views.get(unit)
        if views is None or not (unit.gradient.accumulator.has_slot(slot) or (unit.gradient.has_sum and views[slot].any())):
            return raw_grad(parameter)
        return views[slot]

    @torch.no_grad()
    def write(self, parameter: nn.Parameter, value: Tensor | None) -> None:
        """Replace the gradient of `parameter`; None: the step skips it, unless another rank has a gradient of it."""
        unit, slot = self._gather(parameter)
        name = unit.members[slot].name
        if value is not None and value.shape != parameter.shape:
            raise UsageError(f"p.grad of '{name}': got shape {tuple(value.shape)}; set one of {tuple(parameter.shape)}")
        if unit not in self._views:
            set_raw_grad(parameter, value)
            return
        set_raw_grad(parameter, None)
        view = self._views[unit][slot]
        if value is None:
            view.zero_()
        elif value is not view:
            view.copy_(value)
        unit.gradient.accumulator.set_slot(slot, present=value is not None)

    def _gather(self, parameter: nn.Parameter) -> tuple[TrainableUnit, int]:
        """Gather the gradients of all units, the same on every rank, whichever of them a script reads first.

        Returns the place of `parameter`.
        """
        unit, slot = self._places[parameter]
        if self._refusal:
            raise UsageError(f"p.grad of '{unit.members[slot].name}' {self._refusal}")
        if not self._gathered:
            try:
                self._views = {each: each.layout.views(each.gradient.gathered()) for each in self._units
                               if each.gradient.can_gather}
                self._gathered = True
            except CollectiveTimeout as error:
                error.add_note("a script read p.grad, for which all ranks gather the gradients at stages 1 and 2: read it "
                               "on every rank, or train at zero_optimization.stage 0")
                raise
        return unit, slot
