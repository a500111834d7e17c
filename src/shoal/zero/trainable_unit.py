"""A unit that is trained: its weights, its gradient, and the state that the optimizer steps.

The four redistributions of a step are `gather`, `gradient.reduce`, `gradient.wait_reduced` and `publish`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import torch
from torch import Tensor

from shoal.mesh.parameter_groups import ReplicaGroup
from shoal.recording.call import Handle
from shoal.tier import ResidentSpan, Span, SubSpan, Tiers, fetched, offset_names
from shoal.zero.grad_accumulator import Pool
from shoal.zero.gradient import Gradient
from shoal.zero.guard import guard
from shoal.zero.layout import Slot
from shoal.zero.optimizer_state import OptimizerState
from shoal.zero.placement import Stage, master_dtype
from shoal.zero.unit import Unit
from shoal.zero.unit_state import Member, Phase, Scope
from shoal.zero.unit_transport import GradientDtypes, Transports, UnitWire, WeightTransport

__all__ = ["TrainableUnit", "UnitDtypes"]


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitDtypes:
    """The dtypes of a unit: of its weights, and of its gradient."""

    compute: torch.dtype
    gradient: GradientDtypes


class TrainableUnit(Unit):
    """Parameters whose gradients are reduced and whose masters are stepped together."""

    def __init__(self, name: str, members: tuple[Member, ...], stage: Stage, replica_group: ReplicaGroup,
                 dtypes: UnitDtypes, pool: Pool, scope: Scope, tiers: Tiers, *, columns: int | None = None,
                 transports: Transports | None = None):
        super().__init__(name, members, stage, replica_group, dtypes.compute, pool.device, scope, tiers.weight,
                         columns=columns, transports=transports)
        wire = UnitWire(name=name, index=self.index, layout=self.layout, replica_group=replica_group, dtypes=dtypes.gradient,
                        pool=pool)
        self.transport = self._transports.trainable(wire, dtypes.compute, columns)
        self.gradient = Gradient(wire, stage, self.transport, tiers.state, self.shard_range)
        self.master_range: Final = self.shard_range if stage.shards_state else range(self.layout.size)
        """The elements of the buffer whose master rests on this rank."""
        self.state = self._new_state(tiers, separate=self.transport.is_compressible)

    def _new_state(self, tiers: Tiers, *, separate: bool) -> OptimizerState:
        """Return the state that the optimizer steps; with `separate` the master is never the resting weights."""
        store, owned, wide = tiers.state, self.master_range, master_dtype(self.full.dtype)
        part, names = (range(owned.start - self.resting_range.start, owned.stop - self.resting_range.start),
                       offset_names(self.layout.names, owned.start))
        stepped = self.rest.part(part) if isinstance(self.rest, ResidentSpan) else SubSpan(self.rest, part)
        in_place = wide == self.full.dtype and self.rest.tensor.device == store.device and not separate
        master = stepped if in_place else store.place(len(owned), wide, f"master of unit '{self.name}'", names=names)
        return OptimizerState(self.name, len(owned), tiers, master, None if in_place else stepped, self.gradient, names)

    @cached_property
    def weight_transport(self) -> WeightTransport:
        return self.transport  # one object sends both: rows and signs depend on the gradient

    @property
    def high_precision(self) -> Span:
        return self.state.master

    @property
    def high_precision_range(self) -> range:
        return self.master_range

    @property
    def saved_range(self) -> range:
        return self.master_range if self.stage.shards_state else self.shard_range

    @property
    def master(self) -> Tensor:
        """The fp32 master, or the resting weights (master_range,)."""
        return self.state.master.tensor

    @property
    def has_separate_master(self) -> bool:
        return self.state.separate_weights is not None

    @property
    def slots_without_grad(self) -> Sequence[int]:
        return self.gradient.accumulator.missing

    def expect_recompute(self) -> None:
        self.gradient.expect_recompute()

    def conclude_grads(self) -> None:
        self.gradient.accumulator.conclude()

    def keep_for_step(self) -> None:
        if self.gradient.may_step_early and self.can_stay_resident and not self.has_separate_master:
            self.keep_part_resident(range(len(self.master_range)))

    def keep_part_resident(self, part: range, *, by_step: bool = False) -> None:
        """Have the weights whose masters are the elements `part`, counted as the master's, stay in memory."""
        start = self.master_range.start - self.resting_range.start
        self.residency.pin(range(start + part.start, start + part.stop), by_step=by_step)

    def end_step(self) -> None:
        super().end_step()
        self.state.receive_weights()

    @torch.no_grad()
    def publish(self) -> None:
        """Bring the stepped masters of all ranks to where the weights rest. The next use waits for what travels."""
        self.refresh_full()
        if not self.stage.publishes:
            return
        if self.reshards:
            self.gather()
            self._publication().wait()
            self.memory.save()
            self.release()
        else:
            for parameter in self._parameters:
                guard(parameter)
            self._handle = self._publication()
            self._enter(Phase.IN_FLIGHT)

    def _publication(self) -> Handle:
        written = self.transport.compares_published and any(self.versions.since)  # which takes time for each parameter
        return self.transport.publish(self.master, self.full, foreign_writes=written)

    @torch.no_grad()
    def cast_master_to_weights(self) -> None:
        """Round the whole master to where this rank's weights rest."""
        if self.state.separate_weights is not None:
            part = range(len(self.master_range))
            self.state.fetch(part).wait()
            self.state.separate_weights.tensor.copy_(self.state.master.tensor)
            self.state.commit(part)

    @torch.no_grad()
    def gather_master(self) -> Tensor:
        """Return the master of all ranks, the whole buffer (size,), in memory of its own; each rank of the unit calls it."""
        with fetched(self.state.master, changed=False) as own:
            return self.gather_shards(own)

    @torch.no_grad()
    def gather_shards(self, own: Tensor) -> Tensor:
        """Return the whole buffer (size,) of which `own` is this rank's part (master_range,); all its ranks call it."""
        values = torch.zeros(self.layout.size, dtype=own.dtype, device=self.full.device)
        values[self.master_range.start:self.master_range.stop] = own
        if self.stage.shards_state:
            self.transport.gather_shards(values)
        return values

    def _keep(self, values: Tensor) -> None:
        super()._keep(values)
        if self.has_separate_master:
            owned = self.master_range
            with fetched(self.state.master, changed=True) as master:
                master.copy_(values[owned.start:owned.stop])

    def broadcast_edit(self, source: int) -> None:
        super().broadcast_edit(source)
        self._take_edits(self.layout.slots)

    def _rest_writes(self, slots: Sequence[int]) -> None:
        super()._rest_writes(slots)
        self._take_edits(self.layout.slots[index] for index in slots)

    def keep_slots(self, slots: Iterable[int]) -> None:
        slots = list(slots)
        super().keep_slots(slots)
        self._take_edits(self.layout.slots[index] for index in slots)

    @torch.no_grad()
    def _take_edits(self, slots: Iterable[Slot]) -> None:
        """Write to the master what a script wrote to the gathered weights.

        An element that still is the master's value in the weights' dtype was not written to, and keeps its precision.
        """
        for slot in slots if self.has_separate_master else ():
            own = range(max(slot.start, self.master_range.start), min(slot.stop, self.master_range.stop))
            if own:
                first = self.master_range.start
                with fetched(self.state.master, own.start - first, own.stop - first, changed=True) as master:
                    written = self.full[own.start:own.stop].to(master.device)
                    master.copy_(torch.where(master.to(written.dtype) == written, master, written.to(master.dtype)))

    def close(self) -> None:
        super().close()
        for span in (self.state.master, *self.state.moments.values(), self.gradient.rest):
            span.close()
