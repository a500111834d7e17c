"""Steps in backward: a unit is stepped as soon as its gradient is reduced, while backward computes other gradients.

Such a step cannot be undone. `offload_optimizer.step_in_backward` therefore excludes every decision that depends on all
gradients: clipping, overflow checks and the refusal of unused parameters. (docs/decisions/0013-steps-within-backward.md)
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

from torch.optim import Optimizer

from shoal.interrupts import uninterrupted
from shoal.optim.step_pass import Options, StepFunction, StepPass, can_step_natively, native_step_fn, snapshot_options
from shoal.optim.step_scheduler import StepScheduler, began_in_backward
from shoal.optim.views import MasterView, Views
from shoal.zero.gradient import Gradient, OnReduced
from shoal.zero.sharded import ShardedModel
from shoal.zero.trainable_unit import TrainableUnit

__all__ = ["BackwardStepper"]


class BackwardStepper:
    """Steps a unit by `step_fn` when a backward pass within `stepping` has reduced its gradient."""

    def __init__(self, model: ShardedModel, views: Views, optimizer: Optimizer, scheduler: StepScheduler,
                 step_fn: StepFunction, *, native: bool, measures: bool):
        """With `measures`, compute the norm of each gradient, which `step` asks for."""
        self._model = model
        self._views = views
        self._optimizer = optimizer
        self._scheduler = scheduler
        self._step_fn = step_fn
        self._measures = measures
        self._native_step_fn = native_step_fn(optimizer) if native else None
        self._factor = 1.0
        self._options: Options | None = None
        self._units: dict[Gradient, tuple[TrainableUnit, list[MasterView]]] = {}
        self._spans_devices = any(unit.master.device != unit.full.device for unit in model.trainable)
        self._active = False
        self._stepped: list[Gradient] = []  # in the order of the last backward pass that stepped units

    @property
    def begun(self) -> bool:
        """Whether backward has begun the next step."""
        return any(began_in_backward(unit) for unit in self._model.trainable)

    @property
    def options(self) -> Options | None:
        """The optimizer options when the backward pass began; None if no step is under way."""
        return self._options

    @contextmanager
    def stepping(self, factor: float) -> Generator[None]:
        """Step units by their gradient times `factor` during the backward pass within the context.

        The pass ends an accumulation, reduces gradients, and is the only one before `step`. If it raises after the first
        unit has stepped, the step is incomplete and the weights are invalid.
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
                self._active = False
                self._scheduler.prefetch(())

    def _begin(self, factor: float) -> None:
        self._options, self._factor = snapshot_options(self._optimizer), factor
        self._units = {unit.gradient: (unit, []) for unit in self._model.trainable}
        for view in self._views.views:
            self._units[view.unit.gradient][1].append(view)
        self._scheduler.prefetch(view for gradient in self._stepped if gradient in self._units
                                 for view in self._units[gradient][1])
        self._stepped = []
        self._active = True

    @property
    def on_reduced(self) -> OnReduced | None:
        """The consumer of reduced gradients within `stepping`; None outside."""
        return self._step_unit if self._active else None

    def finish(self) -> None:
        """Clear the options: `step()` has completed the step."""
        self._options = None

    def _step_unit(self, gradient: Gradient) -> bool:
        """Step the unit of the reduced `gradient` and return True; return False where this pass may still read its weights.

        All slots have a gradient, so every autograd node that reads the weights has run on this rank. The gradient is
        reduced, so the same holds on the other ranks. `step()` takes the remaining units: those that re-entrant recompute
        reads in passes of its own, that stay gathered, or whose slots lack a gradient on this rank. It also takes those that
        this thread would have to step while it waits for gradients on their way to the host, and the device for this thread.
        """
        unit, views = self._units[gradient]
        complete = gradient.accumulator.slots_with_grad == (1 << len(unit.members)) - 1
        replicated = unit.replica_group.replicas is not None  # not yet reduced over the replicas
        in_use = (unit.reshards and not unit.is_released) or unit.memory.is_exposed
        assert self._options is not None
        native = self._native_step_fn is not None and can_step_natively(self._optimizer, views, self._options)
        waits = self._spans_devices and not native
        if not complete or gradient.late_recompute or replicated or in_use or waits:
            unit.residency.unpin()
            return False
        if self._measures:
            gradient.norm()  # before the step consumes the sum
        step = self._native_step_fn if native and self._native_step_fn is not None else self._step_fn
        self._stepped.append(gradient)
        step_pass = StepPass(step=step, factor=self._factor, options=self._options)
        self._scheduler.step_in_backward(unit, views, step_pass, deferred=native)
        return True
