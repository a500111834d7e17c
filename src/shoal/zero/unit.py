"""A unit: the parameters that are gathered, reduced and stepped together, as one flat buffer.

    weight   the resting weights: the whole buffer, or this rank's shard of it, in the compute dtype (`WeightMemory`)
    full     the whole buffer in the compute dtype, whose views the parameters are; without memory while released
    master   the optimizer's fp32 copy: a view of `weight` where dtype and tier agree, else a copy (`TrainableUnit`)

A unit is released between its uses if its weights are sharded, or rest in another tier than the compute device.
`TRANSITIONS` lists how its phase may change, and a `Hold` is a reason to keep it gathered. Other files call its methods, and
write none of its attributes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from typing import Final

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from shoal.autograd import at_end_of_backward, in_backward
from shoal.mesh.parameter_groups import ReplicaGroup
from shoal.recording.call import Handle
from shoal.tier import ResidencyPin, ResidentSpan, Span, Store, Transfer
from shoal.tier.span import DONE
from shoal.zero.grad_attribute import show_grads
from shoal.zero.guard import guard, released_error, stepped_error, unguard
from shoal.zero.layout import Layout
from shoal.zero.other_memory import take_over
from shoal.zero.ownership import GradReader, set_owner
from shoal.zero.placement import Stage
from shoal.zero.unit_state import TRANSITIONS, Hold, Member, PendingStep, Phase, Scope, VersionCounters
from shoal.zero.unit_transport import Transports, WeightTransport
from shoal.zero.weight_memory import WeightMemory

__all__ = ["Unit"]


class Unit:
    """Frozen parameters, or the weights of a `TrainableUnit`."""

    temporary = False
    """Whether an engine may take the parameters over."""

    def __init__(self, name: str, members: tuple[Member, ...], stage: Stage, replica_group: ReplicaGroup,
                 dtype: torch.dtype, device: torch.device, scope: Scope, weights: Store, *, columns: int | None = None,
                 transports: Transports | None = None):
        """An embedding of `columns` columns is cut between rows. `weights` is the tier in which weights rest."""
        self.name, self.stage, self.members = name, stage, members
        self.replica_group, self.communicator = replica_group, replica_group.communicator
        self.layout = Layout.pack([(m.name, tuple(m.parameter.shape), m.group) for m in members],
                                  self.communicator.ranks, replica_group.state_copies, columns or 1)
        self.index = self.communicator.register()
        """The number of the unit, equal on every rank: all make their units in the same order."""
        self.is_sharded: Final = stage.shards_weights
        """Whether this rank holds only a part of the weights at rest, or none."""
        self.shard_range: Final = self.layout.shard_range(self.communicator.rank)
        """The elements of the buffer that this rank owns."""
        self.resting_range: Final = self.shard_range if self.is_sharded else range(self.layout.size)
        """The elements of the buffer whose weights rest on this rank."""
        self.memory = WeightMemory(self.layout, self.resting_range, dtype, device, weights, f"weights of unit '{name}'",
                                   reshards=self.is_sharded)
        self.full, self.rest = self.memory.full, self.memory.rest
        self.reshards: Final = self.memory.can_shrink
        """Whether the weights are released between their uses."""
        self.can_stay_resident: Final = (self.reshards and self.memory.rests_in_full
                                         and not isinstance(self.rest, ResidentSpan))
        """Whether the resting weights are in memory while they are used, and may stay there: nothing copies them then."""
        self.residency = ResidencyPin(self.rest)
        """Resting weights that stay in memory until their next use, or their step."""
        self.pending: PendingStep | None = None
        self.grads: GradReader | None = None
        """The reader of the parameters' `grad` at present."""
        self.phase = Phase.GATHERED
        self._gathers_over_ranks = self.is_sharded and self.communicator.ranks > 1  # else the whole rests here
        self._transports = transports or Transports()
        self._scope = scope
        self._holds, self._contexts = Hold.NONE, 0
        self._loading: Transfer = DONE
        self._handle: Handle | None = None
        self._parameters = [member.parameter for member in members]
        self.versions = VersionCounters(self._parameters)
        self._backward_gather: Callable[[], None] | None = None

    def _enter(self, phase: Phase) -> None:
        assert (self.phase, phase) in TRANSITIONS, f"unit '{self.name}': {self.phase.name} -> {phase.name}"
        self.phase = phase

    @property
    def is_released(self) -> bool:
        return self.phase is Phase.RELEASED

    @property
    def holds_values(self) -> bool:
        """Whether the whole buffer holds the weights, whether they may be read or not."""
        return self.phase in (Phase.GATHERED, Phase.CONCEALED)

    @cached_property
    def weight_transport(self) -> WeightTransport:
        """The transport that gathers the weights."""
        return self._transports.frozen(self.communicator, self.name, self.index)

    @property
    def high_precision(self) -> Span:
        """The most precise copy of the weights that rests on this rank: the master, or the weights of a frozen unit."""
        return self.rest

    @property
    def high_precision_range(self) -> range:
        """The elements of the buffer that `high_precision` holds."""
        return self.resting_range

    @property
    def saved_range(self) -> range:
        """The elements of the buffer that this rank saves: all that rests here, or its shard of what every rank has."""
        return self.resting_range if self.is_sharded else self.shard_range

    @property
    def readers(self) -> int:
        """How many keep the unit gathered: `gathered` contexts, and code that read the weights outside their module."""
        return self._contexts + (Hold.FOREIGN_READ in self._holds)

    @property
    def gathers_rows(self) -> bool:
        """Whether a call of the embedding gathers only the rows that it looks up."""
        return self.weight_transport.gathers_rows and self._gathers_over_ranks and not self.memory.is_offloaded

    @property
    def awaits_step(self) -> bool:
        """Whether a pending step has yet to be taken."""
        return self.pending is not None and not self.pending.is_taken

    @property
    def keeps_writes(self) -> bool:
        """Whether a script's writes into gathered weights stay: where a rank holds a part, `gathered` decides instead."""
        return not self.is_sharded

    # Steps that are pending

    def begin_step(self, step: PendingStep) -> None:
        """Set the pending `step`, which the unit asks before its memory is used."""
        self.pending = step

    def end_step(self) -> None:
        """Note that the weights show the step, and may be used."""
        self.pending = None

    def invalidate(self, step: PendingStep) -> None:
        """Note that the weights are of no use: every later access asks the failed `step`, which raises the error."""
        self.pending = step
        self._enter(Phase.LOST)
        for parameter in self._parameters:
            guard(parameter)

    def check_not_stepped(self) -> None:
        """Raise `UsageError` where backward has stepped the weights already."""
        if self.pending is not None and self.pending.in_backward:
            raise stepped_error(self.name, self.communicator.rank)

    # Gathering and releasing

    def fetch(self) -> None:
        """Start bringing the resting weights, if the unit is released. A pending step brings them instead."""
        if self.pending is not None:
            self.pending.request()
        if not self.awaits_step:
            self._start_loading()

    def prefetch(self) -> None:
        """Start gathering, if the unit is released. A collective waits for a pending step, a fetch on this rank does not."""
        if not self._gathers_over_ranks:
            self.fetch()
            return
        if self.pending is not None:
            self.pending.finish()
        self._start_loading()
        self._start_gather()

    def _start_loading(self) -> None:
        """Start bringing the resting weights of a released unit."""
        if self.phase is Phase.RELEASED:
            with torch.no_grad():
                self._loading = self.memory.grow()
                self.residency.unpin()
            self._enter(Phase.LOADING)

    def _start_gather(self) -> None:
        """Start the all-gather of a unit whose weights are on their way, where the ranks hold parts of it."""
        if self.phase is Phase.LOADING and self._gathers_over_ranks:
            with torch.no_grad(), self._loading.following():  # compute before its use waits for neither
                self._handle = self.weight_transport.gather(self.full, self.memory.own)
            self._enter(Phase.IN_FLIGHT)

    def gather(self) -> None:
        """Gather the weights and wait for them."""
        if not self._scope.is_open:
            self.check_not_stepped()
        if self.pending is not None and not self.holds_values:
            self.pending.finish()  # which may gather it to publish, and a hold keeps it gathered
        if self.phase is Phase.CONCEALED:
            self._enter(Phase.GATHERED)
            self._unguard()
        if self.phase is Phase.GATHERED:
            self.memory.use()
            return
        if self.phase is Phase.ROWS_GATHERED:
            self._shrink()
        self._start_loading()
        self._start_gather()
        self._arrive()

    def finish_gather(self) -> None:
        """Wait for the gather or the publication under way, if there is one. Starts none, so that one rank may call it."""
        if self.phase is Phase.IN_FLIGHT:
            self._arrive()

    def _arrive(self) -> None:
        """Wait for what is under way, and let the weights be read."""
        with torch.no_grad():
            self._loading.wait()
        if self._handle is not None:
            self._handle.wait()
            self._handle = None
        self.memory.arrive()
        self._enter(Phase.GATHERED)
        self._unguard()
        self.versions.see()
        self.memory.expose()

    def set_backward_gather(self, gather: Callable[[], None]) -> None:
        """Set the function that gathers the unit for a backward pass, and has it released when its module is done."""
        self._backward_gather = gather

    def bring_shard(self) -> None:
        """Have the buffer of a released unit hold this rank's resting weights alone, until it is released."""
        self.fetch()
        self._loading.wait()
        self.memory.arrive()
        self.memory.load()

    def gather_in_backward(self) -> None:
        """Gather the unit for a backward pass. Without an engine, release it when the pass ends."""
        if self._backward_gather is not None:
            self._backward_gather()
            return
        if in_backward() and self.is_released:
            at_end_of_backward(self.release)
        self.gather()

    def serve_grads(self, reader: GradReader | None) -> None:
        """Have `reader` answer for the `grad` of the parameters; None: scripts find what autograd writes."""
        self.grads = reader

    def conceal(self) -> None:
        """Guard the weights of a unit that stays gathered for its next use: to read them raises as if it were released."""
        if self.phase is Phase.GATHERED and self.is_sharded and not self._contexts:
            self._take_writes()
            self._enter(Phase.CONCEALED)
            for parameter in self._parameters:
                guard(parameter)

    @torch.no_grad()
    def gather_rows(self, rows: Tensor) -> None:
        """Gather the `rows` of an embedding until the unit is released, or all of it where that is fewer bytes."""
        if self.phase is Phase.RELEASED and not self.awaits_step:
            self.bring_shard()
            if self.weight_transport.gather_rows(self.full, rows):
                self._enter(Phase.ROWS_GATHERED)
                self._unguard()
        if self.phase is Phase.ROWS_GATHERED:
            self.memory.use()
        else:
            self.gather()

    def release(self) -> None:
        """Give up the memory that the resting weights do not need, unless a hold keeps it."""
        if self.phase is Phase.ROWS_GATHERED:
            self._shrink()
        if not self.reshards or self.phase in (Phase.RELEASED, Phase.LOST) or self._holds:
            return
        with torch.no_grad():
            if self.phase is Phase.LOADING:  # where a deferred step is pending, another rank has not started this fetch:
                self._loading.wait()  # no collective
            self.finish_gather()
            self._take_writes()
            self._shrink()

    def _take_writes(self) -> None:
        """Let rest what a script has written to the gathered weights since they arrived: in place, or as other memory.

        Where ranks hold parts, each keeps its own part of what it wrote, as a module's forward does on every rank.
        """
        if self.phase is Phase.GATHERED and self.pending is None:
            replaced = take_over(self)
            written = [slot for slot, is_written in enumerate(self.versions.since) if is_written or slot in replaced]
            if written:
                self._rest_writes(written)
                self.versions.see()

    def _rest_writes(self, slots: Sequence[int]) -> None:
        """Save the gathered weights, and where there is a master what `slots` hold."""
        self.memory.save()

    def _unguard(self) -> None:
        for parameter in self._parameters:
            unguard(parameter)
        if self.grads is not None:
            show_grads(self._parameters)

    def _shrink(self) -> None:
        for parameter in self._parameters:
            guard(parameter)
        self.memory.shrink()
        self._enter(Phase.RELEASED)

    def finish_transfers(self) -> None:
        """Wait for a fetch or a gather under way, and release what it brought."""
        if self.phase in (Phase.LOADING, Phase.IN_FLIGHT):
            self.finish_gather()
            self.release()

    def hold(self, reason: Hold) -> None:
        """Keep the unit gathered for `reason`; contexts are counted."""
        if reason is Hold.CONTEXT:
            self._contexts += 1
        self._holds |= reason

    def end_hold(self, reasons: Hold) -> None:
        """End holds; `release` then gives up the memory."""
        if self._holds is Hold.NONE:  # at almost every call, and arithmetic of flags takes microseconds
            return
        if Hold.CONTEXT in reasons:
            self._contexts -= 1
            reasons = reasons if self._contexts == 0 else reasons & ~Hold.CONTEXT
        self._holds &= ~reasons

    def keep_resident(self) -> None:
        """Have the resting weights stay in memory for their next use."""
        self.residency.pin(range(len(self.resting_range)))

    @property
    def serves_reads(self) -> bool:
        """Whether a read of a released parameter gathers it: not where other ranks may not do the same."""
        return self._scope.is_open or in_backward() or not self.is_sharded

    def read(self, parameter: nn.Parameter, operation: str, operands: Sequence[Tensor] = ()) -> None:
        """Serve a read of a parameter's data outside its own module: wait, gather, or raise."""
        self.check_not_stepped()
        if self.phase is Phase.LOST and self.pending is not None:
            self.pending.finish()  # raises the error of the step
        if not self.reshards:  # a step publishes them
            self.gather()
        elif in_backward() and not self._scope.is_open:  # by a node that runs before all modules
            self.gather_in_backward()
        elif self.serves_reads:
            self.hold(Hold.FOREIGN_READ)
            self.gather()
            if not self._scope.is_open:
                self.memory.mark_dirty()
        else:
            name = next(member.name for member in self.members if member.parameter is parameter)
            what = f"'{operation}' read the data of parameter '{name}' {tuple(parameter.shape)}"
            raise released_error(what, self.communicator.rank, self.communicator.ranks)

    def copy(self, parameter: nn.Parameter) -> nn.Parameter | None:
        """Return None: a copy of a released parameter reads its values, as any other operation does."""
        return None

    def copy_at_rest(self, parameter: nn.Parameter, source: nn.Parameter) -> bool:
        """Return False: a write to a released parameter reads its values, as any other operation does."""
        return False

    # Training: a frozen unit has no gradient, and no master

    @property
    def has_separate_master(self) -> bool:
        """Whether a step writes another tensor than the resting weights, and casts it to them."""
        return False

    @property
    def slots_without_grad(self) -> Sequence[int]:
        """The slots that the present backward pass may still give a gradient."""
        return ()

    def expect_recompute(self) -> None:
        """Note that recompute within backward will run the module's forward once more, and give it gradients."""

    def conclude_grads(self) -> None:
        """Note that the present backward pass gives the unit no more gradients."""

    def keep_for_step(self) -> None:
        """Have the weights stay in memory that a step within the present backward pass is to read."""

    # Writing values

    @torch.no_grad()
    def load_full(self, values: Tensor) -> None:
        """Take the whole buffer's `values` (size,), in any dtype, and make the parameters views of it.

        The master keeps the precision of `values`; the weights are rounded to the compute dtype.
        """
        self.full.copy_(values)
        self._unguard()
        for view, parameter in zip(self.layout.views(self.full), self._parameters, strict=True):
            parameter.data = view
            set_owner(parameter, self, keep=self.temporary)
        self._keep(values)
        self.release()

    @torch.no_grad()
    def broadcast_edit(self, source: int) -> None:
        """Take over the values of the gathered parameters on rank `source`."""
        assert self.phase is Phase.GATHERED
        changed = torch.tensor(self.versions.since, dtype=torch.uint8, device=self.full.device)
        for flat in (changed, self.full):
            self.communicator.broadcast(flat, source, f"unit '{self.name}'")
        self.versions.mark([slot for slot, is_changed in enumerate(changed.tolist()) if is_changed])
        self.versions.see()
        self._save_weights()

    def keep_slots(self, slots: Iterable[int]) -> None:
        """Save writes to `slots` to the resting weights and the master; autograd counts them as writes by the script."""
        self.memory.mark_dirty()
        for slot in slots:
            increment_version(self._parameters[slot])

    @torch.no_grad()
    def refresh_full(self) -> None:
        """Have the gathered weights be the resting ones."""
        if self.reshards and self.phase is not Phase.RELEASED:
            self.gather()
            self.memory.load()
            if self.is_sharded:
                self.weight_transport.gather(self.full).wait()
            self.memory.update_snapshots()

    def _keep(self, values: Tensor) -> None:
        """Save the gathered weights, and where there is a master its part of `values`."""
        self._save_weights()

    def _save_weights(self) -> None:
        self.memory.save()
        self.memory.update_snapshots()

    def close(self) -> None:
        """Give back the places on disk of the resting state: nothing is fetched any more."""
        self.rest.close()
