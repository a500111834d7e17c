"""The mesh gives every rank a coordinate on five axes; a process group is the ranks that differ in some axes only.

    pipeline   stage of the model                  slowest: its ranks are farthest apart
    replica    copy of a shard group
    shard      slice of the state
    sequence   part of a sample
    tensor     slice of a layer                    fastest: its ranks are on one machine

Ranks that differ in replica or shard see different samples: they are the data ranks.

Only this file names axes. A mesh is also the `mpu` of Megatron-style scripts.
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
    """The size of each axis; where `shard` is None it takes the ranks that the other axes leave."""

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
        rest, remainder = divmod(ranks, prod(given.values()))
        terms = " x ".join(f"{axis} {size}" for axis, size in given.items() if size > 1 or axis == "shard") or "1"
        if remainder or rest == 0:
            raise UsageError(f"mesh: {terms} = {prod(given.values())} does not divide the {ranks} ranks of the job; change "
                             f"a size, or start a multiple of {prod(given.values())} ranks")
        if self.shard is not None and rest != 1:
            raise UsageError(f"mesh: {terms} = {prod(given.values())}, and the job has {ranks} ranks; leave shard out to "
                             f"let it take the rest, or start {prod(given.values())} ranks")
        return tuple((given | {"shard": given.get("shard", rest)})[axis] for axis in AXES)


class Mesh:
    """The ranks of a job by their coordinates, and the process groups that this rank is in.

    mesh = Mesh(pipeline=2, tensor=2)       the other ranks are data ranks
    mesh.rank("tensor"), mesh.size("data")  this rank's coordinate and the size of an axis, or of several axes together
    mesh.group("tensor")                    the process group of the ranks that differ in that axis only

    Ranks are numbered with the last axis fastest, unless `ranks`, a tensor of the shape of the axes, gives them. Every rank
    creates the same mesh. Raises `UsageError` if the sizes do not multiply to the number of ranks.
    """

    def __init__(self, *, pipeline: int = 1, replica: int = 1, shard: int | None = None, sequence: int = 1, tensor: int = 1,
                 ranks: Tensor | None = None):
        if not dist.is_initialized():
            process_group.init_distributed()
        sizes = Sizes(pipeline=pipeline, replica=replica, shard=shard, sequence=sequence, tensor=tensor)
        shape = sizes.over(dist.get_world_size())
        self.ranks = torch.arange(prod(shape), device="cpu").view(shape) if ranks is None else ranks.view(shape)
        """The rank at each coordinate."""
        self.place = tuple((self.ranks == dist.get_rank()).nonzero()[0].tolist())
        """This rank's coordinates."""
        self._groups: dict[tuple[tuple[str, ...], tuple[int, ...]], dist.ProcessGroup | None] = {}
        self._device_mesh: DeviceMesh | None = None

    @classmethod
    def of(cls, topology: Topology) -> Mesh:
        """Return the mesh of a topology with axes named pipe, data and model. Raises `UsageError` for other names."""
        names = {"pipe": "pipeline", "data": "shard", "model": "tensor"}
        axes = [names.get(axis, axis) for axis in topology.get_axis_names()]
        unknown = [axis for axis in axes if axis not in AXES]
        if unknown:
            raise UsageError(f"topology: got the axis '{unknown[0]}'; the axes are {', '.join([*names, *AXES])}")
        sizes = dict(zip(axes, (topology.get_dim(axis) for axis in topology.get_axis_names()), strict=True))
        missing = [axis for axis in AXES if axis not in sizes]
        order = [*missing, *axes]
        ranks = torch.arange(prod(sizes.values()), device="cpu").view([sizes.get(axis, 1) for axis in order])
        return cls(**({"shard": 1} | sizes), ranks=ranks.permute([order.index(axis) for axis in AXES]).contiguous())

    def rank(self, *axes: str) -> int:
        """Return this rank's coordinate on `axes`, the last one fastest."""
        position = 0
        for axis in _named(axes):
            position = position * self.ranks.shape[AXES.index(axis)] + self.place[AXES.index(axis)]
        return position

    def size(self, *axes: str) -> int:
        """Return the number of ranks along `axes` together."""
        return prod(self.ranks.shape[AXES.index(axis)] for axis in _named(axes))

    def line(self, *axes: str, stages: Iterable[int] = ()) -> tuple[int, ...]:
        """Return the ranks that differ from this one in `axes` only, by coordinate; with `stages` also those at these
        pipeline coordinates.
        """
        own = dist.get_rank()
        return next(ranks for ranks in self.lines(*axes, stages=stages) if own in ranks)

    def lines(self, *axes: str, stages: Iterable[int] = ()) -> list[tuple[int, ...]]:
        """Return `line` of every rank, without repetition, in the same order on all ranks."""
        varying = {*_named(axes), *(("pipeline",) if (stages := sorted(stages)) else ())}
        ranks = self.ranks[stages] if stages else self.ranks
        along = [position for position, axis in enumerate(AXES) if axis in varying]
        across = [position for position in range(len(AXES)) if position not in along]
        table = ranks.permute(*across, *along).reshape(-1, prod(ranks.shape[position] for position in along))
        return [tuple(row) for row in table.tolist()]

    def group(self, *axes: str, stages: Iterable[int] = ()) -> dist.ProcessGroup:
        """Return the process group of `line(*axes, stages=stages)`.

        The first call for these axes is collective over the job.
        """
        group = self.group_or_none(*axes, stages=stages)
        assert group is not None, "this rank is not at any of the stages"
        return group

    def group_or_none(self, *axes: str, stages: Iterable[int] = ()) -> dist.ProcessGroup | None:
        """Return `group(*axes, stages=stages)`, or None on ranks at other stages. The first call is collective."""
        key = _named(axes), tuple(sorted(stages))
        if key not in self._groups:
            self._groups[key] = process_group.group_of(self.lines(*axes, stages=stages))
        return self._groups[key]

    @property
    def device_mesh(self) -> DeviceMesh:
        """The same mesh as torch's `DeviceMesh`, for DTensor and other tools, with the same axis names."""
        if self._device_mesh is None:
            from torch.distributed.device_mesh import DeviceMesh

            self._device_mesh = DeviceMesh(process_group.device().type, self.ranks, mesh_dim_names=AXES)
        return self._device_mesh

    def __repr__(self) -> str:
        return f"Mesh({', '.join(f'{axis}={size}' for axis, size in zip(AXES, self.ranks.shape, strict=True))})"

    # The methods of a Megatron-style `mpu`: "model" is every axis but the data axes, "slice" is the tensor axis.

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

    def get_sequence_parallel_group(self) -> dist.ProcessGroup:
        return self.group("sequence")

    def get_sequence_parallel_rank(self) -> int:
        return self.rank("sequence")

    def get_sequence_parallel_world_size(self) -> int:
        return self.size("sequence")

    def get_sequence_data_parallel_group(self) -> dist.ProcessGroup:
        return self.group(*DATA, "sequence")

    def get_sequence_data_parallel_rank(self) -> int:
        return self.rank(*DATA, "sequence")

    def get_sequence_data_parallel_world_size(self) -> int:
        return self.size(*DATA, "sequence")

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
    """The part of a process topology that a mesh needs."""

    def get_axis_names(self) -> list[str]: ...
    def get_dim(self, axis: str) -> int: ...


