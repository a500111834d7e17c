"""A sharded model: its units, and the hooks that drive them.

The modules and parameters stay the user's own objects. The rest of the library finds here the units to step and publish, the
names to save and load, and the bytes that rest on this rank.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from shoal.activation import SavedActivations
from shoal.errors import RanksDisagree, UsageError
from shoal.mesh.parameter_groups import ParameterGroups
from shoal.precision.policy import Policy
from shoal.tier import Memory, StoragePlan, trim
from shoal.transport.collectives import Communicator
from shoal.zero.grad_accumulator import Pool
from shoal.zero.hooks import Hooks
from shoal.zero.ownership import clear_owner, owner_of
from shoal.zero.partition import UnitSpec, partition, tied_names
from shoal.zero.placement import COMPRESSED, STAGES, Stage, StateBytes, effective_row
from shoal.zero.reducer import BackwardPass, Reducer
from shoal.zero.settings import ZeroSettings
from shoal.zero.shared_memory import refuse_shared_memory
from shoal.zero.trainable_unit import TrainableUnit, UnitDtypes
from shoal.zero.unit import Unit
from shoal.zero.unit_state import Hold, Scope
from shoal.zero.unit_transport import GradientDtypes, Transports
from shoal.zero.window import Window


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardingPlan:
    """How a model is to rest on the ranks."""

    stage: int
    overlap: bool = True
    ahead: int = 5_000_000
    """Elements that the window gathers ahead of use."""
    live: int = 1_000_000_000
    """Elements that may be gathered ahead and in use."""
    persistent_below: int = 0
    """Parameters of at most so many elements stay whole at stage 3."""
    persistent_at_most: int = sys.maxsize
    """Elements of such parameters together."""
    reuse: int = 0
    """A unit that is used again within so many elements stays gathered until then."""
    reads: int = 4
    """Units whose weights are fetched from another tier ahead of use."""
    read_elements: int = sys.maxsize
    """Elements of such units together."""
    transports: Transports = field(default_factory=Transports)
    """With compression, state rests as at stage 1, whichever of 0 to 2 is asked for."""
    activations: SavedActivations | None = None
    """Where saved tensors that are not weights rest until backward; None: on the device."""
    in_backward: bool = False
    """Backward steps units whose gradient is final, so saved tensors of all weights are tracked."""

    @classmethod
    def of(cls, zero: ZeroSettings, *, compressed: bool, by_rows: bool,
           activations: SavedActivations | None) -> ShardingPlan:
        """Return the plan that the configuration's `zero_optimization` asks for."""
        param = zero.offload_param
        return cls(
            stage=zero.stage, overlap=zero.overlap_comm, ahead=zero.stage3_prefetch_bucket_size,
            live=zero.stage3_max_live_parameters, persistent_below=zero.stage3_param_persistence_threshold,
            persistent_at_most=zero.stage3_model_persistence_threshold, reuse=zero.stage3_max_reuse_distance,
            reads=param.buffer_count - 1, read_elements=param.buffer_count * param.buffer_size,
            in_backward=bool(zero.offload_optimizer.step_in_backward), activations=activations,
            transports=Transports(compressed=compressed, by_rows=by_rows))


@dataclass(frozen=True, slots=True, kw_only=True)
class TiedBuffer:
    """A buffer of this rank that several pipeline stages have."""

    name: str
    """Its name in the whole model: that in its first layer."""
    saved_here: bool
    """Whether this rank saves it, and not the rank of another stage."""


