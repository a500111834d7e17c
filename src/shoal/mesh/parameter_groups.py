"""Every unit rests over the ranks that hold its parameters: one rule for all axes of the mesh.

    an ordinary parameter                 the data ranks
    one that tensor ranks do not cut      the data ranks x the tensor ranks
    one that two pipeline stages share    the data ranks of both stages

So the state of every parameter is cut over all its copies, each element has one owner, and copies cannot drift apart.
What the gradients of the ranks are is a rule too: copies on data, sequence and tensor ranks see addends of a mean; uses at
several stages are addends of a sum.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

from shoal.mesh.mesh import AXES, Mesh
from shoal.mesh.tensor_slice import TensorSlice
from shoal.transport.collectives import Communicator

_Kind = tuple[bool, tuple[int, ...], int]
"""Whether no tensor rank cuts a parameter, the pipeline ranks that share it, and which of these has its initial value."""
CUT_COPIES = ("replica", "shard", "sequence")
"""The axes along which a parameter that tensor ranks cut is the same."""
COPIES = (*CUT_COPIES, "tensor")
"""The axes along which any other is."""
_PATIENCE = timedelta(seconds=10)
"""For other ranks to help to give a model back after a failure."""


@dataclass(frozen=True, slots=True, eq=False)
class ReplicaGroup:
    """The ranks that hold the same parameters."""

    communicator: Communicator
    addends: int
    """The gradient of the loss is the sum over the ranks divided by this."""
    late: bool = False
    """They are at several stages, which are never at one point of a pass together: reduced when a step begins."""
    same: int = 1
    """How many of them have one gradient: the tensor ranks, of what they do not cut."""
    replicas: Communicator | None = None
    """The ranks that hold the same slices of the state, in other copies of it (hybrid sharding); None: there is one copy."""
    source: int = 0
    """The rank of the communicator whose initial values all of them take."""
    order: int = 0
    """The position among all holders of the job, the same on every rank: ranks broadcast and reduce late units in it."""

    @property
    def first(self) -> bool:
        """Whether this rank's slices are in the first copy of the state."""
        return self.replicas is None or self.replicas.rank == 0

    @property
    def shared(self) -> bool:
        """Whether they are on all tensor ranks."""
        return self.same > 1

    @property
    def copies(self) -> int:
        """Copies of the state."""
        return 1 if self.replicas is None else self.replicas.ranks


class ParameterGroups:
    """For every parameter of a model, by name, the ranks that hold it."""

    def __init__(self, mesh: Mesh, communicator_of: Callable[[dist.ProcessGroup], Communicator], *,
                 cuts: Mapping[str, TensorSlice] | None = None, stages: Mapping[str, Sequence[int]] | None = None,
                 hybrid: bool = True):
        """`cuts` says what tensor ranks cut, `stages` the pipeline ranks of what several of them hold, that of its initial
        value first. With `hybrid` each replica has a copy of the sharded state; else it is cut over all data ranks.
        """
        self.mesh = mesh
        self._communicator_of = communicator_of
        self.cuts = dict(cuts or {})
        """Which part of the global tensor the parameters are, of those that tensor ranks cut."""
        self._stages = {name: (tuple(sorted(set(found))), found[0]) for name, found in (stages or {}).items()}
        self._communicators: dict[dist.ProcessGroup, Communicator] = {}
        self._holders: dict[_Kind, ReplicaGroup] = {}
        self.everyone = self.communicator(*AXES)
        """All ranks of the job."""
        self.data = self.communicator("data")
        """The data ranks."""
        self.tensor = self.communicator("tensor") if mesh.size("tensor") > 1 else None
        """The ranks that share each layer, where layers are shared."""
        self._replicas = self.communicator("replica") if hybrid and mesh.size("replica") > 1 else None
        mine = {self._kind(name) for name in self._stages}
        known = self.everyone.gather_objects(mine) if mesh.size("pipeline") > 1 else [mine]
        own = mesh.rank("pipeline")
        kinds: list[_Kind] = [(False, (), own), (mesh.size("tensor") > 1, (), own), *sorted(set[_Kind]().union(*known))]
        for order, kind in enumerate(kinds):
            self._meet(kind, order)

    def _meet(self, kind: _Kind, order: int) -> None:
        """Let the holders of one kind of parameter know each other; every rank of the job calls it."""
        uncut, stages, first = kind
        along = COPIES if uncut else CUT_COPIES
        copied = ("replica",) if self._replicas is not None else ()
        group = self.mesh.share(*(axis for axis in along if axis not in copied), stages=stages)
        if group is not None:
            communicator, at_first = self._of(group), set(self.mesh.ranks[first].flatten().tolist())
            source = next(index for index, rank in enumerate(communicator.members) if rank in at_first)
            self._holders[kind] = ReplicaGroup(communicator, self.mesh.size(*along), late=bool(stages),
                                               same=self.mesh.size("tensor") if uncut else 1, replicas=self._replicas,
                                               source=source, order=order)

    def of(self, name: str) -> ReplicaGroup:
        """Return the holders of a parameter."""
        return self._holders[self._kind(name)]

    def _kind(self, name: str) -> _Kind:
        stages, first = self._stages.get(name, ((), self.mesh.rank("pipeline")))
        return name not in self.cuts and self.mesh.size("tensor") > 1, stages, first

    @property
    def slices(self) -> int:
        """How many ranks share one copy of the state of what tensor ranks cut."""
        return self._holders[False, (), self.mesh.rank("pipeline")].communicator.ranks

    @property
    def first(self) -> bool:
        """Whether this rank is the first of those that hold what nobody cuts."""
        return self.mesh.rank(*COPIES) == 0

    @property
    def communicators(self) -> list[Communicator]:
        """All that there are; ranks that share several have them in the same order."""
        return list(self._communicators.values())

    def hurry(self) -> None:
        """Wait but briefly for others from now on: those that did not fail do not help to give a model back."""
        for communicator in self.communicators:
            communicator.timeout = min(communicator.timeout, _PATIENCE)

    def communicator(self, *axes: str) -> Communicator:
        """Return the transport between the ranks that differ from this one in `axes` only; its first call is collective."""
        return self._of(self.mesh.group(*axes))

    def _of(self, group: dist.ProcessGroup) -> Communicator:
        if group not in self._communicators:
            self._communicators[group] = self._communicator_of(group)
        return self._communicators[group]
