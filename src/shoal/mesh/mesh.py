"""The mesh: every rank has a coordinate on five axes; a group of ranks is those that differ in some of the axes only.

    pipeline   which stage of the model      slowest: neighbours here are farthest apart
    replica    which copy of a shard group
    shard      which slice of the state
    sequence   which part of a sample
    tensor     which part of a layer         fastest: neighbours here are ranks of one machine

Ranks that differ in replica or shard see different samples: they are the data ranks.

This is the only file that names axes. A mesh is also what Megatron-style scripts call an `mpu`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from math import prod
from typing import TYPE_CHECKING, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.config.section import Positive, Section
from shoal.errors import UsageError
from shoal.transport import process_group

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["AXES", "DATA", "MODEL", "Mesh", "MeshSettings", "Sizes", "adapt"]

AXES = ("pipeline", "replica", "shard", "sequence", "tensor")
DATA = ("replica", "shard")
MODEL = ("pipeline", "sequence", "tensor")
"""The axes of one copy of the model."""


class MeshSettings(Section):
    """The size of each axis of the mesh; the product is the number of ranks. (Shoal only.)"""

    pipeline: Positive | None = None
    """Pipeline ranks; null: the number of the PipelineModule, or 1 without one."""

    replica: Positive | None = None
    """Copies of the sharded state; null: 1, or derived from `zero_optimization.mics_shard_size`."""

    shard: Positive | None = None
    """Ranks that share one copy of the sharded state; null: all ranks divided by the other axes."""

    sequence: Positive | None = None
    """Ranks that process parts of the same sequences; null: 1."""

    tensor: Positive | None = None
    """Ranks that share a layer; null: 1, or `tensor_parallel.autotp_size`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """How many coordinates each axis has; `shard` takes what the others leave where it is None."""

    pipeline: int = 1
    replica: int = 1
    shard: int | None = None
    sequence: int = 1
    tensor: int = 1

    def __post_init__(self) -> None:
        for axis, size in self.given.items():
            if type(size) is not int:
                raise UsageError(f"mesh: {axis}: got {size!r}; give a whole number of coordinates, 1 or more")
            if size < 1:
                raise UsageError(f"mesh: {axis}: got {size}; an axis has 1 coordinate or more")

    @property
    def given(self) -> dict[str, int]:
        named = {field.name: getattr(self, field.name) for field in fields(self)}
        return {axis: size for axis, size in named.items() if size is not None}

    def over(self, ranks: int) -> tuple[int, ...]:
        """Return the size of every axis of a mesh of `ranks`. Raises `UsageError` where the sizes do not multiply to it."""
        given = self.given
        rest, over = divmod(ranks, prod(given.values()))
        terms = " x ".join(f"{axis} {size}" for axis, size in given.items() if size > 1 or axis == "shard") or "1"
        if over or rest == 0:
            raise UsageError(f"mesh: {terms} = {prod(given.values())} does not divide the {ranks} ranks of the job; change "
                             f"a size, or start a multiple of {prod(given.values())} ranks")
        if self.shard is not None and rest != 1:
            raise UsageError(f"mesh: {terms} = {prod(given.values())}, and the job has {ranks} ranks; leave shard out to "
                             f"let it take the rest, or start {prod(given.values())} ranks")
        return tuple((given | {"shard": given.get("shard", rest)})[axis] for axis in AXES)


