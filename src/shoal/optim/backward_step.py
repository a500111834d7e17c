"""Steps that begin within backward: a unit is stepped while backward computes the gradients of other units.

Nothing undoes such a step. It is taken only where no decision depends on all gradients together: no clipping, no overflow
check, no refusal of unused parameters (`offload_optimizer.step_in_backward`; the configuration refuses the others).
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

from torch.optim import Optimizer

from shoal.interrupts import uninterrupted
from shoal.optim.step_pass import Options, StepPass, Stepping, is_native, natively, options_of
from shoal.optim.step_scheduler import StepScheduler, began_in_backward
from shoal.optim.views import MasterView, Views
from shoal.zero.gradient import Gradient, OnReduced
from shoal.zero.sharded import ShardedModel
from shoal.zero.trainable_unit import TrainableUnit

__all__ = ["BackwardStepper"]


class BackwardStepper:
    """Steps by `step` the units whose gradients the backward pass of a `context` has reduced."""

    def __init__(self, model: ShardedModel, views: Views, optimizer: Optimizer, scheduler: StepScheduler, step: Stepping, *,
                 native: bool):
        self._model = model
        self._views = views
        self._optimizer = optimizer
        self._scheduler = scheduler
        self._step = step
        self._natively = natively(optimizer) if native else None
        self._factor = 1.0
        self._options: Options | None = None
        self._units: dict[Gradient, tuple[TrainableUnit, list[MasterView]]] = {}
        self._offering = False
        self._taken: list[Gradient] = []  # in the order of the last backward that stepped

    @property
    def begun(self) -> bool:
        """Whether backward has begun the next step."""
        return any(began_in_backward(unit) for unit in self._model.trainable)

    @property
    def options(self) -> Options | None:
        """The options of the step that backward has begun, as they were when that backward began."""
        return self._options

    @contextmanager
    def context(self, factor: float) -> Generator[None]:
        """Let the backward pass of the context step units by their gradient times `factor`.

        The pass ends an accumulation, reduces, and is the only one before `step`. After an exception within it a step that
        had begun is one that was taken in part: the weights are of no use.
        """
        with uninterrupted():
            self._begin(factor)
            try:
                yield
            except BaseException as error:
                if self.begun:
                    self._scheduler.fail(error)
                raise
            finally:
                self._offering = False
                self._scheduler.expect(())

    def _begin(self, factor: float) -> None:
        self._options, self._factor = options_of(self._optimizer), factor
        self._units = {unit.gradient: (unit, []) for unit in self._model.trainable}
        for view in self._views.views:
            self._units[view.unit.gradient][1].append(view)
        self._scheduler.expect(view for gradient in self._taken if gradient in self._units
                               for view in self._units[gradient][1])
        self._taken = []
        self._offering = True

    @property
    def on_reduced(self) -> OnReduced | None:
        """The consumer of the sums of a backward pass within `context`; None outside."""
        return self._take if self._offering else None

    def finish(self) -> None:
        """Forget the options of the step that `step()` has ended."""
        self._options = None

    def _take(self, gradient: Gradient) -> bool:
        """Step the unit of `gradient`, the sum over the ranks, if nothing in this backward can need its weights any more.

        Its own nodes have run, as all of them lead to the gradients that are there. That the sum is there says as much of
        the other ranks. `step` takes the units of which autograd cannot know that: those that recompute reads in passes of
        its own, that others keep gathered, or whose gradient another rank may complete with zeros.
        """
        unit, views = self._units[gradient]
        whole = gradient.accumulator.slots_with_grad == (1 << len(unit.members)) - 1
        replicated = unit.replica_group.replicas is not None  # the sum over the other replicas is missing
        in_use = (unit.reshards and not unit.is_released) or unit.is_exposed
        if not whole or gradient.late_recompute or replicated or in_use:
            unit.residency.unpin()
            return False
        assert self._options is not None
        beside = self._natively is not None and is_native(self._optimizer, views, self._options)
        step = self._natively if beside and self._natively is not None else self._step
        self._taken.append(gradient)
        self._scheduler.take(unit, views, StepPass(step=step, factor=self._factor, options=self._options), beside=beside)
        return True
