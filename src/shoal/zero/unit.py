"""A unit: the parameters that are gathered, reduced and stepped together.

    weight   what rests: the whole buffer, or this rank's span of it, in the compute dtype
    full     the whole buffer in the compute dtype, whose views the parameters are; without memory while released
    master   what the optimizer steps: a view of `weight` where dtype and tier agree, else a copy in fp32

The four redistributions of a step are `gather`, `gradient.launch`, `gradient.fold` and `publish`. A unit is released
between its uses if its weights are sharded, or rest in another tier than the compute device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor, nn

from shoal.mesh.parameter_groups import ReplicaGroup
from shoal.recording.call import Handle
from shoal.sparse.row_exchange import RowExchange
from shoal.tier import (
    Elastic,
    ResidencyPin,
    ResidentSpan,
    Span,
    Store,
    SubSpan,
    Tiers,
    Transfer,
    elastic,
    fetched,
    offset_names,
    storage_use_count,
    zeros,
)
from shoal.tier.span import DONE
from shoal.transport.collectives import Label
from shoal.zero.buffer import Pool
from shoal.zero.gradient import Gradient, GradientDtypes
from shoal.zero.guard import guard, released_error, set_owner, stepped_error, unguard
from shoal.zero.layout import Layout
from shoal.zero.onebit_transport import OneBitTransport
from shoal.zero.optimizer_state import OptimizerState
from shoal.zero.placement import SHARD, Stage, master_dtype
from shoal.zero.version_counters import VersionCounters


class Phase(Enum):
    """What the memory of a unit's parameters holds."""

    RELEASED = "no memory"
    ARRIVING = "what rests on this rank is on its way"
    IN_FLIGHT = "a collective writes it"
    LOOKED_UP = "the rows that the present call looks up"
    GATHERED = "the values"


@dataclass(slots=True)
class Scope:
    """Whether reading a released parameter may gather it: all ranks do the same there."""

    open: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """A parameter of a unit, under its name in the model, with the index of its optimizer group."""

    name: str
    parameter: nn.Parameter
    group: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitDtypes:
    """The dtypes of a unit: of its weights, and of its gradient."""

    compute: torch.dtype
    gradient: GradientDtypes