class Mesh:
    """The ranks of a job by their coordinates, and the groups that this rank is in.

    mesh = Mesh(pipeline=2, tensor=2)       the rest of the ranks are data ranks
    mesh.rank("tensor"), mesh.size("data")  this rank's coordinate on an axis, or on several taken together
    mesh.group("tensor")                    its process group: the ranks that differ in that axis only

    Ranks are numbered with the last axis fastest, unless `ranks`, a tensor of the shape of the axes, says otherwise.
    Every rank makes the same mesh. Raises `UsageError` where the sizes do not multiply to the ranks of the job.
    """

    def __init__(self, *, pipeline: int = 1, replica: int = 1, shard: int | None = None, sequence: int = 1, tensor: int = 1,
                 ranks: Tensor | None = None):
        if not dist.is_initialized():
            process_group.init_distributed()
        sizes = Sizes(pipeline=pipeline, replica=replica, shard=shard, sequence=sequence, tensor=tensor)
        shape = sizes.over(dist.get_world_size())
        self.ranks = torch.arange(prod(shape)).view(shape) if ranks is None else ranks.view(shape)
        """The rank at each coordinate."""
        self.place = tuple((self.ranks == dist.get_rank()).nonzero()[0].tolist())
        """This rank's coordinates."""
        self._groups: dict[tuple[tuple[str, ...], tuple[int, ...]], dist.ProcessGroup | None] = {}
        self._device_mesh: DeviceMesh | None = None

    @classmethod
    def of(cls, topology: Topology) -> Mesh:
        """Return the mesh of a topology, whose axes are called pipe, data and model."""
        names = {"pipe": "pipeline", "data": "shard", "model": "tensor"}
        axes = [names.get(axis, axis) for axis in topology.get_axis_names()]
        unknown = [axis for axis in axes if axis not in AXES]
        if unknown:
            raise UsageError(f"topology: got the axis '{unknown[0]}'; the axes are {', '.join([*names, *AXES])}")
        sizes = dict(zip(axes, (topology.get_dim(axis) for axis in topology.get_axis_names()), strict=True))
        missing = [axis for axis in AXES if axis not in sizes]
        order = [*missing, *axes]
        ranks = torch.arange(prod(sizes.values())).view([sizes.get(axis, 1) for axis in order])
        return cls(**({"shard": 1} | sizes), ranks=ranks.permute([order.index(axis) for axis in AXES]).contiguous())

    def rank(self, *axes: str) -> int:
        """Return this rank's coordinate on `axes`, the last one fastest."""
        position = 0
        for axis in _named(axes):
            position = position * self.ranks.shape[AXES.index(axis)] + self.place[AXES.index(axis)]
        return position

    def size(self, *axes: str) -> int:
        """Return how many coordinates `axes` have together."""
        return prod(self.ranks.shape[AXES.index(axis)] for axis in _named(axes))

    def line(self, *axes: str, stages: Iterable[int] = ()) -> tuple[int, ...]:
        """Return the ranks that differ from this one in `axes` only, by coordinate; with `stages`, those at any of these
        pipeline coordinates.
        """
        own = dist.get_rank()
        return next(ranks for ranks in self.lines(*axes, stages=stages) if own in ranks)

    def lines(self, *axes: str, stages: Iterable[int] = ()) -> list[tuple[int, ...]]:
        """Return every such set of ranks, in one order on all of them."""
        chosen = {*_named(axes), *(("pipeline",) if (stages := sorted(stages)) else ())}
        ranks = self.ranks[stages] if stages else self.ranks
        along = [position for position, axis in enumerate(AXES) if axis in chosen]
        across = [position for position in range(len(AXES)) if position not in along]
        table = ranks.permute(*across, *along).reshape(-1, prod(ranks.shape[position] for position in along))
        return [tuple(row) for row in table.tolist()]

    def group(self, *axes: str, stages: Iterable[int] = ()) -> dist.ProcessGroup:
        """Return the process group of `line(*axes, stages=stages)`. Its first call is collective: every rank of the job
        makes it, at the same point of the program.
        """
        group = self.share(*axes, stages=stages)
        assert group is not None, "this rank is not at any of the stages"
        return group

    def share(self, *axes: str, stages: Iterable[int] = ()) -> dist.ProcessGroup | None:
        """Do the same as `group`, on ranks at other stages too: they get None."""
        key = _named(axes), tuple(sorted(stages))
        if key not in self._groups:
            self._groups[key] = process_group.group_of(self.lines(*axes, stages=stages))
        return self._groups[key]

    @property
    def device_mesh(self) -> DeviceMesh:
        """The same mesh for torch's own tools, such as DTensor: a `DeviceMesh` with the same names of axes."""
        if self._device_mesh is None:
            from torch.distributed.device_mesh import DeviceMesh

            self._device_mesh = DeviceMesh(process_group.device().type, self.ranks, mesh_dim_names=AXES)
        return self._device_mesh

    def __repr__(self) -> str:
        return f"Mesh({', '.join(f'{axis}={size}' for axis, size in zip(AXES, self.ranks.shape, strict=True))})"

    # What Megatron-style scripts ask an `mpu`: "model" is every axis but the data ranks', "slice" the tensor axis.

    def get_data_parallel_group(self) -> dist.ProcessGroup:
        return self.group(*DATA)

    def get_data_parallel_rank(self) -> int:
        return self.rank(*DATA)

    def get_data_parallel_world_size(self) -> int:
        return self.size(*DATA)

    def get_model_parallel_group(self) -> dist.ProcessGroup:
        return self.group(*MODEL)

    def get_model_parallel_rank(self) -> int:
        return self.rank(*MODEL)

    def get_model_parallel_world_size(self) -> int:
        return self.size(*MODEL)

    def get_tensor_model_parallel_group(self) -> dist.ProcessGroup:
        return self.group("tensor")

    def get_tensor_model_parallel_rank(self) -> int:
        return self.rank("tensor")

    def get_tensor_model_parallel_world_size(self) -> int:
        return self.size("tensor")

    get_slice_parallel_group = get_tensor_model_parallel_group
    get_slice_parallel_rank = get_tensor_model_parallel_rank
    get_slice_parallel_world_size = get_tensor_model_parallel_world_size

    def get_pipeline_model_parallel_group(self) -> dist.ProcessGroup:
        return self.group("pipeline")

    def get_pipeline_model_parallel_rank(self) -> int:
        return self.rank("pipeline")

    def get_pipeline_model_parallel_world_size(self) -> int:
        return self.size("pipeline")

    get_pipe_parallel_group = get_pipeline_model_parallel_group
    get_pipe_parallel_rank = get_pipeline_model_parallel_rank
    get_pipe_parallel_world_size = get_pipeline_model_parallel_world_size

    def get_global_rank(self) -> int:
        return dist.get_rank()

    def get_stage_id(self) -> int:
        return self.rank("pipeline")

    def get_data_parallel_id(self) -> int:
        return self.rank(*DATA)

    def stage_to_global(self, stage_id: int) -> int:
        """Return the rank at pipeline coordinate `stage_id` that has this rank's other coordinates."""
        return self.line("pipeline")[stage_id]


