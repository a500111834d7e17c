"""The published process topologies, and the grid of process groups that follows from one.

A topology is Shoal's, with the published errors and its `mapping`. The grid calls all axes but `data` together "model", and
the axis `model` alone "slice".
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch.distributed as dist

from shoal.errors import UsageError
from shoal.mesh import topology
from shoal.transport.process_group import group_of

__all__ = ["PipeDataParallelTopology", "PipeModelDataParallelTopology", "PipelineParallelGrid", "ProcessTopology"]


class _NoSuchRank(UsageError, ValueError):
    """A rank that the topology lacks."""


class _NoSuchPlace(UsageError, AssertionError):
    """A coordinate that the topology lacks."""


class _NoSuchAxis(UsageError, AttributeError, ValueError):
    """An axis that the topology lacks."""


class ProcessTopology(topology.ProcessTopology):
    """The ranks 0 to n-1 on a grid of `axes` of the sizes `dims`, the last axis fastest."""

    axes: list[str]  # pyright: ignore[reportIncompatibleVariableOverride]  published as lists
    dims: list[int]  # pyright: ignore[reportIncompatibleVariableOverride]

    def __init__(self, axes: Sequence[str], dims: Sequence[int]):
        super().__init__(axes, dims)
        self.axes, self.dims = list(self.axes), list(self.dims)
        self.mapping: dict[Any, int] = {self.get_coord(rank): rank for rank in range(self.world_size())}
        """The rank of each coordinate."""

    def __str__(self) -> str:
        return str(self.mapping)

    def get_rank(self, **coords: int) -> int:
        """Return the rank at a complete coordinate.

        Raises `ValueError` if the axes are not those of the topology, `AssertionError` for a coordinate out of range.
        """
        try:
            return super().get_rank(**coords)
        except UsageError as error:
            raise (_NoSuchPlace if set(coords) == set(self.axes) else _NoSuchRank)(*error.args) from None

    def get_coord(self, rank: int) -> Any:
        """Return the coordinate of a rank as a named tuple. Raises `ValueError` for an unknown rank."""
        try:
            return super().get_coord(rank)
        except UsageError as error:
            raise _NoSuchRank(*error.args) from None

    def filter_match(self, **coords: int) -> list[int]:
        """Return the ranks with these coordinates. Raises an `AttributeError` for an unknown axis."""
        try:
            return super().filter_match(**coords)
        except UsageError as error:
            raise _NoSuchAxis(*error.args) from None


class PipeDataParallelTopology(ProcessTopology):
    """Pipeline stages of `num_dp` data ranks each."""

    def __init__(self, num_pp: int, num_dp: int):
        super().__init__(axes=["pipe", "data"], dims=[num_pp, num_dp])


class PipeModelDataParallelTopology(ProcessTopology):
    """Pipeline stages of `num_dp` data ranks of `num_mp` tensor ranks each."""

    def __init__(self, num_pp: int, num_mp: int, num_dp: int):
        super().__init__(axes=["pipe", "data", "model"], dims=[num_pp, num_dp, num_mp])


def _prime_factors(N: int) -> list[int]:
    """Return the prime factors of `N`, smallest first, each as often as it divides. Raises `ValueError` below 1."""
    if N <= 0:
        raise ValueError(f"_prime_factors: got {N}; give a positive number")
    return list(_factors(N))


def _factors(rest: int) -> Iterator[int]:
    factor = 2
    while rest > 1:
        while rest % factor:
            factor += 1
        yield factor
        rest //= factor


class PipelineParallelGrid:
    """The process groups of this rank over a topology, with the methods of an `mpu`. Its construction is collective.

    Without a topology the world is divided into pipeline and data ranks, alternately by its prime factors. Raises an
    `AssertionError` if the topology has another number of ranks than the job.
    """

    def __init__(self, topology: topology.ProcessTopology | None = None, process_group: dist.ProcessGroup | None = None):
        self.global_rank = dist.get_rank(process_group)
        self.world_size = dist.get_world_size(process_group)
        self._topo: Any = _by_factors(self.world_size) if topology is None else topology
        self.data_parallel_size: int = max(1, self._topo.get_dim("data"))
        self.pipe_parallel_size: int = max(1, self._topo.get_dim("pipe"))
        self.model_parallel_size: int = max(1, self._topo.get_dim("model"))
        self.slice_parallel_size = self.model_parallel_size
        assert self._topo.world_size() == self.world_size, (
            f"PipelineParallelGrid: the topology {self._topo!r} has {self._topo.world_size()} ranks, the job "
            f"{self.world_size}; make them equal")
        self.stage_id = self.get_stage_id()
        self.data_parallel_id = self.get_data_parallel_id()
        self.is_first_stage = self.stage_id == 0
        self.is_last_stage = self.stage_id == self.pipe_parallel_size - 1

        replicas = [sorted(self._topo.filter_match(data=number)) for number in range(self.data_parallel_size)] \
            if self._topo.get_dim("data") else [list(range(self.world_size))]
        self.ds_model_proc_group = _group(replicas)
        self.ds_model_world_size = len(replicas[0])
        self.ds_model_rank = self._own(replicas).index(self.global_rank)
        self.dp_groups = self._lists("data")
        self.dp_group = self._own(self.dp_groups)
        self.dp_proc_group = _group(self.dp_groups)
        self.pipe_groups = self._lists("pipe")
        self.pp_group = self._own(self.pipe_groups)
        self.pp_proc_group = _group(self.pipe_groups)
        self.p2p_groups = self._build_p2p_groups()
        slices = self._lists("model")
        self.slice_group = self._own(slices)
        self.slice_proc_group = _group(slices)

    def _lists(self, axis: str) -> list[list[int]]:
        """Return the lists of ranks that differ along `axis`; each rank alone where the axis is missing."""
        return self._topo.get_axis_comm_lists(axis) or [[rank] for rank in range(self.world_size)]

    def _own(self, lists: Sequence[list[int]]) -> list[int]:
        return next(ranks for ranks in lists if self.global_rank in ranks)

    def _build_p2p_groups(self) -> list[list[int]]:
        """Return each rank with the rank of the next stage, the last stage with the first."""
        after = {rank: ranks[(place + 1) % len(ranks)] for ranks in self.pipe_groups for place, rank in enumerate(ranks)}
        return [[rank, after[rank]] for rank in range(self.world_size)]

    def topology(self) -> Any:
        """Return the topology."""
        return self._topo

    def get_stage_id(self) -> int:
        """Return the stage of this rank."""
        return getattr(self._topo.get_coord(self.global_rank), "pipe", 0)

    def get_data_parallel_id(self) -> int:
        """Return this rank's number among the data ranks."""
        return getattr(self._topo.get_coord(self.global_rank), "data", 0)

    def stage_to_global(self, stage_id: int, **kwargs: int) -> int:
        """Return the rank of stage `stage_id` with this rank's other coordinates, or with those of the keywords."""
        return self._topo.get_rank(**{**self._topo.get_coord(self.global_rank)._asdict(), **kwargs, "pipe": stage_id})

    def get_global_rank(self) -> int:
        """Return this rank's number in the job."""
        return self.global_rank

    def get_pipe_parallel_rank(self) -> int:
        """Return the stage of this rank."""
        return self.get_stage_id()

    get_pipeline_model_parallel_rank = get_pipe_parallel_rank

    def get_pipe_parallel_world_size(self) -> int:
        """Return the number of stages."""
        return self.pipe_parallel_size

    get_pipeline_model_parallel_world_size = get_pipe_parallel_world_size

    def get_pipe_parallel_group(self) -> dist.ProcessGroup:
        """Return the group of the stages of this rank's pipeline."""
        return self.pp_proc_group

    get_pipeline_model_parallel_group = get_pipe_parallel_group

    def get_data_parallel_rank(self) -> int:
        """Return this rank's number among its data ranks."""
        return self.data_parallel_id

    def get_data_parallel_world_size(self) -> int:
        """Return the number of data ranks."""
        return self.data_parallel_size

    def get_data_parallel_group(self) -> dist.ProcessGroup:
        """Return the group of the data ranks of this stage."""
        return self.dp_proc_group

    def get_data_parallel_group_ranks(self) -> list[int]:
        """Return the ranks of the job that are data ranks of this stage."""
        return self.dp_group

    def get_model_parallel_rank(self) -> int:
        """Return this rank's number among the ranks of one replica of the model."""
        return self.ds_model_rank

    def get_model_parallel_world_size(self) -> int:
        """Return the number of ranks of one replica of the model."""
        return self.ds_model_world_size

    def get_model_parallel_group(self) -> dist.ProcessGroup:
        """Return the group of the ranks of this replica of the model."""
        return self.ds_model_proc_group

    def get_slice_parallel_rank(self) -> int:
        """Return this rank's number among its tensor ranks."""
        return getattr(self._topo.get_coord(self.global_rank), "model", 0)

    get_tensor_model_parallel_rank = get_slice_parallel_rank

    def get_slice_parallel_world_size(self) -> int:
        """Return the number of tensor ranks."""
        return self.slice_parallel_size

    get_tensor_model_parallel_world_size = get_slice_parallel_world_size

    def get_slice_parallel_group(self) -> dist.ProcessGroup:
        """Return the group of this rank's tensor ranks."""
        return self.slice_proc_group

    get_tensor_model_parallel_group = get_slice_parallel_group


def _group(lists: Sequence[Sequence[int]]) -> dist.ProcessGroup:
    group = group_of([tuple(ranks) for ranks in lists])
    assert group is not None, "each rank is in one list"
    return group


def _by_factors(ranks: int) -> PipeDataParallelTopology:
    """Return a topology that gives the prime factors of `ranks` to the pipeline and the data axis in turn."""
    sizes = [1, 1]
    for turn, factor in enumerate(_prime_factors(ranks)):
        sizes[turn % 2] *= factor
    return PipeDataParallelTopology(num_pp=sizes[0], num_dp=sizes[1])
