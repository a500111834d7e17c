"""The ranks of split sequences before there is an engine: an `mpu` in the form of a module."""

from __future__ import annotations

from shoal.compat.deepspeed.utils import groups
from shoal.mesh.mesh import Mesh
from shoal.transport import process_group

__all__ = ["get_data_parallel_group", "get_data_parallel_rank", "get_data_parallel_world_size", "get_model_parallel_group",
           "get_model_parallel_rank", "get_model_parallel_world_size", "get_sequence_data_parallel_group",
           "get_sequence_data_parallel_rank", "get_sequence_data_parallel_world_size", "get_sequence_parallel_group",
           "get_sequence_parallel_rank", "get_sequence_parallel_world_size", "initialize_sequence_parallel"]

get_data_parallel_group, get_data_parallel_rank = groups.get_data_parallel_group, groups.get_data_parallel_rank
get_data_parallel_world_size = groups.get_data_parallel_world_size
get_sequence_parallel_group = groups.get_sequence_parallel_group
get_sequence_parallel_rank = groups.get_sequence_parallel_rank
get_sequence_parallel_world_size = groups.get_sequence_parallel_world_size
get_sequence_data_parallel_group = groups.get_sequence_data_parallel_group
get_sequence_data_parallel_rank = groups.get_sequence_data_parallel_rank
get_sequence_data_parallel_world_size = groups.get_sequence_data_parallel_world_size
get_model_parallel_group = groups.get_tensor_model_parallel_group
get_model_parallel_rank = groups.get_tensor_model_parallel_rank
get_model_parallel_world_size = groups.get_tensor_model_parallel_world_size

_kept: list[Mesh] = []
"""The mesh of this process: `groups` does not keep one alive."""


def initialize_sequence_parallel(sequence_parallel_size: int) -> None:
    """Split sequences over groups of so many consecutive ranks. A collective call."""
    process_group.init_distributed()
    _kept[:] = [Mesh(sequence=sequence_parallel_size)]
    groups.set_mesh(_kept[0])
