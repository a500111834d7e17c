"""Grids of ranks under their published names."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from shoal.compat.raising import as_published
from shoal.mesh import topology as native
from shoal.transport.process_group import group_of

__all__ = ["PipeDataParallelTopology", "PipeModelDataParallelTopology", "PipelineParallelGrid", "ProcessTopology"]

Groups = list[list[int]]


class ProcessTopology(native.ProcessTopology):
    """The ranks 0 to n-1 on a grid of `axes` of the sizes `dims`, the last axis fastest."""

    __init__ = as_published(native.ProcessTopology.__init__)
    get_rank = as_published(native.ProcessTopology.get_rank)
    get_coord = as_published(native.ProcessTopology.get_coord)
    filter_match = as_published(native.ProcessTopology.filter_match)

    @property
    def mapping(self) -> dict[Any, int]:
        """The rank of each coordinate."""
        return {self.get_coord(rank): rank for rank in range(self.world_size())}


class PipeDataParallelTopology(ProcessTopology):
    """Pipeline stages of `num_dp` data ranks each."""

    def __init__(self, num_pp: int, num_dp: int):
        super().__init__(axes=["pipe", "data"], dims=[num_pp, num_dp])


class PipeModelDataParallelTopology(ProcessTopology):
    """Pipeline stages of `num_dp` data ranks of `num_mp` tensor ranks each."""

    def __init__(self, num_pp: int, num_mp: int, num_dp: int):
        super().__init__(axes=["pipe", "data", "model"], dims=[num_pp, num_dp, num_mp])


class PipelineParallelGrid:
    """The process groups of a topology, for scripts that take ranks and groups from it (`mpu`).

    "model" means all axes but the data axis together, "slice" the tensor axis. Collective: every rank creates it.
    """

    def __init__(self, topology: native.ProcessTopology | None = None, process_group: dist.ProcessGroup | None = None):
        self.global_rank = dist.get_rank(process_group)
        self.world_size = dist.get_world_size(process_group)
        self._topo = topology or PipeDataParallelTopology(1, self.world_size)
        assert self._topo.world_size() == self.world_size, (
            f"PipelineParallelGrid: {self._topo} has {self._topo.world_size()} ranks, the job {self.world_size}")
        self.data_parallel_size = max(self._topo.get_dim("data"), 1)
        self.pipe_parallel_size = max(self._topo.get_dim("pipe"), 1)
        self.model_parallel_size = max(self._topo.get_dim("model"), 1)
        self.slice_parallel_size = self.model_parallel_size
        self.stage_id = self.get_stage_id()
        self.data_parallel_id = self.get_data_parallel_id()
        self.dp_groups: Groups = self._topo.get_axis_comm_lists("data")
        self.pipe_groups: Groups = self._topo.get_axis_comm_lists("pipe")
        self.slice_groups: Groups = self._topo.get_axis_comm_lists("model") or [[rank] for rank in range(self.world_size)]
        model = [sorted(self._topo.filter_match(data=index)) for index in range(self.data_parallel_size)]
        self.dp_group, self.dp_proc_group = self._own(self.dp_groups)
        self.pp_group, self.pp_proc_group = self._own(self.pipe_groups)
        self.slice_group, self.slice_proc_group = self._own(self.slice_groups)
        self.model_group, self.ds_model_proc_group = self._own(model)
        self.ds_model_world_size = self.world_size // self.data_parallel_size
        self.ds_model_rank = self.model_group.index(self.global_rank)
        self.is_first_stage = self.stage_id == 0
        self.is_last_stage = self.stage_id == self.pipe_parallel_size - 1
        self.p2p_groups: Groups = [[rank, ranks[(index + 1) % len(ranks)]]
                                   for ranks in self.pipe_groups for index, rank in enumerate(ranks)]

    def _own(self, lists: Groups) -> tuple[list[int], dist.ProcessGroup | None]:
        """Create a group for each list; return this rank's list, and its group."""
        own = next((ranks for ranks in lists if self.global_rank in ranks), [self.global_rank])
        return own, group_of([tuple(ranks) for ranks in lists]) if lists else None

    def topology(self) -> native.ProcessTopology:
        """Return the topology."""
        return self._topo

    def get_stage_id(self) -> int:
        """Return this rank's pipeline stage."""
        return getattr(self._topo.get_coord(self.global_rank), "pipe", 0)

    def get_data_parallel_id(self) -> int:
        """Return this rank's number among the data ranks."""
        return getattr(self._topo.get_coord(self.global_rank), "data", 0)

    def stage_to_global(self, stage_id: int, **kwargs: int) -> int:
        """Return the rank of another stage at this rank's other coordinates, or at those in `kwargs`."""
        place = self._topo.get_coord(self.global_rank)._asdict() | {"pipe": stage_id} | kwargs
        return self._topo.get_rank(**place)

    def get_global_rank(self) -> int:
        """Return this rank's number in the job."""
        return self.global_rank

    def get_pipe_parallel_rank(self) -> int:
        """Return this rank's pipeline stage."""
        return self.stage_id

    def get_pipe_parallel_world_size(self) -> int:
        """Return the pipeline stages."""
        return self.pipe_parallel_size

    def get_pipe_parallel_group(self) -> dist.ProcessGroup | None:
        """Return the group of this rank's stages."""
        return self.pp_proc_group

    get_pipeline_model_parallel_rank = get_pipe_parallel_rank
    get_pipeline_model_parallel_world_size = get_pipe_parallel_world_size
    get_pipeline_model_parallel_group = get_pipe_parallel_group

    def get_data_parallel_rank(self) -> int:
        """Return this rank's number among the data ranks."""
        return self.data_parallel_id

    def get_data_parallel_world_size(self) -> int:
        """Return the data ranks."""
        return self.data_parallel_size

    def get_data_parallel_group(self) -> dist.ProcessGroup | None:
        """Return the group of this rank's data ranks."""
        return self.dp_proc_group

    def get_data_parallel_group_ranks(self) -> list[int]:
        """Return the job's numbers of this rank's data ranks."""
        return self.dp_group

    def get_model_parallel_rank(self) -> int:
        """Return this rank's number among the ranks of one replica."""
        return self.ds_model_rank

    def get_model_parallel_world_size(self) -> int:
        """Return the ranks of one replica."""
        return self.ds_model_world_size

    def get_model_parallel_group(self) -> dist.ProcessGroup | None:
        """Return the group of one replica."""
        return self.ds_model_proc_group

    def get_slice_parallel_rank(self) -> int:
        """Return this rank's number among the tensor ranks."""
        return self.slice_group.index(self.global_rank)

    def get_slice_parallel_world_size(self) -> int:
        """Return the tensor ranks."""
        return self.slice_parallel_size

    def get_slice_parallel_group(self) -> dist.ProcessGroup | None:
        """Return the group of the tensor ranks."""
        return self.slice_proc_group

    get_tensor_model_parallel_rank = get_slice_parallel_rank
    get_tensor_model_parallel_world_size = get_slice_parallel_world_size
    get_tensor_model_parallel_group = get_slice_parallel_group