class Topology(Protocol):
    """What a mesh asks of a process topology."""

    def get_axis_names(self) -> list[str]: ...
    def get_dim(self, axis: str) -> int: ...


class Mpu(Protocol):
    """The least that a Megatron-style object of a script answers."""

    def get_data_parallel_rank(self) -> int: ...
    def get_data_parallel_world_size(self) -> int: ...
    def get_model_parallel_rank(self) -> int: ...
    def get_model_parallel_world_size(self) -> int: ...


def adapt(mpu: Mesh | Mpu) -> Mesh:
    """Return the mesh that a Megatron-style `mpu` describes; every rank calls it.

    Its tensor axis is what the object calls tensor (or slice) parallel where it does, else model parallel. Raises
    `UsageError` when the coordinates of the ranks do not fill a mesh.
    """
    if isinstance(mpu, Mesh):
        return mpu
    process_group.init_distributed()
    place = _coordinates(mpu)
    said = process_group.gather_objects(place, "initialize: mpu")
    sizes = {axis: size for axis, (_, size) in said[0].items()}
    ranks = torch.full((sizes["pipeline"], 1, sizes["shard"], 1, sizes["tensor"]), -1)
    text = ", ".join(f"{axis} {size}" for axis, size in sizes.items())
    for rank, theirs in enumerate(said):
        if {axis: size for axis, (_, size) in theirs.items()} != sizes:
            raise UsageError(f"mpu: rank 0 says {said[0]}, rank {rank} says {theirs}; all ranks must see the same sizes")
        if any(not 0 <= at < size for at, size in theirs.values()):
            raise UsageError(f"mpu: rank {rank} says {theirs}, (rank, ranks) by axis; a rank counts from 0 to ranks - 1")
        ranks[theirs["pipeline"][0], 0, theirs["shard"][0], 0, theirs["tensor"][0]] = rank
    if (ranks < 0).any() or ranks.numel() != len(said):
        raise UsageError(f"mpu: its sizes ({text}) make {ranks.numel()} coordinates, of which the {len(said)} ranks of the "
                         f"job fill {int((ranks >= 0).sum())}; every rank needs a coordinate of its own")
    return Mesh(pipeline=sizes["pipeline"], shard=sizes["shard"], tensor=sizes["tensor"], ranks=ranks)


def _coordinates(mpu: Mpu) -> dict[str, tuple[int, int]]:
    """Return (rank, size) on each axis that a Megatron-style object knows."""
    def asked(*names: str) -> tuple[int, int] | None:
        for name in names:
            rank, size = (getattr(mpu, f"get_{name}_{what}", None) for what in ("rank", "world_size"))
            if callable(rank) and callable(size):
                return int(rank()), int(size())  # pyright: ignore[reportArgumentType]  a script's object
        return None

    data = asked("data_parallel")
    tensor = asked("tensor_model_parallel", "slice_parallel", "model_parallel")
    if data is None or tensor is None:
        raise UsageError(f"initialize: mpu is a {type(mpu).__name__} without get_data_parallel_rank and "
                         f"get_data_parallel_world_size, or get_model_parallel_rank and get_model_parallel_world_size; give "
                         f"it these methods, or pass a shoal.Mesh")
    return {"pipeline": asked("pipeline_model_parallel", "pipe_parallel") or (0, 1), "shard": data, "tensor": tensor}


def _named(axes: Iterable[str]) -> tuple[str, ...]:
    """Return the axes in the order of the mesh; "data" stands for replica and shard."""
    wanted = {axis for name in axes for axis in (DATA if name == "data" else (name,))}
    if unknown := wanted - set(AXES):
        raise UsageError(f"mesh: got the axis '{min(unknown)}'; choose among {', '.join(AXES)} and data")
    return tuple(axis for axis in AXES if axis in wanted)
