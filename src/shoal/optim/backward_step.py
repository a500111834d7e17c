"""A step that begins within backward: units are stepped while backward makes the gradients of others.

    certain     nothing is decided about all gradients together, and nobody looks before `step`: what is stepped, stays so
    attempted   the step is taken as if it would be neither clipped nor skipped, and undone if it is, if options have changed
                since, or if anybody asks for weights or state before `step`

An attempt that is undone costs more than it would have saved. So one is made only after a *calm* step, which was neither
clipped nor skipped; after one that was undone, of more such steps in a row. Only units that can be undone are attempted
(attempt.py), by native code, which leaves the gradient as it is.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

from torch.optim import Optimizer

from shoal.interrupts import unbroken, uninterrupted
from shoal.optim.rules import StepRules
from shoal.optim.speculative_step import SpeculativeStep
from shoal.optim.step_pass import (
    Options,
    StepPass,
    Stepping,
    is_native,
    is_unhooked,
    natively,
    options_of,
    same_options,
)
from shoal.optim.step_scheduler import StepScheduler
from shoal.optim.views import MasterView, Views
from shoal.zero.gradient import Gradient
from shoal.zero.sharded import ShardedModel
from shoal.zero.unit import Unit

__all__ = ["BackwardStepper"]

LONGEST = 64
"""Calm steps in a row that are waited for at most."""


class BackwardStepper:
    """Steps by `step` what the backward pass of a `context` has finished."""

    def __init__(self, model: ShardedModel, views: Views, optimizer: Optimizer, rules: StepRules, pipeline: StepScheduler,
                 step: Stepping):
        self._model = model
        self._views = views
        self._optimizer = optimizer
        self._rules = rules
        self._pipeline = pipeline
        self._step = step
        self._factor = 1.0
        self._options: Options = []  # of when the last backward began that may step
        self._offers = False  # whether what it finishes is taken
        self._attempt = SpeculativeStep(optimizer, model.residence)
        self._natively = natively(optimizer, self._attempt.states)
        self._calm = 0  # steps in a row that were neither clipped nor skipped
        self._wanted = 1  # of them before an attempt: twice as many after one that was undone, half after one that stood
        self._of: dict[Gradient, tuple[Unit, list[MasterView]]] = {}
        self._taken: list[Gradient] = []  # in the order of the last backward that stepped

    @property
    def begun(self) -> bool:
        """Whether backward has begun the next step."""
        return any(unit.stepped for unit in self._model.trainable)

    @property
    def options(self) -> Options:
        """The options of the next step: as they are now, or were when the backward began that may step for good."""
        return (not self._rules.attempted and self._options) or options_of(self._optimizer)

    @contextmanager
    def context(self, factor: float) -> Generator[None]:
        """Let the backward pass of the context step units whose gradient, times `factor`, it has finished.

        The pass ends an accumulation, reduces, and is the only one before `step`. An exception within it undoes what was
        attempted; a certain step that had begun is one that was taken in part.
        """
        self._options, self._factor = options_of(self._optimizer), factor
        if self._rules.attempted and self._calm < self._wanted:
            yield
            return
        with uninterrupted(), self._offered():
            yield

    @contextmanager
    def _offered(self) -> Generator[None]:
        """Step what backward has finished; after an exception there is no such step."""
        self._of = {unit.gradient: (unit, []) for unit in self._model.trainable if unit.gradient is not None}
        for view in self._views.views:
            assert view.unit.gradient is not None
            self._of[view.unit.gradient][1].append(view)
        self._pipeline.expect(view for gradient in self._taken if gradient in self._of for view in self._of[gradient][1])
        self._taken, self._offers = [], True
        self._model.offer(self._take)
        try:
            yield
        except BaseException as error:
            self._pipeline.expect(())
            self.retract()
            if self.begun:
                self._pipeline.fail(error)
            raise
        finally:
            self._model.offer(None)
            self._offers = False
            self._pipeline.expect(())

    def judged(self, *, calm: bool) -> None:
        """Take note of whether the step is to be taken as it was attempted, or would have been."""
        self._calm = self._calm + 1 if calm else 0

    def conclude(self, factor: float | None) -> None:
        """Let what was attempted stand if the step is to be the same: by `factor` (None: none is), and by its options."""
        if (factor == self._factor and self._attempt.begun and self._attempt.untouched and is_unhooked(self._optimizer)
                and same_options(self._options, options_of(self._optimizer))):
            self._wanted = max(1, self._wanted // 2)
            self._attempt.accept()
        self.retract()
        self._options = []

    @unbroken
    def retract(self) -> None:
        """Undo what was attempted, whenever that is; the rest of a backward under way steps nothing more."""
        if not self._attempt.begun:
            return
        self._calm, self._wanted, self._offers = 0, min(LONGEST, 2 * self._wanted), False
        try:
            self._pipeline.expect(())
            self._pipeline.give_up(self._model.trainable)
            self._attempt.undo()
        except BaseException as error:
            self._pipeline.fail(error)
            raise

    def _take(self, gradient: Gradient) -> bool:
        """Step the unit of `gradient`, the sum over the ranks, if nothing in this backward can need its weights any more.

        Its own nodes have run, as all of them lead to the gradients that are there. That the sum is there says as much of
        the other ranks. What autograd cannot know of is left to `step`: recompute in passes of its own, and units that
        others keep gathered; and gradients that another rank may have to add zeros to.
        """
        unit, views = self._of[gradient]
        assert unit.state is not None
        whole = gradient.addend.touched == (1 << len(unit.members)) - 1
        copied = unit.replica_group.replicas is not None  # the sum over the other copies is missing
        done = whole and not (gradient.again or copied or (unit.travels and not unit.is_released) or unit.lent is not None)
        beside = done and self._rules.native and is_native(self._optimizer, views, self._options)
        natively, attempted = self._natively if beside else None, self._rules.attempted
        if not done or (attempted and not (natively and self._offers and self._attempt.begin(unit, self.retract))):
            unit.stay.let_go()
            return False
        if self._rules.measures:
            gradient.norm()  # while it is in memory
        self._taken.append(gradient)
        sweep = StepPass(step=natively or self._step, factor=self._factor, options=self._options, attempted=attempted)
        self._pipeline.take(unit, views, sweep, beside=beside)
        return True
