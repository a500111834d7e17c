"""A unit: the parameters that are gathered, reduced and stepped together, as one flat buffer.

    weight   the resting weights: the whole buffer, or this rank's span of it, in the compute dtype
    full     the whole buffer in the compute dtype, whose views the parameters are; without memory while released
    master   the optimizer's fp32 copy: a view of `weight` where dtype and tier agree, else a copy (`TrainableUnit`)

A unit is released between its uses if its weights are sharded, or rest in another tier than the compute device.
`TRANSITIONS` lists how its phase may change, and a `Hold` is a reason to keep it gathered. Other files call its methods, and
write none of its attributes.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from shoal.mesh.parameter_groups import ReplicaGroup
from shoal.recording.call import Handle
from shoal.tier import Elastic, ResidencyPin, ResidentSpan, Span, Store, Transfer, elastic, storage_use_count, zeros
from shoal.tier.span import DONE
from shoal.transport.collectives import Label
from shoal.zero.guard import guard, released_error, set_owner, stepped_error, unguard
from shoal.zero.layout import Layout
from shoal.zero.placement import SHARD, Stage
from shoal.zero.unit_state import TRANSITIONS, Hold, Member, PendingStep, Phase, Scope, VersionCounters

__all__ = ["Unit"]


class Unit:
    """Frozen parameters, or the weights of a `TrainableUnit`."""

    temporary = False
    """Whether an engine may take the parameters over."""

    def __init__(self, name: str, members: tuple[Member, ...], stage: Stage, replica_group: ReplicaGroup,
                 dtype: torch.dtype, device: torch.device, scope: Scope, weights: Store, *, columns: int | None = None):
        """An embedding of `columns` columns is cut between rows. `weights` is the tier in which weights rest."""
        self.name, self.stage, self.members = name, stage, members
        self.replica_group, self.communicator = replica_group, replica_group.communicator
        self.layout = Layout.pack([(m.name, tuple(m.parameter.shape), m.group) for m in members],
                                  self.communicator.ranks, replica_group.state_copies, columns or 1)
        self.index = self.communicator.register()
        """The number of the unit, equal on every rank: all make their units in the same order."""
        self.pending: PendingStep | None = None
        self._scope = scope
        self._phase = Phase.GATHERED
        self._holds, self._contexts = Hold.NONE, 0
        self._external_refs: int | None = None  # users of the memory when it was first exposed outside of a pass
        self._dirty = False  # whole weights may have been written outside of a pass: they rest as they are then
        self._handle: Handle | None = None
        self._loading: Transfer = DONE
        self._parameters = [member.parameter for member in members]
        self.versions = VersionCounters(self._parameters)
        self._gather_label = Label(kind="gather", unit=name, index=self.index)
        self._publish_label = Label(kind="publish", unit=name, index=self.index)
        self._memory, self.full, self.rest = _memory(self.layout, stage, self.communicator.rank, dtype, device, weights,
                                                     f"weights of unit '{name}'")
        self.weight = self.rest.tensor
        self.offloaded = weights.granule is not None or weights.device != device
        """Whether the weights rest in another tier than the compute device's memory."""
        self.residency = ResidencyPin(self.rest)
        """Resting weights that stay in memory until their next use, or their step."""
        self._restored: list[tuple[Tensor, Tensor]] = []  # (memory, its value when the context that drops writes exits)

    @property
    def phase(self) -> Phase:
        return self._phase

    def _enter(self, phase: Phase) -> None:
        assert (self._phase, phase) in TRANSITIONS, f"unit '{self.name}': {self._phase.name} -> {phase.name}"
        self._phase = phase

    # Facts

    @property
    def span(self) -> range:
        """The elements of the buffer that this rank owns."""
        return self.layout.span(self.communicator.rank)

    @property
    def resting(self) -> range:
        """The elements of the buffer whose weights rest on this rank."""
        return self.span if self.is_sharded else range(self.layout.size)

    @property
    def is_sharded(self) -> bool:
        """Whether each rank holds a slice of the weights at rest."""
        return self.stage.weight is SHARD

    @property
    def reshards(self) -> bool:
        """Whether the weights are released between their uses."""
        return self._memory is not None

    @property
    def is_released(self) -> bool:
        return self._phase is Phase.RELEASED

    @property
    def is_exposed(self) -> bool:
        """Whether code outside may share the memory for longer than it is gathered."""
        return self._external_refs is not None

    @property
    def held(self) -> Hold:
        """Why the unit stays gathered at present."""
        return self._holds

    @property
    def contexts(self) -> int:
        """How many `gathered` contexts hold the unit."""
        return self._contexts

    @property
    def is_stepped_in_place(self) -> bool:
        """Whether the resting weights are their own master."""
        return False

    @property
    def precise(self) -> Span:
        """The most precise copy of the weights that rests on this rank."""
        return self.rest

    @property
    def precise_range(self) -> range:
        """The elements of the buffer that `precise` holds."""
        return self.resting

    @property
    def can_stay(self) -> bool:
        """Whether the resting weights are in memory while they are used, and may stay there: nothing copies them then."""
        return self._memory is not None and self._memory.shard_in_full and not isinstance(self.rest, ResidentSpan)

    @property
    def gathers_rows(self) -> bool:
        """Whether a call of the embedding can do with the rows that it looks up."""
        return False

    @property
    def resting_view(self) -> Tensor | None:
        """The sharded weights that rest, where they rest within the whole buffer: a write there stays."""
        return self.weight if self._memory is not None and self._memory.shard_in_full else None

    @property
    def _gathers_over_ranks(self) -> bool:
        """Whether gathering takes the other ranks; otherwise the whole rests here."""
        return self.is_sharded and self.communicator.ranks > 1

    @property
    def awaits_step(self) -> bool:
        """Whether a pending step has yet to be taken."""
        return self.pending is not None and not self.pending.is_taken

    # Steps that are pending

    def begin_step(self, step: PendingStep) -> None:
        """Have `step` be asked before the memory of the unit is used."""
        self.pending = step

    def end_step(self) -> None:
        """Note that the weights show the step, and may be used."""
        self.pending = None

    def poison(self, step: PendingStep) -> None:
        """Release the weights for good: a later access asks `step`, which raises the error."""
        self.pending = step
        if self._phase is not Phase.RELEASED:
            self._enter(Phase.RELEASED)
        for parameter in self._parameters:
            guard(parameter)

    def check(self) -> None:
        """Raise `UsageError` where backward has stepped the weights already."""
        if self.pending is not None and self.pending.in_backward:
            raise stepped_error(self.name, self.communicator.rank)

    # Gathering and releasing

    def fetch(self) -> None:
        """Start bringing the resting weights, if the unit is released. A pending step brings them instead."""
        if self.pending is not None:
            self.pending.request()
        if self._phase is Phase.RELEASED and not self.awaits_step:
            assert self._memory is not None
            with torch.no_grad():
                self._loading = self._memory.grow()
                self.residency.unpin()
            self._enter(Phase.LOADING)

    def prefetch(self) -> None:
        """Start gathering, if the unit is released."""
        if self.pending is not None and self._gathers_over_ranks:
            self.pending.finish()
        self.fetch()
        if self._phase is Phase.LOADING and self._gathers_over_ranks:
            with torch.no_grad():
                self._loading.wait()
                self._handle = self.communicator.all_gather(self.full, self._gather_label)
            self._enter(Phase.IN_FLIGHT)

    def gather(self) -> None:
        """Return when the parameters hold their values."""
        if not self._scope.is_open:
            self.check()
        if self._phase is Phase.GATHERED:
            return
        if self.pending is not None:
            self.pending.finish()
        if self._phase is Phase.ROWS_GATHERED:
            self._shrink()
        self.prefetch()
        with torch.no_grad():
            self._loading.wait()
        if self._handle is not None:
            self._handle.wait()
            self._handle = None
        self._enter(Phase.GATHERED)
        for parameter in self._parameters:
            unguard(parameter)
        self.versions.see()

    def gather_rows(self, rows: Tensor) -> None:
        """Have the `rows` of an embedding in memory until the unit is released, or all of it where that is fewer bytes."""
        raise AssertionError(f"unit '{self.name}' is no embedding whose rows travel alone")

    def release(self) -> None:
        """Give up the memory that the resting weights do not need, unless a hold keeps it."""
        if self._phase is Phase.ROWS_GATHERED:
            self._shrink()
        if self._memory is None or self._phase is Phase.RELEASED or self._holds:
            return
        with torch.no_grad():
            # Other ranks may not have begun to load what loads here, as its step is deferred there: they would not gather it
            self._loading.wait() if self._phase is Phase.LOADING else self.gather()
            if self._dirty or (not self.is_sharded and any(self.versions.since)):
                self._memory.save_shard()
                self._dirty = False
            self._shrink()

    def _shrink(self) -> None:
        assert self._memory is not None
        for parameter in self._parameters:
            guard(parameter)
        if self._external_refs is not None and storage_use_count(self.full) <= self._external_refs:
            self._external_refs = None
        self._memory.shrink(retain=self._external_refs is not None)
        self._enter(Phase.RELEASED)

    def hold(self, reason: Hold) -> None:
        """Keep the unit gathered for `reason`; contexts are counted."""
        if reason is Hold.CONTEXT:
            self._contexts += 1
        self._holds |= reason

    def drop(self, reasons: Hold) -> None:
        """End holds; `release` then gives up the memory."""
        if Hold.CONTEXT in reasons:
            self._contexts -= 1
            reasons = reasons if self._contexts == 0 else reasons & ~Hold.CONTEXT
        self._holds &= ~reasons

    def keep_resident(self) -> None:
        """Have the resting weights stay in memory for their next use."""
        self.residency.pin(range(len(self.resting)))

    def expose(self) -> None:
        """Let code outside of a pass have the gathered weights: a tensor that then shares their memory keeps it."""
        if self._external_refs is None and self.reshards:
            self._external_refs = storage_use_count(self.full)

    @property
    def serves_reads(self) -> bool:
        """Whether a read of a released parameter gathers it: not where other ranks may not do the same."""
        return self._phase is Phase.IN_FLIGHT or self._scope.is_open or not self.is_sharded

    def read(self, parameter: nn.Parameter, operation: str) -> None:
        """Serve a read of a parameter's data outside its own module: wait, gather, or raise."""
        self.check()
        if self._phase is Phase.IN_FLIGHT:
            self.gather()
        elif self.serves_reads:
            self.hold(Hold.FOREIGN_READ)
            self.gather()
            self.expose()
            self._dirty = not self._scope.is_open
        else:
            name = next(member.name for member in self.members if member.parameter is parameter)
            what = f"'{operation}' read the data of parameter '{name}' {tuple(parameter.shape)}"
            raise released_error(what, self.communicator.rank, self.communicator.ranks)

    # Writing values

    @torch.no_grad()
    def load_full(self, values: Tensor) -> None:
        """Take the whole buffer's `values` (size,), in any dtype, and make the parameters views of it.

        The master keeps the precision of `values`; the weights are rounded to the compute dtype.
        """
        self.full.copy_(values)
        for view, parameter in zip(self.layout.views(self.full), self._parameters, strict=True):
            unguard(parameter)
            parameter.data = view
            set_owner(parameter, self, keep=self.temporary)
        self._keep(values)
        self.release()

    @torch.no_grad()
    def broadcast_edit(self, source: int) -> None:
        """Take over the values of the gathered parameters on rank `source`."""
        assert self._phase is Phase.GATHERED
        changed = torch.tensor(self.versions.since, dtype=torch.uint8, device=self.full.device)
        for flat in (changed, self.full):
            self.communicator.broadcast(flat, source, f"unit '{self.name}'")
        self.versions.mark([slot for slot, is_changed in enumerate(changed.tolist()) if is_changed])
        self.versions.see()
        self._keep(self.full)

    def mark_dirty(self) -> None:
        """Note that whole weights may have been written outside of a pass: they rest as they are when released."""
        self._dirty = self.reshards

    def is_shared(self, *, views: int) -> bool:
        """Whether another tensor shares the memory, apart from parameters, `views` of which have other memory by now."""
        return self._external_refs is not None and storage_use_count(self.full) > self._external_refs - views

    def keep_slots(self, slots: Iterable[int]) -> None:
        """Let what was written into `slots` of the gathered weights rest; autograd counts it as a write by the script."""
        self._dirty = self.reshards
        for slot in slots:
            increment_version(self._parameters[slot])

    @torch.no_grad()
    def refresh_full(self) -> None:
        """Have the gathered weights be the resting ones."""
        if self._memory is not None and self._phase is not Phase.RELEASED:
            self.gather()
            self._memory.load_shard()
            if self.is_sharded:
                self.communicator.all_gather(self.full, self._publish_label).wait()
            self._update_restored()

    def save_values(self, memory: Tensor) -> Tensor:
        """Copy the values of `memory`; steps and edits change the copy too, until `restore` writes it back."""
        values = memory.detach().clone()
        self._restored.append((memory, values))
        return values

    @torch.no_grad()
    def restore(self, values: Tensor) -> None:
        """Write back the copy that `save_values` returned."""
        memory = next(memory for memory, saved in self._restored if saved is values)
        self._restored = [pair for pair in self._restored if pair[1] is not values]
        memory.copy_(values)

    def _update_restored(self) -> None:
        for memory, values in self._restored:
            values.copy_(memory)

    def _keep(self, values: Tensor) -> None:
        """Let the gathered weights rest."""
        if self._memory is not None:
            self._memory.save_shard()
        self._update_restored()

    def close(self) -> None:
        """Give back the places on disk of the resting state: nothing is fetched any more."""
        self.rest.close()


def _memory(layout: Layout, stage: Stage, rank: int, dtype: torch.dtype, device: torch.device, store: Store,
            name: str) -> tuple[Elastic | None, Tensor, Span]:
    """Return (the memory that grows and shrinks or None, the whole buffer, the span of it that rests)."""
    part = layout.span(rank) if stage.weight is SHARD else range(layout.size)
    if stage.weight is SHARD or store.granule is not None or store.device != device:
        memory = elastic(layout.size, dtype, part, device, store, name, layout.names)
        return memory, memory.full, memory.shard
    full = zeros(layout.size, dtype, device)
    return None, full, ResidentSpan(full)
