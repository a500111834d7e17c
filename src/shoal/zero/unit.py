"""A unit: the parameters that are gathered, reduced and stepped together.

    weight   what rests: the whole buffer, or this rank's span of it, in the compute dtype
    full     the whole buffer in the compute dtype, whose views the parameters are; without memory while released
    master   what the optimizer steps: a view of `weight` where the dtypes agree, else a copy in fp32

The four redistributions of a step are `gather`, `gradient.launch`, `gradient.fold` and `publish`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor, nn

from shoal.collectives import Communicator, Handle, Label
from shoal.errors import ReleasedError
from shoal.zero.buffer import Elastic, Pool, elastic, zeros
from shoal.zero.gradient import Gradient, GradientDtypes
from shoal.zero.guard import claim, guard, unguard
from shoal.zero.layout import Layout
from shoal.zero.placement import REPLICATE, SHARD, Stage, master_dtype


class Phase(Enum):
    """What the memory of a unit's parameters holds."""

    RELEASED = "no memory"
    IN_FLIGHT = "a collective writes it"
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

    def __init__(self, name: str, members: tuple[Member, ...], stage: Stage, communicator: Communicator,
                 dtypes: UnitDtypes, pool: Pool, scope: Scope, *, trainable: bool = True):
        self.name = name
        self.stage = stage
        self.trainable = trainable
        self.members = members
        self.pins = 0
        """How many contexts keep the unit gathered."""
        self.held = False
        """Read by somebody else's forward: stays gathered until the pass is over."""
        self.awaited = False
        """Used again soon: stays gathered until then."""
        self.is_rounded = False
        """The step has brought the master to `rounded` already."""
        self.phase = Phase.GATHERED
        self.communicator = communicator
        self.dtypes = dtypes
        self.layout = Layout.pack([(m.name, tuple(m.parameter.shape), m.group) for m in members], communicator.ranks)
        self._scope = scope
        self._handle: Handle | None = None
        self._parameters = [member.parameter for member in members]
        index = self.index = communicator.register()
        """The number of the unit: ranks make their units in the same order."""
        self._gather_label = Label(kind="gather", unit=name, index=index)
        self._publish_label = Label(kind="publish", unit=name, index=index)
        self._memory, self.full, self.weight = _memory(self.layout, stage, communicator.rank, dtypes.compute, pool.device)
        self._own = self.full[self.span.start:self.span.stop]
        self.master: Tensor | None = None
        self.gradient: Gradient | None = None
        if trainable:
            self.master = self._new_master(pool.device)
            self.gradient = Gradient(self.layout, stage, communicator, dtypes.gradient, pool, unit=name, index=index)

    @property
    def span(self) -> range:
        """The elements of the buffer that this rank owns."""
        return self.layout.span(self.communicator.rank)

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
            claim(parameter, self)
        if self.weight is not self.full:
            self.weight.copy_(self._own)
        if self.master is not None and self.master.dtype != self.full.dtype:
            span = self.master_span
            self.master.copy_(values[span.start:span.stop])
        self.release()

    def prefetch(self) -> None:
        """Start gathering, if the weights are released."""
        if self.phase is not Phase.RELEASED:
            return
        assert self._memory is not None
        with torch.no_grad():
            self._memory.grow()
            self._handle = self.communicator.all_gather(self.full, self._gather_label)
        self.phase = Phase.IN_FLIGHT

    def gather(self) -> None:
        """Return when the parameters hold their values."""
        if self.phase is Phase.GATHERED:
            return
        self.prefetch()
        assert self._handle is not None
        self._handle.wait()
        self._handle = None
        self.phase = Phase.GATHERED
        for parameter in self._parameters:
            unguard(parameter)

    def release(self) -> None:
        """Give up the memory that the resting weights do not need, unless somebody holds it."""
        if self._memory is None or self.phase is Phase.RELEASED or self.pins or self.held or self.awaited:
            return
        self.gather()
        for parameter in self._parameters:
            guard(parameter)
        self._memory.shrink()
        self.phase = Phase.RELEASED

    @property
    def rounded(self) -> Tensor | None:
        """Where the master goes, rounded to the compute dtype; None where the weights are their own master."""
        if self.master is None or self.master.dtype == self.full.dtype:
            return None
        if self.weight is not self.full:
            return self.weight
        return self.full if self.stage.master is REPLICATE else self._own

    @torch.no_grad()
    def publish(self) -> None:
        """Bring the stepped master to where the weights rest. The next use waits for what travels."""
        if self.master is None:
            return
        rounded, done, self.is_rounded = self.rounded, self.is_rounded, False
        if rounded is not None and not done:
            rounded.copy_(self.master)
        if self.weight is not self.full:
            if self.phase is not Phase.RELEASED:  # pinned: what is gathered must be the new weights
                self.gather()
                self._own.copy_(self.weight)
                self.communicator.all_gather(self.full, self._publish_label).wait()
            return
        if self.stage.master is REPLICATE:
            return
        for parameter in self._parameters:
            guard(parameter)
        self._handle = self.communicator.all_gather(self.full, self._publish_label)
        self.phase = Phase.IN_FLIGHT

    @torch.no_grad()
    def scatter(self, source: int | None) -> None:
        """Take over what somebody wrote into the gathered parameters on rank `source` (None: every rank the same)."""
        assert self.phase is Phase.GATHERED
        if source is not None:
            self.communicator.broadcast(self.full, source, f"unit '{self.name}'")
        if self.weight is not self.full:
            self.weight.copy_(self._own)
        if self.master is not None and self.master.dtype != self.full.dtype:
            span = self.master_span
            self.master.copy_(self.full[span.start:span.stop])

    @property
    def rest_within(self) -> Tensor | None:
        """The sharded weights that rest, where they rest within the whole buffer: what is written there, stays."""
        return self.weight if self.weight is not self.full and self.weight.data_ptr() == self._own.data_ptr() else None

    @torch.no_grad()
    def restore(self, rest: Tensor) -> None:
        """Undo what was written into the resting weights since they were `rest`."""
        self.weight.copy_(rest)

    def read(self, parameter: nn.Parameter, operation: str) -> None:
        """Serve a read of a parameter's data outside its own module: wait, gather, or raise."""
        if self.phase is Phase.IN_FLIGHT:
            self.gather()
        elif self._scope.open:
            self.held = True
            self.gather()
        else:
            name = next(member.name for member in self.members if member.parameter is parameter)
            raise ReleasedError(
                f"rank {self.communicator.rank}: '{operation}' read the data of parameter '{name}' "
                f"{tuple(parameter.shape)}, which is sharded over {self.communicator.ranks} ranks and released at present. "
                f"Outside the engine's forward, gather it first, on every rank: "
                f"`with shoal.gathered(parameter): ...` (add modifier_rank=0 to keep what you write). "
                f"For all weights at once: engine.consolidated_state_dict()")

    def _new_master(self, device: torch.device) -> Tensor:
        """Return the tensor that the optimizer steps: of its own, or within the weights where the dtypes agree."""
        wide = master_dtype(self.full.dtype)
        if wide != self.full.dtype:
            return zeros(len(self.master_span), wide, device)
        if self.stage.master is REPLICATE:
            return self.full
        return self._own if self.stage.weight is REPLICATE else self.weight


def _memory(layout: Layout, stage: Stage, rank: int, dtype: torch.dtype,
            device: torch.device) -> tuple[Elastic | None, Tensor, Tensor]:
    """Return (what grows and shrinks, the whole buffer, what rests of it)."""
    if stage.weight is SHARD:
        memory = elastic(layout.size, dtype, layout.span(rank), device)
        return memory, memory.full, memory.rest
    full = zeros(layout.size, dtype, device)
    return None, full, full