class Unit:
    """Parameters that rest, travel and change as one flat buffer."""

    temporary = False
    """Whether an engine may take the parameters over."""
    stepped = False
    """Backward has begun its step already, which the engine's `step` will finish."""
    pins = 0
    """How many contexts keep the unit gathered."""
    held = False
    """Read by somebody else's forward: stays gathered until the pass is over."""
    awaited = False
    """Used again soon: stays gathered until then."""
    lent: int | None = None
    """Somebody may share its memory for longer than it is gathered: how many did before."""
    written = False
    """Somebody may have written into whole weights outside of a pass: they rest as they are then."""
    expected = False
    """Used next, once the step that is owed is taken: that leaves the weights in memory."""

    def __init__(self, name: str, members: tuple[Member, ...], stage: Stage, replica_group: ReplicaGroup,
                 dtypes: UnitDtypes, pool: Pool, scope: Scope, tiers: Tiers, *, trainable: bool = True,
                 columns: int | None = None, by_rows: bool = False, signs: bool = False):
        """A table of so many `columns` is cut between rows; with `by_rows` its rows travel alone, with `signs` signs do."""
        self.name = name
        self.stage = stage
        self.trainable = trainable
        self.members = members
        self.owed: Callable[..., None] | None = None
        """Takes the step that the optimizer has decided on, and not taken yet; or, with `wait=False`, notes that it is."""
        self.phase = Phase.GATHERED
        self.replica_group, self.communicator = replica_group, replica_group.communicator
        self.dtypes = dtypes
        self.layout = Layout.pack([(m.name, tuple(m.parameter.shape), m.group) for m in members],
                                  self.communicator.ranks, replica_group.state_copies, columns or 1)
        self._scope = scope
        self._handle: Handle | None = None
        self._parameters = [member.parameter for member in members]
        self.writes = VersionCounters(self._parameters)
        index = self.index = self.communicator.register()
        """The number of the unit: ranks make their units in the same order."""
        self._gather_label = Label(kind="gather", unit=name, index=index)
        self._publish_label = Label(kind="publish", unit=name, index=index)
        self._memory, self.full, self.rest = _memory(self.layout, stage, self.communicator.rank, dtypes.compute, pool.device,
                                                     tiers.weight, f"weights of unit '{name}'")
        self.weight = self.rest.tensor
        self.away = tiers.weight.granule is not None or tiers.weight.device != pool.device
        """Whether the weights rest in another tier than the compute device's memory."""
        self.stay = ResidencyPin(self.rest)
        """What is in memory of weights that nobody has in use: until their next use, or their step."""
        self._arriving: Transfer = DONE
        self.copies: list[tuple[Tensor, Tensor]] = []
        """(What stands, as it was before somebody might write into it): put back when it is to be dropped."""
        self.state: OptimizerState | None = None
        self.gradient: Gradient | None = None
        self._signs = (OneBitTransport.between(self.layout, replica_group, pool, dtypes.compute) if signs and trainable
                       else None)
        self.signed = self._signs is not None
        """Whether its gradient and its weights may travel as signs."""
        if trainable:
            self.gradient = self._new_gradient(dtypes.gradient, pool, tiers.state, columns if by_rows else None)
            self.state = self._new_state(tiers.state)

    @property
    def span(self) -> range:
        """The elements of the buffer that this rank owns."""
        return self.layout.span(self.communicator.rank)

    def addend(self, part: range) -> tuple[Tensor, int] | None:
        """Return the exact addend of the elements `part` of a gradient that came as signs, counted as the master's, and how
        many addends there are; None where all of them are exact.
        """
        if self._signs is None or self._signs.addend is None or self.gradient is None or not self.gradient.signed:
            return None
        return self._signs.addend[part.start:part.stop], self._signs.addends

    @property
    def travels(self) -> bool:
        """Whether the weights are released between their uses."""
        return self._memory is not None

    @property
    def is_stepped_in_place(self) -> bool:
        """Whether what rests of the weights is their master."""
        return self.state is not None and self.state.weights is None

    @property
    def is_released(self) -> bool:
        return self.phase is Phase.RELEASED

    @property
    def resting(self) -> range:
        """The elements of the buffer whose weights rest on this rank."""
        return self.span if self.stage.weight is SHARD else range(self.layout.size)

    @property
    def master(self) -> Tensor | None:
        return None if self.state is None else self.state.master.tensor

    @property
    def master_span(self) -> range:
        """The elements of the buffer whose master rests on this rank."""
        return self.span if self.stage.master is SHARD else range(self.layout.size)

    @torch.no_grad()
    def adopt(self, values: Tensor) -> None:
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

    def fetch(self) -> None:
        """Start bringing what rests on this rank, if the weights are released; what is owed comes by its step."""
        if self.owed is not None and not self.stepped:
            self.owed(wait=False)  # it may have been taken long ago, and its weights been given up
        self.expected = self.owed is not None
        if self.phase is Phase.RELEASED and self.owed is None:
            assert self._memory is not None
            with torch.no_grad():
                self._arriving = self._memory.grow()
                self.stay.unpin()
            self.phase = Phase.ARRIVING

    @property
    def can_stay(self) -> bool:
        """Whether what rests is in memory as long as it is used, and may stay there: nothing copies it then."""
        return self._memory is not None and self._memory.shard_in_full and not isinstance(self.rest, ResidentSpan)

    def keep(self, stepped: range | None = None) -> None:
        """Have what rests, and is in memory, stay there for its next use: all, or `stepped`, counted as the master's."""
        start = self.master_span.start - self.resting.start
        self.stay.pin(range(len(self.resting)) if stepped is None else range(start + stepped.start, start + stepped.stop))

    def prefetch(self) -> None:
        """Start gathering, if the weights are released."""
        if self.owed is not None and self._is_gathered_by_ranks:
            self.owed()
        self.fetch()
        if self.phase is Phase.ARRIVING and self._is_gathered_by_ranks:
            with torch.no_grad():
                self._arriving.wait()
                self._handle = self.communicator.all_gather(self.full, self._gather_label)
            self.phase = Phase.IN_FLIGHT

    def gather(self) -> None:
        """Return when the parameters hold their values."""
        if not self._scope.open:
            self.check()
        if self.phase is Phase.GATHERED:
            return
        if self.owed is not None:
            self.owed()
        if self.phase is Phase.LOOKED_UP:
            self._shrink()
        self.prefetch()
        with torch.no_grad():
            self._arriving.wait()
        if self._handle is not None:
            self._handle.wait()
            self._handle = None
        self.phase = Phase.GATHERED
        for parameter in self._parameters:
            unguard(parameter)
        self.writes.see()

    @property
    def looks_up(self) -> bool:
        """Whether a call of the embedding can do with the rows that it looks up."""
        return self.gradient is not None and self.gradient.rows is not None and self._is_gathered_by_ranks and not self.away

    @torch.no_grad()
    def look_up(self, numbers: Tensor) -> None:
        """Have the rows called `numbers` in memory until the unit is released, or all of them where that is cheaper."""
        if self.phase is Phase.RELEASED and self.owed is None:
            assert self._memory is not None and self.gradient is not None and self.gradient.rows is not None
            self.fetch()
            self._arriving.wait()
            if self.gradient.rows.gather_rows(self.full, numbers):
                self.phase = Phase.LOOKED_UP
                for parameter in self._parameters:
                    unguard(parameter)
        if self.phase is not Phase.LOOKED_UP:
            self.gather()

    @torch.no_grad()
    def release(self) -> None:
        """Give up the memory that the resting weights do not need, unless somebody holds it."""
        if self.phase is Phase.LOOKED_UP:
            self._shrink()
        if self._memory is None or self.phase is Phase.RELEASED or self.pins or self.held or self.awaited:
            return
        # Others may not have begun to bring what arrives here, as they still owe its step: they would not gather it
        self._arriving.wait() if self.phase is Phase.ARRIVING else self.gather()
        if self.written or (self.stage.weight is not SHARD and any(self.writes.since)):
            self._memory.save_shard()
            self.written = False
        self._shrink()

    def lend(self) -> None:
        """Let somebody outside of a pass have the gathered weights: what then shares their memory will find it."""
        if self.lent is None and self.travels:
            self.lent = storage_use_count(self.full)

    def _shrink(self) -> None:
        assert self._memory is not None
        for parameter in self._parameters:
            guard(parameter)
        if self.lent is not None and storage_use_count(self.full) <= self.lent:
            self.lent = None
        self._memory.shrink(retain=self.lent is not None)
        self.phase = Phase.RELEASED

    @torch.no_grad()
    def round(self) -> None:
        """Bring the whole master, rounded, to where this rank's weights rest."""
        if self.state is not None and self.state.weights is not None:
            part = range(len(self.master_span))
            self.state.fetch(part).wait()
            self.state.weights.tensor.copy_(self.state.master.tensor)
            self.state.commit(part)

    @torch.no_grad()
    def gather_master(self) -> Tensor:
        """Return the master of all ranks, the whole buffer (size,), in memory of its own; each rank of the unit calls it."""
        assert self.state is not None
        span, master = self.master_span, self.state.master
        values = torch.zeros(self.layout.size, dtype=master.tensor.dtype, device=self.full.device)
        with fetched(master, changed=False) as own:
            values[span.start:span.stop] = own
        if self.stage.master is SHARD:
            self.communicator.all_gather(values, self._gather_label).wait()
        return values

    def travel(self, *, gradient: bool, weights: bool, still: bool) -> None:
        """From the next backward pass on, let the gradient or the weights travel as signs, or as they are; or stay."""
        assert self.gradient is not None and self.state is not None
        self.gradient.still = still
        if self._signs is not None:
            self.gradient.signed, self.state.follows = gradient, weights

    @torch.no_grad()
    def publish(self) -> None:
        """Bring what the step has written to where the weights rest. The next use waits for what travels."""
        if self.master is None:
            return
        self.renew()
        if self.stage.weight is SHARD or self.stage.master is not SHARD:
            return
        if self._memory is not None:
            self.gather()
            self._travel().wait()
            self._memory.save_shard()
            self.release()
        else:
            for parameter in self._parameters:
                guard(parameter)
            self._handle = self._travel()
            self.phase = Phase.IN_FLIGHT

    @torch.no_grad()
    def renew(self) -> None:
        """Have what is gathered, and pinned, be what rests."""
        if self._memory is not None and self.phase is not Phase.RELEASED:
            self.gather()
            self._memory.load_shard()
            if self.stage.weight is SHARD:
                self.communicator.all_gather(self.full, self._publish_label).wait()
            self._copy()

    def _travel(self) -> Handle:
        """Start bringing the stepped weights of every rank to all ranks."""
        if self.state is not None and self.state.follows:
            assert self._signs is not None
            return self._signs.publish(self.state.master.tensor, self.full, self._publish_label)
        if self.gradient is not None and self.gradient.rows is not None:
            return self.gradient.rows.publish(self.full, written=any(self.writes.since))
        return self.communicator.all_gather(self.full, self._publish_label)

    @torch.no_grad()
    def scatter(self, source: int) -> None:
        """Take over what somebody wrote into the gathered parameters on rank `source`."""
        assert self.phase is Phase.GATHERED
        said = torch.tensor(self.writes.since, dtype=torch.uint8, device=self.full.device)
        for flat in (said, self.full):
            self.communicator.broadcast(flat, source, f"unit '{self.name}'")
        self.writes.mark([slot for slot, changed in enumerate(said.tolist()) if changed])
        self.writes.see()
        self._keep(self.full)

    @property
    def rest_within(self) -> Tensor | None:
        """The sharded weights that rest, where they rest within the whole buffer: what is written there, stays."""
        return self.weight if self._memory is not None and self._memory.shard_in_full else None

    def _copy(self) -> None:
        """Have what is put back later be what stands now."""
        for now, before in self.copies:
            before.copy_(now)

    def spoil(self, owed: Callable[..., None]) -> None:
        """Have the weights not be read any more, wherever they rest: what is `owed` raises why."""
        self.stepped, self.owed, self.phase = False, owed, Phase.RELEASED
        for parameter in self._parameters:
            guard(parameter)

    def check(self) -> None:
        """Raise `UsageError` where backward has stepped the weights already."""
        if self.stepped:
            raise stepped_error(self.name, self.communicator.rank)

    def close(self) -> None:
        """Give back the places on disk of what rested there: nothing is fetched any more."""
        moments = [] if self.state is None else [self.state.master, *self.state.moments.values()]
        for span in [self.rest, *moments, *([] if self.gradient is None else [self.gradient.rest])]:
            span.close()

    def read(self, parameter: nn.Parameter, operation: str) -> None:
        """Serve a read of a parameter's data outside its own module: wait, gather, or raise."""
        self.check()
        if self.phase is Phase.IN_FLIGHT:
            self.gather()
        elif self._scope.open or self.stage.weight is not SHARD:
            self.held = True
            self.gather()
            self.lend()
            self.written = not self._scope.open
        else:
            name = next(member.name for member in self.members if member.parameter is parameter)
            what = f"'{operation}' read the data of parameter '{name}' {tuple(parameter.shape)}"
            raise released_error(what, self.communicator.rank, self.communicator.ranks)

    @property
    def _is_gathered_by_ranks(self) -> bool:
        """Whether gathering takes the other ranks; else what rests here is the whole."""
        return self.stage.weight is SHARD and self.communicator.ranks > 1

    def _keep(self, values: Tensor) -> None:
        """Let the gathered weights rest, and the master be `values` (size,), of any precision."""
        if self._memory is not None:
            self._memory.save_shard()
        self._copy()
        if self.state is not None and self.state.weights is not None:
            span = self.master_span
            with fetched(self.state.master, changed=True) as master:
                master.copy_(values[span.start:span.stop])

    def _new_gradient(self, dtypes: GradientDtypes, pool: Pool, store: Store, columns: int | None) -> Gradient:
        """Return the gradient, of which rows of so many `columns` may travel alone."""
        rows = None if columns is None or self._signs is not None else RowExchange(
            self.communicator, self.layout.size, columns, dtypes.accumulate, dtypes.wire, pool.device,
            unit=self.name, index=self.index)
        return Gradient(self.layout, self.stage, self.replica_group, dtypes, pool, store, unit=self.name, index=self.index,
                        rows=rows, signs=self._signs)

    def _new_state(self, store: Store) -> OptimizerState:
        """Return the state that the optimizer steps, its master of its own, or the resting weights."""
        assert self.gradient is not None
        span, wide = self.master_span, master_dtype(self.full.dtype)
        part, names = (range(span.start - self.resting.start, span.stop - self.resting.start),
                       offset_names(self.layout.names, span.start))
        stepped = (ResidentSpan(self.weight[part.start:part.stop]) if isinstance(self.rest, ResidentSpan)
                   else SubSpan(self.rest, part))
        if wide == self.full.dtype and self.weight.device == store.device and self._signs is None:
            return OptimizerState(self.name, len(span), store, stepped, None, self.gradient, names)
        master = store.place(len(span), wide, f"master of unit '{self.name}'", names=names)
        return OptimizerState(self.name, len(span), store, master, stepped, self.gradient, names)


def _memory(layout: Layout, stage: Stage, rank: int, dtype: torch.dtype, device: torch.device, store: Store,
            name: str) -> tuple[Elastic | None, Tensor, Span]:
    """Return (what grows and shrinks, the whole buffer, what rests of it)."""
    part = layout.span(rank) if stage.weight is SHARD else range(layout.size)
    if stage.weight is SHARD or store.granule is not None or store.device != device:
        memory = elastic(layout.size, dtype, part, device, store, name, layout.names)
        return memory, memory.full, memory.shard
    full = zeros(layout.size, dtype, device)
    return None, full, ResidentSpan(full)
