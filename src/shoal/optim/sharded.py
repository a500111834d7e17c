"""A step: reduce the gradients, compute their statistics over all ranks, scale, step the local slices, publish the weights.

The inner optimizer is an elementwise one (torch's own, or the user's), or LAMB. It steps views of this rank's masters.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor
from torch.optim import Optimizer

from shoal.device import on_accelerator
from shoal.errors import UsageError
from shoal.log import warn_once
from shoal.mesh.parameter_groups import ParameterGroups
from shoal.optim.backward_step import BackwardStepper
from shoal.optim.compressed import CompressedOptimizer
from shoal.optim.engine_optimizer import EngineOptimizer
from shoal.optim.grad_stats import GlobalNorm, GradStats, reduce_grad_stats
from shoal.optim.lamb import Lamb
from shoal.optim.layerwise import Layerwise
from shoal.optim.masks import apply_masks
from shoal.optim.onebit import CompressedAdam
from shoal.optim.onebit_lamb import OneBitLamb
from shoal.optim.step_pass import (
    Factor,
    Options,
    StepPass,
    call_without_views,
    can_step_natively,
    compressed_step_fn,
    move_moments_to_store,
    native_or_optimizer_step_fn,
    native_step_fn,
    optimizer_step_fn,
    snapshot_options,
)
from shoal.optim.step_scheduler import StepScheduler
from shoal.optim.views import Views
from shoal.optim.weight_writes import WeightWrites
from shoal.precision.loss_scale import LossScale
from shoal.tier.store import WRITE_AHEAD
from shoal.zero.grad_attribute import clear_raw_grads, take_raw_grads
from shoal.zero.gradient import OnReduced
from shoal.zero.optimizer_state import StateAccess
from shoal.zero.sharded import ShardedModel
from shoal.zero.trainable_unit import TrainableUnit

__all__ = ["ShardedOptimizer", "StepRules"]

CLIP_EPSILON = 1e-6
"""Keeps the clip coefficient finite; the value of torch.nn.utils.clip_grad_norm_."""

SHOWN = 5
"""Parameters that an error message names before it counts the rest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRules:
    """Whether a step is taken, how it is scaled, and in which chunks."""

    clipping: float
    """Largest global L2 norm of the gradients; 0 disables clipping."""
    check_overflow: bool
    """Skip a step whose gradients contain an infinity or NaN."""
    compute_norm: bool = False
    """Compute the norm for readers, where neither clipping nor an overflow check needs it."""
    allow_unused: bool = True
    """Accept parameters without a gradient on any rank."""
    chunk_elements: int = sys.maxsize
    """Elements that one call of the inner optimizer steps, unless a single view has more."""
    native: bool = False
    """Step in native code where it supports the optimizer and the view."""
    fetches_ahead: int = 1
    """Pieces of offloaded state that are fetched while one is stepped."""
    commits_behind: int = 2
    """Pieces whose commits may still run meanwhile."""
    in_backward: bool = False
    """Step a unit during backward, as soon as its gradient is reduced."""
    max_waiting_bytes: int = WRITE_AHEAD
    """Bytes of gradients and weights that units may hold in memory while they wait for their step in backward."""

    @property
    def needs_norm(self) -> bool:
        """Whether a step needs the global gradient norm."""
        return self.clipping > 0 or self.check_overflow or self.compute_norm


