"""A unit is sharded over all ranks that hold its parameters: one rule for every axis of the mesh.

    an ordinary parameter                 the data ranks
    one that tensor ranks do not slice    the data ranks x the tensor ranks
    one that several pipeline stages use  the data ranks of these stages

The state of a parameter is therefore sharded over all its copies: each element has one owner, and copies cannot drift
apart. The gradients follow a rule too: data, sequence and tensor ranks contribute addends of a mean, pipeline stages
contribute addends of a sum.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

from shoal.mesh.mesh import AXES, Mesh
from shoal.mesh.tensor_slice import TensorSlice
from shoal.transport.collectives import Communicator

_GroupKey = tuple[bool, tuple[int, ...], int]
"""Whether all tensor ranks hold the parameter whole, the pipeline ranks that share it (empty for one stage), and the
pipeline rank that has its initial value."""
SLICED_REPLICA_AXES = ("replica", "shard", "sequence")
"""The axes along which a parameter that tensor ranks slice is replicated."""
REPLICA_AXES = (*SLICED_REPLICA_AXES, "tensor")
"""The axes along which any other parameter is replicated."""
AXES_OF_ONE_PASS = ("sequence", "tensor")
"""The axes along which ranks compute one pass together, with collectives within its blocks."""
_CLEANUP_TIMEOUT = timedelta(seconds=10)
"""The wait for other ranks while this rank gives its model back after a failure."""


@dataclass(frozen=True, slots=True, eq=False)
class ReplicaGroup:
    """The ranks that hold the same parameters, and so share their state and add up their gradients."""

    communicator: Communicator
    grad_divisor: int
    """The gradient of the loss is the sum over the ranks, divided by this."""
    spans_stages: bool = False
    """Whether the ranks are at several pipeline stages. No point of a backward pass is common to these, so the unit is
    reduced when a step begins."""
    identical_grad_ranks: int = 1
    """The number of ranks with one and the same gradient: the tensor ranks, for a parameter that they do not slice."""
    replicas: Communicator | None = None
    """The ranks that hold the same shard in other copies of the state (hybrid sharding); None where there is one copy."""
    source: int = 0
    """The rank of `communicator` that broadcasts the initial values."""
    order: int = 0
    """The position among all replica groups of the job, equal on every rank. Ranks broadcast and reduce units that span
    stages in this order."""

    @property
    def is_first_copy(self) -> bool:
        """Whether this rank's shard belongs to the first copy of the state."""
        return self.replicas is None or self.replicas.rank == 0

    @property
    def tensor_replicated(self) -> bool:
        """Whether all tensor ranks hold the parameters whole."""
        return self.identical_grad_ranks > 1

    @property
    def state_copies(self) -> int:
        """The number of copies of the sharded state."""
        return 1 if self.replicas is None else self.replicas.ranks


class ParameterGroups:
    """Gives, for every parameter of a model by name, the ranks that hold it."""

    def __init__(self, mesh: Mesh, communicator_of: Callable[[dist.ProcessGroup], Communicator], *,
                 tensor_slices: Mapping[str, TensorSlice] | None = None,
                 stages: Mapping[str, Sequence[int]] | None = None, hybrid: bool = True):
        """Create the communicators; a collective call.

        `tensor_slices` lists the parameters that tensor ranks slice. `stages` lists, for a parameter that several stages
        hold, their pipeline ranks; the first has the initial value. With `hybrid` each replica has its own copy of the
        sharded state; else the state is sharded over all data ranks.
        """
        self.mesh = mesh
        self._communicator_of = communicator_of
        self.tensor_slices = dict(tensor_slices or {})
        """This rank's part of the global tensor, for each parameter that tensor ranks slice."""
        self._stages = {name: (tuple(sorted(set(ranks))), ranks[0]) for name, ranks in (stages or {}).items()}
        self._communicators: dict[dist.ProcessGroup, Communicator] = {}
        self._replica_groups: dict[_GroupKey, ReplicaGroup] = {}
        self.world = self.communicator(*AXES)
        """All ranks of the job."""
        self.data = self.communicator("data")
        """The data ranks."""
        self.tensor = self.communicator("tensor") if mesh.size("tensor") > 1 else None
        """The tensor ranks; None where there is only one."""
        self.sequence = self.communicator("sequence") if mesh.size("sequence") > 1 else None
        """The ranks that share sequences; None where there is only one."""
        self.buffers = self.data if self.sequence is None else self.communicator(*SLICED_REPLICA_AXES)
        """The ranks that have the same buffers: the data ranks, with all parts of their sequences."""
        self._replicas = self.communicator("replica") if hybrid and mesh.size("replica") > 1 else None
        local_keys = {self._key(name) for name in self._stages}
        all_keys = self.world.gather_objects(local_keys) if mesh.size("pipeline") > 1 else [local_keys]
        own = mesh.rank("pipeline")
        keys: list[_GroupKey] = [(False, (), own), (mesh.size("tensor") > 1, (), own),
                                 *sorted(set[_GroupKey]().union(*all_keys))]
        for order, key in enumerate(keys):
            self._create_group(key, order)

    def _create_group(self, key: _GroupKey, order: int) -> None:
        """Create the replica group of one key, where this rank is a member; every rank of the job calls it."""
        tensor_replicated, stages, source_stage = key
        axes = REPLICA_AXES if tensor_replicated else SLICED_REPLICA_AXES
        separate = ("replica",) if self._replicas is not None else ()
        group = self.mesh.group_or_none(*(axis for axis in axes if axis not in separate), stages=stages)
        if group is not None:
            communicator, at_source = self._of(group), set(self.mesh.ranks[source_stage].flatten().tolist())
            source = next(index for index, rank in enumerate(communicator.members) if rank in at_source)
            self._replica_groups[key] = ReplicaGroup(
                communicator, self.mesh.size(*axes), spans_stages=bool(stages),
                identical_grad_ranks=self.mesh.size("tensor") if tensor_replicated else 1, replicas=self._replicas,
                source=source, order=order)

    def group_of(self, name: str) -> ReplicaGroup:
        """Return the ranks that hold a parameter."""
        return self._replica_groups[self._key(name)]

    def _key(self, name: str) -> _GroupKey:
        stages, source_stage = self._stages.get(name, ((), self.mesh.rank("pipeline")))
        return name not in self.tensor_slices and self.mesh.size("tensor") > 1, stages, source_stage

    @property
    def state_shards(self) -> int:
        """The number of ranks that share one copy of the state of what tensor ranks slice."""
        return self._replica_groups[False, (), self.mesh.rank("pipeline")].communicator.ranks

    @property
    def is_first_copy(self) -> bool:
        """Whether this rank is the first among the ranks that hold the same unsliced tensors."""
        return self.mesh.rank(*REPLICA_AXES) == 0

    @property
    def communicators(self) -> list[Communicator]:
        """All communicators; ranks that share several have them in the same order."""
        return list(self._communicators.values())

    def shorten_timeouts(self) -> None:
        """Wait only briefly for other ranks from now on, since ranks that did not fail take no part in the cleanup."""
        for communicator in self.communicators:
            communicator.shorten_timeout(_CLEANUP_TIMEOUT)

    def communicator(self, *axes: str) -> Communicator:
        """Return the communicator of the ranks that differ from this one in `axes` only; its first call is collective."""
        return self._of(self.mesh.group(*axes))

    def _of(self, group: dist.ProcessGroup) -> Communicator:
        if group not in self._communicators:
            self._communicators[group] = self._communicator_of(group)
        return self._communicators[group]