class Mpu(Protocol):
    """The methods that a Megatron-style `mpu` object must have."""

    def get_data_parallel_rank(self) -> int: ...
    def get_data_parallel_world_size(self) -> int: ...
    def get_model_parallel_rank(self) -> int: ...
    def get_model_parallel_world_size(self) -> int: ...


def adapt(mpu: Mesh | Mpu) -> Mesh:
    """Return the mesh that a Megatron-style `mpu` describes. A collective call.

    Its tensor axis is the object's tensor (or slice) parallel axis if it has these methods, else its model parallel axis;
    its sequence axis is there if it has the methods of one, and its data ranks then see different samples.
    Raises `UsageError` if the coordinates of the ranks do not fill a mesh.
    """
    if isinstance(mpu, Mesh):
        return mpu
    process_group.init_distributed()
    by_rank = process_group.gather_objects(_coordinates(mpu), "initialize: mpu")
    sizes = {axis: size for axis, (_, size) in by_rank[0].items()}
    ranks = torch.full((sizes["pipeline"], 1, sizes["shard"], sizes["sequence"], sizes["tensor"]), -1, dtype=torch.int64,
                       device="cpu")
    text = ", ".join(f"{axis} {size}" for axis, size in sizes.items())
    for rank, theirs in enumerate(by_rank):
        if {axis: size for axis, (_, size) in theirs.items()} != sizes:
            raise UsageError(f"mpu: rank 0 says {by_rank[0]}, rank {rank} says {theirs}; all ranks must see the same "
                             f"sizes")
        if any(not 0 <= at < size for at, size in theirs.values()):
            raise UsageError(f"mpu: rank {rank} says {theirs}, (rank, ranks) by axis; a rank counts from 0 to ranks - 1")
        place = {axis: at for axis, (at, _) in theirs.items()}
        ranks[place["pipeline"], 0, place["shard"], place["sequence"], place["tensor"]] = rank
    if (ranks < 0).any() or ranks.numel() != len(by_rank):
        raise UsageError(f"mpu: its sizes ({text}) make {ranks.numel()} coordinates, of which the {len(by_rank)} ranks of "
                         f"the job fill {int((ranks >= 0).sum())}; every rank needs a coordinate of its own")
    return Mesh(**sizes, ranks=ranks)


def _coordinates(mpu: Mpu) -> dict[str, tuple[int, int]]:
    """Return (rank, size) on each axis for which a Megatron-style object has methods."""
    def query(*names: str) -> tuple[int, int] | None:
        for name in names:
            rank, size = (getattr(mpu, f"get_{name}_{what}", None) for what in ("rank", "world_size"))
            if callable(rank) and callable(size):
                return int(rank()), int(size())  # pyright: ignore[reportArgumentType]  a script's object
        return None

    data = query("data_parallel")
    sequence = query("sequence_parallel")
    tensor = query("tensor_model_parallel", "slice_parallel", "model_parallel") or (sequence and (0, 1))
    if data is None or tensor is None:
        raise UsageError(f"initialize: mpu is a {type(mpu).__name__} without get_data_parallel_rank and "
                         f"get_data_parallel_world_size, or get_model_parallel_rank and get_model_parallel_world_size; give "
                         f"it these methods, or pass a shoal.Mesh")
    return {"pipeline": query("pipeline_model_parallel", "pipe_parallel") or (0, 1), "shard": data,
            "sequence": sequence or (0, 1), "tensor": tensor}


def _named(axes: Iterable[str]) -> tuple[str, ...]:
    """Return the axes in the order of the mesh; "data" stands for replica and shard."""
    named = {axis for name in axes for axis in (DATA if name == "data" else (name,))}
    if unknown := named - set(AXES):
        raise UsageError(f"mesh: got the axis '{min(unknown)}'; choose among {', '.join(AXES)} and data")
    return tuple(axis for axis in AXES if axis in named)