class ShardedOptimizer(EngineOptimizer):
    """The optimizer of one engine: steps the sharded masters by an inner optimizer."""

    def __init__(self, model: ShardedModel, views: Views, optimizer: Optimizer, loss_scale: LossScale, rules: StepRules):
        super().__init__(optimizer, views)
        self.scaler: LossScale = loss_scale
        self.rules = rules
        self.overflow = False
        """Whether the last step was skipped because the gradients overflowed."""
        self._norm: GlobalNorm | None = None
        self._model = model
        self._weight_writes = WeightWrites(model.trainable)
        self._had_gradient: dict[TrainableUnit, int] = {}
        """The slots of each unit that the last step had a gradient of, unless it was set to None since."""
        self._zeros: Mapping[TrainableUnit, int] = MappingProxyType({})
        """The slots whose gradient is zeros where they get no other."""
        if isinstance(optimizer, CompressedAdam):
            self._step_fn = compressed_step_fn(optimizer, native=rules.native)
        else:
            step = optimizer_step_fn(optimizer, views, self.own)
            self._step_fn = native_or_optimizer_step_fn(optimizer, step) if rules.native else step
        self._native_step_fn = native_step_fn(optimizer)
        if isinstance(optimizer, OneBitLamb):  # it keeps two scalars per parameter
            views.split(lambda view, part: part.slot, optimizer)
        self._layerwise = (Layerwise(optimizer, model.parameter_groups, native=rules.native)
                           if isinstance(optimizer, Lamb) else None)
        self._scheduler = StepScheduler(model.trainable, chunk_elements=rules.chunk_elements,
                                        fetches_ahead=rules.fetches_ahead, commits_behind=rules.commits_behind,
                                        max_waiting_bytes=rules.max_waiting_bytes, lanes=model.storage.lanes,
                                        device=model.storage.device)
        self._backward_stepper = BackwardStepper(model, views, optimizer, self._scheduler, self._step_fn,
                                                 native=rules.native,
                                                 measures=rules.needs_norm) if rules.in_backward else None
        if isinstance(optimizer, CompressedOptimizer):
            optimizer.set_communicates(model.parameter_groups.state_shards > 1)
        self.set_compression()
        for view in views.views:
            view.unit.gradient.expect_norm(rules.needs_norm)
            if optimizer.state.get(view.parameter):
                moments = StateAccess(reads_gradient=False, writes_weights=False)
                view.unit.state.fetch(view.part, moments).wait()
                move_moments_to_store(view, optimizer)
                view.unit.state.commit(view.part, moments).wait()

    @property
    def loss_scale(self) -> float:
        return self.scaler.value

    cur_scale = loss_scale

    @property
    def norm(self) -> float | None:
        """The global norm at the last step, before clipping and without the loss scale; a read waits for the device."""
        return None if self._norm is None else self._norm.value

    def trains(self, unit: TrainableUnit) -> bool:
        """Whether the optimizer steps `unit`, on this rank or another: a rank without a part of it has no view of it."""
        return any(each is unit for each in self._model.trainable)

    @property
    def shards_state(self) -> bool:
        """Whether some state rests on other ranks."""
        return any(unit.stage.shards_state for unit in self._model.trainable)

    @property
    def has_gradients(self) -> bool:
        """Whether there are gradients since the last step."""
        return self.begun or any(unit.gradient.has_gradient and not unit.awaits_step
                                 for unit in self._model.trainable)

    @property
    def begun(self) -> bool:
        """Whether backward has begun the next step."""
        return self._backward_stepper is not None and self._backward_stepper.begun

    @property
    def failed(self) -> bool:
        """Whether a step failed halfway, so that the weights are invalid."""
        return self._scheduler.failed

    @torch.no_grad()
    def take_step(self, check_norm: Callable[[GlobalNorm], None] | None = None) -> bool:
        """Apply the accumulated gradients; return False if an overflow skipped the step. All ranks return the same.

        `check_norm` is called with the norm before anything changes, where there is a norm; after `overflow` is set. The
        step is not taken if it raises.
        """
        units = self._model.trainable
        self._scheduler.check()
        self._check_members(self.param_groups)
        self._model.close_grads(keep=True)
        self.collect_set_grads()
        self._collect_zeros()
        parameter_groups = self._model.parameter_groups
        if units and not self.has_gradients:
            raise UsageError(f"rank {self._model.parameter_groups.world.rank}: step() without gradients; call "
                             f"engine.backward(loss) on the output of the engine since the last step")
        if not self._steps_in_gradient:
            return self._skip_sync()
        if not self.begun:
            self.own.begin_step()
        options = (self._backward_stepper and self._backward_stepper.options) or snapshot_options(self.optimizer)
        stats = self._reduce_grad_stats(units)
        self._had_gradient = dict(stats.slots_with_grad)
        self.overflow = self.rules.check_overflow and stats.overflow
        loss_scale = self.scaler.value
        scale = loss_scale * self._steps_in_gradient
        self._norm = None if stats.norm is None else stats.norm / scale
        factor = self._factor(self._norm, scale)
        try:
            if not self.rules.allow_unused:
                _refuse_unused(stats, parameter_groups)
            if check_norm is not None and self._norm is not None:
                check_norm(self._norm)
            self.scaler.update(self.overflow)
            if not self.overflow:
                self._apply(stats.slots_with_grad, factor, options)
                self._count_step()
            elif isinstance(self.optimizer, CompressedOptimizer):
                self.optimizer.drop_unsent()
        except BaseException as error:
            if self.begun:  # backward has stepped some units, and the others stay unstepped
                self._scheduler.fail(error)
            raise
        finally:
            if self._backward_stepper is not None:
                self._backward_stepper.finish()
            if not self.failed:
                self.discard_gradients()
                if self.scaler.value != loss_scale:
                    self.rescale_residuals(self.scaler.value / loss_scale)
        self.set_compression()
        if not self.overflow:
            self._model.run_ahead()
        return not self.overflow

    @torch.no_grad()
    def collect_set_grads(self) -> None:
        """Collect each `p.grad` that a script has set outside of a backward pass: this rank's addend, as of a pass.

        Raises `UsageError` where the step does not take the values of scripts.
        """
        found = [(unit, taken) for unit in self._model.trainable
                 if (taken := take_raw_grads([member.parameter for member in unit.members]))]
        if not found:
            return
        if self.loss_scale != 1 or self.rules.in_backward or isinstance(self.optimizer, CompressedOptimizer):
            unit, taken = found[0]
            raise UsageError(f"p.grad of '{unit.members[taken[0][0]].name}' was set outside of a backward pass, but "
                             f"gradients have the loss scale {self.loss_scale:g}, are compressed, or are stepped in "
                             f"backward: lead a loss through the model instead, or train without fp16's loss scale, 1-bit "
                             f"optimizers and step_in_backward. The gradients that were set are discarded")
        self._collect(found)

    def keep_zeros(self, *, keep: bool) -> None:
        """As in the base class."""
        self._zeros = dict(self._had_gradient) if keep else {}
        if not keep:
            self._had_gradient.clear()

    def _collect_zeros(self) -> None:
        """Count each parameter that has had a gradient, and has none now, as one with zeros, where a script asked for that.

        What every rank knows alike decides, for to collect is to reduce: which slots have had one on any rank, and which
        units have a gradient now. The sum of such a unit has zeros in its other slots already.
        """
        if self._zeros and (self.rules.in_backward or isinstance(self.optimizer, CompressedOptimizer)):
            warn_once("optimizer.zero_grad(set_to_none=False): parameters without a gradient are not stepped, where torch "
                      "would step them with zeros, because gradients are compressed, or are stepped in backward")
            return
        found: list[tuple[TrainableUnit, list[tuple[int, Tensor]]]] = []
        for unit, mask in self._zeros.items():
            slots = [slot for slot in range(len(unit.members)) if mask >> slot & 1]  # frozen ones too, as torch does
            if unit.gradient.has_gradient:
                unit.gradient.accumulator.count_zeros(slots)
            elif slots:
                found.append((unit, [(slot, torch.zeros(unit.layout.slots[slot].shape, dtype=unit.full.dtype,
                                                        device=self._model.storage.device)) for slot in slots]))
        if not found:
            return
        self._collect(found)

    def _collect(self, found: Iterable[tuple[TrainableUnit, list[tuple[int, Tensor]]]]) -> None:
        """Collect gradients that no backward pass gives: (slot, gradient) of each unit."""
        self.finish_deferred_steps()
        self._model.finish_pending()
        for unit, taken in found:
            for slot, gradient in taken:
                unit.gradient.accumulator.collect(slot, gradient)
            if unit.replica_group.spans_stages:
                unit.gradient.mark_unreduced()
                continue
            unit.gradient.leave_unreduced()
            if unit.gradient.stage.shards_gradients:  # whole gradients of all units would take their memory at once
                self._model.flush()

    def _reduce_grad_stats(self, units: list[TrainableUnit]) -> GradStats:
        """Reduce the outstanding gradients of `units`, apply masks, and return the statistics over all ranks.

        Before that, pending publications finish, and the values that a script has given to parameters are loaded.
        """
        self._model.finish_pending()  # units that no forward has used since the last step may still publish their masters
        self._model.load_replaced()
        self._weight_writes.take_over(stepped=self.begun)
        self._model.flush()
        if isinstance(self.optimizer, CompressedOptimizer):
            apply_masks(self.optimizer, units, self.views.views, self._model.tensor_slices)
        return reduce_grad_stats(units, self._model.parameter_groups, norm=self.rules.needs_norm,
                                 device=self._model.storage.device)

    def finish_before_read(self) -> None:
        """Complete the last step, so that a reader sees its state."""
        self.check_not_begun("optimizer.state")
        self.finish_deferred_steps()

    def _skip_sync(self) -> bool:
        """Carry the gradients over to a later step, and count this one: it skips communication."""
        for unit in self._model.trainable:
            unit.gradient.carry_over()
        self.overflow = False
        self._count_step()
        self.set_compression()
        return True

    def _count_step(self) -> None:
        """Count an applied step."""
        self.own.end_step()
        for each in (self, self.optimizer):
            vars(each)["_opt_called"] = True  # torch's schedules warn if the optimizer has not stepped
        if isinstance(self.optimizer, CompressedOptimizer):
            self.optimizer.count_step()

    @property
    def _steps_in_gradient(self) -> int:
        """How many steps' gradients this step consumes; 0 if it skips communication."""
        if not isinstance(self.optimizer, CompressedOptimizer):
            return 1
        return max(map(self.optimizer.steps_in_gradient, self.optimizer.param_groups))

    def _apply(self, slots_with_grad: dict[TrainableUnit, int], factor: Factor, options: Options) -> None:
        """Step the slots that received gradients by these times `factor`, and publish their units."""
        views = self.views.with_grad(slots_with_grad, self.optimizer)
        native = self.rules.native and can_step_natively(self.optimizer, views, options)
        step_pass = StepPass(step=(native and self._native_step_fn) or self._step_fn, factor=factor, options=options)
        if (layers := self._layerwise) is not None:
            self._scheduler.run_measuring_pass(slots_with_grad, views, layers.measure(factor, options),
                                                lambda: layers.reduce_sums(slots_with_grad, views, options))
            step_pass = layers.apply(factor, options)
        for unit, mask in slots_with_grad.items():
            unit.versions.mark(slot for slot in range(len(unit.members)) if mask >> slot & 1)
        self._scheduler.run(slots_with_grad, views, step_pass, defer=native)
        if not native:
            self.own.count_call(lambda: call_without_views(self.optimizer, options))

    def stepping_in_backward(self) -> AbstractContextManager[None]:
        """Return the context of a backward pass that steps units as their gradients are reduced (backward_step.py)."""
        assert self._backward_stepper is not None
        self.own.begin_step()
        return self._backward_stepper.stepping(1 / self.scaler.value)

    @property
    def on_reduced(self) -> OnReduced | None:
        """The consumer of reduced gradients during a backward pass that steps units; else None."""
        return None if self._backward_stepper is None else self._backward_stepper.on_reduced

    def check_not_begun(self, call: str) -> None:
        """Raise `UsageError`, naming `call`, if backward has begun the next step; `TierError` if a step failed halfway."""
        self._scheduler.check()
        if self.begun:
            raise UsageError(f"{call}: backward has begun the next step already (offload_optimizer.step_in_backward); call "
                             f"engine.step() first, once after each backward that ends an accumulation")

    def discard_gradients(self) -> None:
        """Discard the accumulated gradients, except those that a deferred step still needs."""
        self.check_not_begun("zero_grad")
        self._model.close_grads(keep=False)
        for unit in self._model.trainable:
            if not (unit.awaits_step or unit.gradient.is_reset):
                unit.gradient.reset()
        clear_raw_grads(member.parameter for unit in self._model.trainable for member in unit.members)  # interrupted passes

    def set_compression(self) -> None:
        """Set the wire format of the next step as the optimizer asks."""
        if isinstance(self.optimizer, CompressedOptimizer):
            wire = self.optimizer.wire_format()
            self._model.set_compression(gradient=wire.gradient, weights=wire.weights, skip_sync=wire.skip_sync)

    def rescale_residuals(self, factor: float) -> None:
        """Multiply the compression errors by `factor`, by which the loss scale has changed."""
        for unit in self._model.trainable:
            unit.gradient.accumulator.rescale_residual(factor)

    def finish_deferred_steps(self) -> None:
        """Wait for the deferred steps of the last step, and let their units rest. Steps of units on disk are deferred."""
        self._scheduler.finish_deferred()
        for unit in self._model.trainable:
            unit.residency.unpin_stepped()

    def close(self) -> None:
        """Wait for the deferred steps, and end the scheduler's thread."""
        try:
            self._scheduler.finish_deferred()
        finally:
            self._scheduler.close()

    @property
    def coefficients(self) -> Mapping[str, float]:
        """LAMB's trust ratios at the last step, by the names of this rank's stepped parameters."""
        if self._layerwise is None:
            raise UsageError(f"coefficients: the optimizer is {type(self.optimizer).__name__}, which has no trust ratios; "
                             f"Lamb has")
        return self._layerwise.coefficients

    def get_lamb_coeffs(self) -> list[float]:
        """Return the values of `coefficients`."""
        return list(self.coefficients.values())

    def _factor(self, norm: GlobalNorm | None, loss_scale: float) -> Factor:
        """Return the factor of gradients in a step: a number, or where the whole step is on a device, a tensor on it."""
        clip = self.rules.clipping
        if clip <= 0 or norm is None:
            return 1 / loss_scale
        if self._steps_on_device:
            return ((clip / (norm.tensor + CLIP_EPSILON)).clamp(max=1) / loss_scale).float()
        return min(1.0, clip / (norm.value + CLIP_EPSILON)) / loss_scale

    @property
    def _steps_on_device(self) -> bool:
        """Whether no step reads the factor on the host: torch steps all masters, on an accelerator."""
        on_host = self._layerwise is not None or isinstance(self.optimizer, CompressedOptimizer)
        return not on_host and all(on_accelerator(view.parameter) for view in self.views.views)


def _refuse_unused(stats: GradStats, parameter_groups: ParameterGroups) -> None:
    """Raise on every rank unless every parameter received a gradient on some rank."""
    unused = [member.name for unit, mask in stats.slots_with_grad.items()
              for index, member in enumerate(unit.members) if not mask >> index & 1 and member.parameter.requires_grad]
    unused = [name for stage in parameter_groups.communicator("pipeline").gather_objects(unused) for name in stage]
    if unused:
        more = f" and {len(unused) - SHOWN} more" if len(unused) > SHOWN else ""
        raise UsageError(f"step: on no rank did the loss depend on {', '.join(unused[:SHOWN])}{more}, and "
                         f"zero_optimization.ignore_unused_parameters is false: use them in the forward, freeze them by "
                         f"requires_grad_(False), or set it to true. The weights are as before this step")