class ShardedModel:
    """The units of one model on one data axis."""

    def __init__(self, model: nn.Module, parameter_groups: ParameterGroups, storage: StoragePlan, *,
                 aliases: Mapping[str, str] | None = None, tied_buffers: Mapping[str, TiedBuffer] | None = None):
        self.model = model
        self.parameter_groups = parameter_groups
        self.aliases = aliases or {}
        """The first names, in the whole model, of parameters that have others here."""
        self.tied_buffers = tied_buffers or {}
        """Buffers that several pipeline stages have, by their names here."""
        self.tensor_slices = parameter_groups.tensor_slices
        self.storage = storage
        self.pool = Pool(storage.device)
        self.scope = Scope()
        self.units: list[Unit] = []
        self.by_module: dict[nn.Module, list[Unit]] = {}
        self.trainable: list[TrainableUnit] = []
        self.spanning_stages: list[TrainableUnit] = []
        """Units that several pipeline stages hold, in the same order on every rank: reduced when a step begins."""
        self.passes: list[Hooks] = []
        """The hooks of each root, in the order of the roots."""

    def shard(self, groups: dict[nn.Parameter, int], plan: ShardingPlan, policy: Policy, *,
              begin_pass: Callable[[bool], BackwardPass], before_forward: Callable[[], None],
              roots: Mapping[nn.Module, str] | None = None,
              explicit_passes: bool = False) -> None:
        """Take the model's parameters, of which `groups` are trained; `destroy` gives them back, also if this raises.

        `before_forward` is called before each forward of a root or of a part of it, `begin_pass` at the begin of each
        backward pass of a root.
        """
        refuse_shared_memory(self.model, lambda tensor: tensor.requires_grad and tensor in groups)
        row = COMPRESSED if plan.transports.compressed else STAGES[plan.stage]
        persistent_below = 0 if row.persistent is row else plan.persistent_below
        specs = partition(self.model, groups, self.parameter_groups.group_of, persistent_below=persistent_below,
                          persistent_at_most=plan.persistent_at_most, roots=roots, aliases=self.aliases)
        for communicator in self.parameter_groups.communicators:
            check_rank_consistency(communicator, [spec for spec in specs if communicator in (
                spec.replica_group.communicator, spec.replica_group.replicas)])
        for spec in specs:
            stage = row.persistent if spec.persistent else row
            unit = self._unit(spec, effective_row(stage, spec.replica_group.communicator.ranks), policy, plan)
            self.units.append(unit)
            self.by_module.setdefault(spec.module, []).append(unit)
            if isinstance(unit, TrainableUnit):
                self.trainable.append(unit)
                if spec.replica_group.spans_stages:
                    self.spanning_stages.append(unit)
        trim()  # the parameters' own memory is free now
        self.passes += [self._pass(root, plan, begin_pass, before_forward, explicit_passes)
                        for root in roots or (self.model,)]

    def named(self) -> dict[str, nn.Parameter]:
        """Return the parameters of this rank by their first names in the whole model."""
        return {self.aliases.get(name, name): parameter for name, parameter in self.model.named_parameters()}

    def tied_names(self) -> dict[str, str]:
        """Return the other names of shared parameters: {alias: first name in the whole model}."""
        here = tied_names(self.model)
        return {alias: self.aliases.get(first, first) for alias, first in here.items()} | dict(self.aliases)

    def flush(self) -> None:
        """Reduce what backward passes left unreduced: a step needs it."""
        for each in self.passes:
            each.backward.grads.end_gather(keep=True)
            each.backward.reducer.flush()
        for unit in self.spanning_stages:
            unit.gradient.reduce()
        for unit in self.spanning_stages:
            unit.gradient.wait_reduced()
        for unit in self.trainable:
            unit.gradient.join_replicas()

    def load_replaced(self) -> None:
        """Take over the values of parameters that scripts have given other memory: a step changes the buffers alone."""
        for each in self.passes:
            each.replaced.load()

    def close_grads(self, *, keep: bool) -> None:
        """Let scripts read `p.grad` no more until the next backward pass; with `keep` what they wrote there counts."""
        for each in self.passes:
            each.backward.grads.close(keep=keep)

    def refuse_replaced(self, call: str) -> None:
        """Raise `UsageError` from `call` for a parameter that a script has given another value than the engine trains."""
        for each in self.passes:
            each.replaced.refuse(call)

    def state_bytes(self, moments: Mapping[Tensor, Mapping[str, Any]]) -> StateBytes:
        """Measure the bytes that rest on this rank, with those of the optimizer's state `moments`."""
        weight = sum(unit.rest.tensor.nbytes for unit in self.units)
        gradient = sum(unit.gradient.bytes for unit in self.trainable)
        master = sum(unit.master.nbytes for unit in self.trainable if unit.has_separate_master)
        kept = sum(value.nbytes for state in moments.values() for value in state.values()
                   if isinstance(value, Tensor) and value.dim())
        return StateBytes(weight=weight, gradient=gradient, master=master, moments=kept)

    def set_compression(self, *, gradient: bool, weights: bool, skip_sync: bool) -> None:
        """From the next backward pass on compress gradients or weights, or send no gradients at all."""
        for unit in self.trainable:
            unit.transport.set_compression(gradient=gradient, weights=weights, skip_sync=skip_sync)

    def run_ahead(self) -> None:
        """Start what the next forward uses first."""
        self.passes[0].run_ahead()

    @property
    def backward_has_failed(self) -> bool:
        """Whether the last backward pass has failed after it had given parameters gradients."""
        return any(each.backward.has_failed for each in self.passes)

    def interrupt(self) -> None:
        """Note that an exception has ended a backward pass."""
        for each in self.passes:
            each.backward.interrupt()

    def finish_pending(self) -> None:
        """Wait for everything under way, and for deferred steps, except those of a step that backward has only begun."""
        for unit in self.units:
            if unit.pending is not None and not unit.pending.in_backward:
                unit.pending.finish()
            unit.finish_transfers()

    def destroy(self) -> None:
        """Detach from the model and leave it whole, as plain parameters.

        Parameters that cannot be gathered any more stay guarded, in units of another phase than `GATHERED`; the reason is
        raised at the end.
        """
        try:
            self.finish_pending()
        finally:
            for each in self.passes:
                each.remove()
            self._give_back()

    def _give_back(self) -> None:
        """Leave the parameters of all units whole and plain; after the first failure gather no more."""
        failure: Exception | None = None
        for unit in self.units:
            if unit.pending is not None and unit.pending.in_backward:
                unit.end_step()
            try:
                if failure is None:
                    unit.gather()
            except Exception as error:
                failure = error
            unit.hold(Hold.DETACHED)
            for member in unit.members:
                clear_owner(member.parameter)
            unit.close()
        self.storage.close()
        if failure is not None:
            raise failure

    def _unit(self, spec: UnitSpec, stage: Stage, policy: Policy, plan: ShardingPlan) -> Unit:
        compute = policy.compute if spec.dtype in (torch.float32, torch.float16, torch.bfloat16) else spec.dtype
        values = self._values(spec)
        unit = self._new_unit(spec, stage, policy, plan, compute)
        flat = _flatten(unit, values, self.pool.device)
        if spec.replica_group.replicas is not None:
            spec.replica_group.replicas.broadcast(flat, 0, f"unit '{spec.name}'")
        spec.replica_group.communicator.broadcast(flat, spec.replica_group.source, f"unit '{spec.name}'")
        unit.load_full(flat)
        return unit

    def _new_unit(self, spec: UnitSpec, stage: Stage, policy: Policy, plan: ShardingPlan, compute: torch.dtype) -> Unit:
        elements = sum(member.parameter.numel() for member in spec.members)
        tiers = self.storage.tiers(elements, elements if spec.trainable else 0)
        if spec.persistent:
            tiers = replace(tiers, weight=Memory(device=self.storage.device))
        if not spec.trainable:
            return Unit(spec.name, spec.members, stage, spec.replica_group, compute, self.storage.device, self.scope,
                        tiers.weight, columns=spec.columns, transports=plan.transports)
        same = compute == policy.compute
        dtypes = UnitDtypes(compute=compute, gradient=GradientDtypes(
            accumulate=policy.accumulate if same else compute, wire=policy.reduce if same else compute,
            averaging=policy.averaging))
        return TrainableUnit(spec.name, spec.members, stage, spec.replica_group, dtypes, self.pool, self.scope, tiers,
                             columns=spec.columns, transports=plan.transports)

    def _pass(self, root: nn.Module, plan: ShardingPlan, begin_pass: Callable[[bool], BackwardPass],
              before_forward: Callable[[], None], explicit_passes: bool) -> Hooks:
        """Return the hooks that drive the units within `root`."""
        inside = set(root.modules())
        units = {module: found for module, found in self.by_module.items() if module in inside}
        window = Window(plan.ahead, plan.live, plan.reuse, fetch_units=plan.reads, fetch_elements=plan.read_elements,
                        lanes=self.storage.lanes, all_units=self.units)
        reduced = [unit for found in units.values() for unit in found
                   if isinstance(unit, TrainableUnit) and not unit.replica_group.spans_stages]
        reducer = Reducer([unit.gradient for unit in reversed(reduced)], overlap=plan.overlap,
                          ranks=max((unit.communicator.ranks * unit.replica_group.state_copies for unit in reduced),
                                    default=1),
                          spanning_stages=[unit.gradient for unit in self.spanning_stages])
        hooks = Hooks(root, units, window, reducer, self.scope, begin_pass, before_forward, track_all=plan.in_backward,
                      explicit_passes=explicit_passes, activations=plan.activations)
        hooks.install()
        return hooks

    def _values(self, spec: UnitSpec) -> Iterator[Tensor]:
        """Yield the whole value of each parameter; one that was built sharded is gathered meanwhile."""
        for member in spec.members:
            builder = owner_of(member.parameter)
            if isinstance(builder, Unit) and not builder.temporary:
                raise UsageError(f"initialize: parameter '{member.name}' belongs to another engine already; call destroy() "
                                 f"on that engine first, or build a model of its own for each engine")
            if isinstance(builder, Unit):
                builder.gather()
            yield member.parameter.detach()
            if isinstance(builder, Unit):
                builder.release()


def _flatten(unit: Unit, values: Iterator[Tensor], device: torch.device) -> Tensor:
    dtype = next(iter(unit.members)).parameter.dtype
    flat = torch.zeros(unit.layout.size, dtype=dtype, device=device)
    for view, value in zip(unit.layout.views(flat), values, strict=True):
        view.copy_(value)
    return flat


def check_rank_consistency(communicator: Communicator, specs: list[UnitSpec]) -> None:
    """Raise unless all ranks built the same parameters, naming the first difference."""
    mine = [f"{member.name} {tuple(member.parameter.shape)} {member.parameter.dtype} "
            f"{'trainable' if spec.trainable else 'frozen'} group {member.group} in unit '{spec.name}'"
            for spec in specs for member in spec.members]
    said = communicator.gather_objects(mine)
    for rank, theirs in enumerate(said):
        if theirs == said[0]:
            continue
        for position in range(max(len(theirs), len(said[0]))):
            ours, other = (lines[position] if position < len(lines) else "nothing" for lines in (said[0], theirs))
            if ours != other:
                raise RanksDisagree(f"initialize: ranks built different models. First difference, at parameter {position}: "
                                    f"rank 0 has {ours}; rank {rank} has {other}. Build the same model on every rank.")
