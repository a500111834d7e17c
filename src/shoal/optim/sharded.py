"""A step: reduce, decide for all ranks, scale, let the optimizer step its slices, publish.

The optimizer is torch's own, or any that works element by element, or LAMB; it sees views of the masters that rest on
this rank.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from shoal.errors import UsageError
from shoal.log import warn_once
from shoal.mesh.parameter_groups import ParameterGroups
from shoal.optim.backward_step import BackwardStepper
from shoal.optim.compressed import CompressedOptimizer
from shoal.optim.grad_stats import GradStats, reduce_grad_stats
from shoal.optim.lamb import Lamb
from shoal.optim.layerwise import Layerwise
from shoal.optim.masks import leave_out
from shoal.optim.onebit import CompressedAdam
from shoal.optim.onebit_lamb import OneBitLamb
from shoal.optim.step_pass import (
    Options,
    StepPass,
    by_native,
    by_optimizer,
    by_signs,
    is_native,
    natively,
    options_of,
    settle,
)
from shoal.optim.step_scheduler import StepScheduler
from shoal.optim.views import OffloadedStateView, Views
from shoal.precision.loss_scale import LossScale
from shoal.tier.store import WRITE_AHEAD
from shoal.zero.gradient import OnReduced
from shoal.zero.optimizer_state import Use
from shoal.zero.sharded import ShardedModel
from shoal.zero.trainable_unit import TrainableUnit

__all__ = ["MasterWriteCheck", "ShardedOptimizer", "StepRules"]

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
    in_backward: bool = False
    """Step a unit while backward goes on with others, as soon as its gradient is there."""
    waiting: int = WRITE_AHEAD
    """Bytes of such units that may be in memory at once."""

    @property
    def measures(self) -> bool:
        """Whether a step needs the norm of all gradients."""
        return self.clipping > 0 or self.check_overflow


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
        self._written = MasterWriteCheck(model.trainable)
        if isinstance(optimizer, CompressedAdam):
            self._step = by_signs(optimizer, native=rules.native)
        else:
            step = by_optimizer(optimizer, views)
            self._step = by_native(optimizer, step) if rules.native else step
        self._natively = natively(optimizer)
        if isinstance(optimizer, OneBitLamb):  # which keeps two numbers of each parameter
            views.regroup(lambda view, part: part.slot, optimizer)
        self._layers = (Layerwise(optimizer, model.parameter_groups, native=rules.native) if isinstance(optimizer, Lamb)
                        else None)
        self._stepping = StepScheduler(model.trainable, at_once=rules.at_once, ahead=rules.ahead, behind=rules.behind,
                                  waiting=rules.waiting, lanes=model.storage.lanes)
        self._backward_stepper = BackwardStepper(model, views, optimizer, self._stepping, self._step,
                                                 native=rules.native) if rules.in_backward else None
        if isinstance(optimizer, CompressedOptimizer):
            optimizer.set_exchanging(model.parameter_groups.state_shards > 1)
        self.route()
        for view in views.views:
            view.unit.gradient.measure(rules.measures)
            if optimizer.state.get(view.parameter):  # made when it was built
                moments = Use(gradient=False, weights=False)
                view.unit.state.fetch(view.part, moments).wait()
                settle(view, optimizer)
                view.unit.state.commit(view.part, moments).wait()

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.optimizer.param_groups

    @property
    def state(self) -> Mapping[Tensor, dict[str, Any]]:
        """The inner optimizer's state; moments that rest on disk are read as they are looked at."""
        return OffloadedStateView(self.views, self.optimizer, self._show)

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
        return self.begun or any(unit.gradient.pending and not unit.is_owed
                                 for unit in self._model.trainable)

    @property
    def begun(self) -> bool:
        """Whether backward has begun the next step."""
        return self._backward_stepper is not None and self._backward_stepper.begun

    @property
    def failed(self) -> bool:
        """Whether a step was taken in part, so that the weights are of no use."""
        return self._stepping.failed

    @torch.no_grad()
    def step(self) -> bool:
        """Apply the accumulated gradients; return whether the weights changed. Every rank decides alike."""
        units = self._model.trainable
        self._stepping.check()
        parameter_groups = self._model.parameter_groups
        if units and not self.pending:
            raise UsageError(f"rank {self._model.parameter_groups.world.rank}: step() without gradients; call "
                             f"engine.backward(loss) on the output of the engine since the last step")
        if not self._joined:
            return self._stand_still()
        options = (self._backward_stepper and self._backward_stepper.options) or options_of(self.optimizer)
        verdict = self._judge(units)
        self.overflow = self.rules.check_overflow and verdict.overflow
        loss_scale = self.scaler.value
        scale = loss_scale * self._joined
        self.norm = None if verdict.norm is None else verdict.norm / scale
        factor = self._factor(self.norm, scale)
        try:
            if not self.rules.unused:
                _refuse_unused(verdict, parameter_groups)
            self.scaler.update(self.overflow)
            if not self.overflow:
                self._change(verdict.touched, factor, options)
                self._count()
            elif isinstance(self.optimizer, CompressedOptimizer):
                self.optimizer.drop()
        except BaseException as error:
            if self.begun:  # backward has stepped some units, and the others are not stepped
                self._stepping.fail(error)
            raise
        finally:
            if self._backward_stepper is not None:
                self._backward_stepper.finish()
            if not self.failed:
                self.zero_grad()
                self.rescale(self.scaler.value / loss_scale)
        self.route()
        if not self.overflow:
            self._model.run_ahead()
        return not self.overflow

    def _judge(self, units: list[TrainableUnit]) -> GradStats:
        """Return what all ranks know of the gradients of `units`."""
        self._model.settle()  # what no forward has used since the last step travels still, out of the masters
        self._written.check()
        self._model.flush()
        if isinstance(self.optimizer, CompressedOptimizer):
            leave_out(self.optimizer, units, self.views.views, self._model.cuts)
        return reduce_grad_stats(units, self._model.parameter_groups, norm=self.rules.measures,
                                 device=self._model.storage.device)

    def _show(self) -> None:
        """Have the state be that of the last step, for somebody to look at."""
        self.check_not_begun("optimizer.state")
        self.settle()

    def _stand_still(self) -> bool:
        """Let the gradients wait for a later step; count this one."""
        for unit in self._model.trainable:
            unit.gradient.carry_over()
        self.overflow = False
        self._count()
        self.route()
        return True

    def _count(self) -> None:
        """Note that a step was applied."""
        vars(self.optimizer)["_opt_called"] = True  # torch's schedulers ask whether the optimizer has stepped
        if isinstance(self.optimizer, CompressedOptimizer):
            self.optimizer.count_step()

    @property
    def _joined(self) -> int:
        """Of how many steps the gradient is."""
        if not isinstance(self.optimizer, CompressedOptimizer):
            return 1
        return max(map(self.optimizer.due, self.optimizer.param_groups))

    def _change(self, touched: dict[TrainableUnit, int], factor: float, options: Options) -> None:
        """Step what received gradients, times `factor`, and publish it."""
        views = self.views.touched(touched, self.optimizer)
        native = self.rules.native and is_native(self.optimizer, views, options)
        sweep = StepPass(step=(native and self._natively) or self._step, factor=factor, options=options)
        if (layers := self._layers) is not None:
            self._stepping.measure(touched, views, layers.measure(factor, options),
                                   lambda: layers.agree(touched, views, options))
            sweep = layers.apply(factor, options)
        for unit, mask in touched.items():
            unit.versions.mark(slot for slot in range(len(unit.members)) if mask >> slot & 1)
        self._stepping.run(touched, views, sweep, wait=native)

    def within_backward(self) -> AbstractContextManager[None]:
        """Return the context of a backward pass that steps units whose gradient it has finished (backward_step.py)."""
        assert self._backward_stepper is not None
        return self._backward_stepper.context(self._factor(None, self.scaler.value))

    @property
    def on_reduced(self) -> OnReduced | None:
        """The consumer of the sums of the present backward pass, where it steps units; None elsewhere."""
        return None if self._backward_stepper is None else self._backward_stepper.on_reduced

    def check_not_begun(self, call: str) -> None:
        """Raise `UsageError` for `call`, which comes before the next step, if backward has begun that; `TierError` if the
        last step was taken in part.
        """
        self._stepping.check()
        if self.begun:
            raise UsageError(f"{call}: backward has begun the next step already (offload_optimizer.step_in_backward); call "
                             f"engine.step() first, once after each backward that ends an accumulation")

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients that were accumulated, but for those of a step that is owed."""
        self.check_not_begun("zero_grad")
        with torch._C.DisableTorchFunctionSubclass():  # pyright: ignore[reportPrivateUsage]  reading them would bring weights
            for unit in self._model.trainable:
                if not (unit.is_owed or unit.gradient.is_reset):
                    unit.gradient.reset()
                for member in unit.members:  # of a pass that was interrupted
                    member.parameter.grad = None

    def route(self) -> None:
        """Let the next step travel as the optimizer says."""
        if isinstance(self.optimizer, CompressedOptimizer):
            wire = self.optimizer.wire()
            self._model.set_compression(gradient=wire.gradient, weights=wire.weights, skip_sync=wire.still)

    def rescale(self, factor: float) -> None:
        """Let what was not sent of the gradients follow the loss scale, which has changed by `factor`."""
        for unit in self._model.trainable:
            unit.gradient.accumulator.rescale(factor)

    def settle(self) -> None:
        """Take what the last step owes, and let it rest: units on disk are stepped when their weights are asked for."""
        self._stepping.settle()
        for unit in self._model.trainable:
            unit.residency.unpin_stepped()

    def close(self) -> None:
        """Take what is owed; no thread steps anything afterwards."""
        try:
            self._stepping.settle()
        finally:
            self._stepping.close()

    @property
    def coefficients(self) -> Mapping[str, float]:
        """LAMB's trust ratios at the last step, by the names of the parameters of this rank that it changed."""
        if self._layers is None:
            raise UsageError(f"coefficients: the optimizer is {type(self.optimizer).__name__}, which has no trust ratios; "
                             f"Lamb has")
        return self._layers.coefficients

    def get_lamb_coeffs(self) -> list[float]:
        """Return the values of `coefficients`."""
        return list(self.coefficients.values())

    def state_dict(self) -> dict[str, Any]:
        """Raise `UsageError`: this rank's slices alone say nothing; the engine saves and loads all of them."""
        raise UsageError("optimizer.state_dict: the optimizer's state is sharded over the ranks; call "
                         "engine.save_checkpoint, which any number of ranks can load")

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Raise `UsageError`, as `state_dict` does."""
        raise UsageError("optimizer.load_state_dict: the optimizer's state is sharded over the ranks; call "
                         "engine.load_checkpoint")

    def add_param_group(self, param_group: Mapping[str, Any]) -> None:
        """Raise `UsageError`: where each parameter rests is decided once."""
        raise UsageError("optimizer.add_param_group: the parameters were laid out over the ranks by initialize; give it all "
                         "groups, and freeze what is for later by requires_grad_(False) after it")

    def backward(self, loss: Tensor, retain_graph: bool = False) -> None:
        """Run the backward of `loss` times the loss scale."""
        (loss * self.scaler.value).backward(retain_graph=retain_graph)

    def _factor(self, norm: float | None, loss_scale: float) -> float:
        clip = self.rules.clipping
        coefficient = min(1.0, clip / (norm + CLIP_EPSILON)) if clip > 0 and norm is not None else 1.0
        return coefficient / loss_scale


def _refuse_unused(verdict: GradStats, parameter_groups: ParameterGroups) -> None:
    """Raise on every rank unless every parameter received a gradient on some rank."""
    unused = [member.name for unit, touched in verdict.touched.items()
              for index, member in enumerate(unit.members) if not touched >> index & 1 and member.parameter.requires_grad]
    unused = [name for stage in parameter_groups.communicator("pipeline").gather_objects(unused) for name in stage]
    if unused:
        more = f" and {len(unused) - SHOWN} more" if len(unused) > SHOWN else ""
        raise UsageError(f"step: on no rank did the loss depend on {', '.join(unused[:SHOWN])}{more}, and "
                         f"zero_optimization.ignore_unused_parameters is false: use them in the forward, freeze them by "
                         f"requires_grad_(False), or set it to true. The weights are as before this step")


class MasterWriteCheck:
    """The units whose weights rest beside their masters, and the writes into them that autograd has counted."""

    def __init__(self, units: Iterable[TrainableUnit]):
        self._versions = {unit: unit.versions.count() for unit in units
                          if unit.state.weights is not None and not unit.reshards}

    def check(self) -> None:
        """Warn of a unit that was written into since the last time, unless its masters have learned of it."""
        for unit, before in self._versions.items():
            if (now := unit.versions.count()) != before:
                self._versions[unit] = now
                if not _agrees(unit):
                    warn_once(f"the weights of unit '{unit.name}' were written into since the last step, and its masters, "
                              f"which are stepped, do not know of it: it is lost. Load weights before initialize, or write "
                              f"within shoal.gathered(model, modifier_rank=0)")


def _agrees(unit: TrainableUnit) -> bool:
    """Whether this rank's weights are its masters', rounded."""
    if unit.state.granule is not None:  # masters that are not here
        return False
    span, master = unit.master_span, unit.state.master.tensor
    weights = unit.full[span.start:span.stop]
    return torch.equal(weights, master.to(device=weights.device, dtype=weights.dtype))
