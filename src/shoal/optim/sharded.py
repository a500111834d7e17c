"""A step: reduce, decide for all ranks, scale, let the optimizer step its slices, publish.

The optimizer is torch's own, or any that works element by element; it sees views of the masters that rest on this rank.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from shoal.errors import UsageError
from shoal.gradients import Verdict, judge
from shoal.optim.brought import Brought
from shoal.optim.pipeline import Pipeline
from shoal.optim.stepping import by_native, by_optimizer, is_native, options_of, settle
from shoal.optim.views import Views
from shoal.precision.loss_scale import LossScale
from shoal.zero.sharded import ShardedModel

CLIP_EPSILON = 1e-6
"""Keeps the clip coefficient finite; the value that torch.nn.utils.clip_grad_norm_ uses."""

SHOWN = 5
"""Parameters that an error names before it counts the rest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRules:
    """What decides whether and how far a step goes."""

    clipping: float
    """Largest global L2 norm; 0 leaves gradients alone."""
    check_overflow: bool
    """Skip a step whose gradients hold an infinity or NaN."""
    unused: bool = True
    """Whether a parameter may be without gradient."""
    at_once: int = sys.maxsize
    """Elements that one call of the inner optimizer steps, or one view."""
    native: bool = False
    """Step in one pass over memory where native code can."""
    ahead: int = 1
    """Pieces of state that are fetched while one is stepped."""
    behind: int = 2
    """Pieces that may still be on their way back meanwhile."""


class ShardedOptimizer:
    """The optimizer of one engine."""

    def __init__(self, model: ShardedModel, views: Views, optimizer: Optimizer, loss_scale: LossScale, rules: StepRules):
        self.optimizer = optimizer
        """The inner optimizer, over views of the masters."""
        self.views = views
        self.scaler = loss_scale
        self.rules = rules
        self.overflow = False
        """Whether the last step was skipped because the gradients overflowed."""
        self.norm: float | None = None
        """The global norm at the last step, before clipping and without the loss scale."""
        self._model = model
        self._norm_wanted = rules.clipping > 0 or rules.check_overflow
        step = by_optimizer(optimizer, views)
        self._stepping = Pipeline(by_native(optimizer, step) if rules.native else step, at_once=rules.at_once,
                                  ahead=rules.ahead, behind=rules.behind, lanes=model.residence.lanes)
        for view in views.views:
            assert view.unit.gradient is not None and view.unit.state is not None
            view.unit.gradient.measured = self._norm_wanted
            if optimizer.state.get(view.parameter):  # made when it was built
                view.unit.state.fetch(view.part).wait()
                settle(view, optimizer)
                view.unit.state.commit(view.part).wait()

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.optimizer.param_groups

    @property
    def state(self) -> Mapping[Tensor, dict[str, Any]]:
        """The inner optimizer's state; moments that rest on disk are read as they are looked at."""
        return Brought(self.views, self.optimizer, self.settle)

    @property
    def loss_scale(self) -> float:
        return self.scaler.value

    cur_scale = loss_scale

    @property
    def _global_grad_norm(self) -> float | None:
        return self.norm

    @property
    def pending(self) -> bool:
        """Whether a backward pass ran since the last step."""
        return any(unit.gradient is not None and unit.gradient.pending and unit.owed is None
                   for unit in self._model.trainable)

    @property
    def failed(self) -> bool:
        """Whether a step was taken in part, so that the weights are of no use."""
        return self._stepping.failed

    @torch.no_grad()
    def step(self) -> bool:
        """Apply the accumulated gradients; return whether the weights changed. Every rank decides alike."""
        units = self._model.trainable
        if not self.pending:
            raise UsageError(f"rank {self._model.communicator.rank}: step() without gradients; call "
                             f"engine.backward(loss) on the output of the engine since the last step")
        self._model.settle()  # what no forward has used since the last step travels still, out of the masters
        self._model.reducer.flush()
        verdict = judge(units, self._model.communicator, norm=self._norm_wanted)
        self.overflow = self.rules.check_overflow and verdict.overflow
        loss_scale = self.scaler.value
        self.norm = None if verdict.norm is None else verdict.norm / loss_scale
        try:
            if not self.rules.unused:
                _refuse_unused(verdict)
            self.scaler.update(self.overflow)
            if not self.overflow:
                views = self.views.touched(verdict.touched, self.optimizer)
                self._stepping.run(verdict.touched, views, self._factor(self.norm, loss_scale), options_of(self.optimizer),
                                   wait=self.rules.native and is_native(self.optimizer, views))
                vars(self.optimizer)["_opt_called"] = True  # torch's schedulers ask whether the optimizer has stepped
        finally:
            if not self.failed:
                self.zero_grad()
        if not self.overflow:
            self._model.run_ahead()
        return not self.overflow

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients that were accumulated, but for those of a step that is owed."""
        for unit in self._model.trainable:
            if unit.gradient is not None and unit.owed is None:
                unit.gradient.reset()

    def settle(self) -> None:
        """Take what the last step owes: units that rest on disk are stepped when their weights are asked for."""
        with torch.no_grad():
            self._stepping.settle()

    def state_dict(self) -> dict[str, Any]:
        """Raise `UsageError`: this rank's slices alone say nothing; the engine saves and loads all of them."""
        raise UsageError("optimizer.state_dict: the optimizer's state is sharded over the ranks; call "
                         "engine.save_checkpoint, which any number of ranks can load")

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Raise `UsageError`, as `state_dict` does."""
        raise UsageError("optimizer.load_state_dict: the optimizer's state is sharded over the ranks; call "
                         "engine.load_checkpoint")

    def backward(self, loss: Tensor, retain_graph: bool = False) -> None:
        """Run the backward of `loss` times the loss scale."""
        (loss * self.scaler.value).backward(retain_graph=retain_graph)

    def _factor(self, norm: float | None, loss_scale: float) -> float:
        clip = self.rules.clipping
        coefficient = min(1.0, clip / (norm + CLIP_EPSILON)) if clip > 0 and norm is not None else 1.0
        return coefficient / loss_scale


def _refuse_unused(verdict: Verdict) -> None:
    """Raise unless every parameter received a gradient on some rank."""
    unused = [slot.name for unit, touched in verdict.touched.items()
              for index, slot in enumerate(unit.layout.slots) if not touched >> index & 1]
    if unused:
        more = f" and {len(unused) - SHOWN} more" if len(unused) > SHOWN else ""
        raise UsageError(f"step: on no rank did the loss depend on {', '.join(unused[:SHOWN])}{more}, and "
                         f"zero_optimization.ignore_unused_parameters is false: use them in the forward, freeze them by "
                         f"requires_grad_(False) before initialize, or set it to true. The weights are as before this step")
