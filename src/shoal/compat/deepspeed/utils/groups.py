"""The process groups of the running engine under their published names.

A Megatron-style object that `initialize` was given answers, or the mesh of the last engine; without either, all ranks are
data ranks.
"""

from __future__ import annotations

from typing import Any
from weakref import ref

import torch.distributed as dist

from shoal.compat.deepspeed.utils.exceptions import DeprecatedException
from shoal.errors import NotSupportedYet, UsageError

__all__ = ["get_data_parallel_group", "get_data_parallel_rank", "get_data_parallel_world_size",
           "get_model_parallel_group", "get_model_parallel_rank", "get_model_parallel_world_size",
           "get_sequence_data_parallel_group", "get_sequence_data_parallel_rank", "get_sequence_data_parallel_world_size",
           "get_sequence_parallel_group", "get_sequence_parallel_rank", "get_sequence_parallel_world_size",
           "get_tensor_model_parallel_group", "get_tensor_model_parallel_rank", "get_tensor_model_parallel_src_rank",
           "get_tensor_model_parallel_world_size", "initialize", "set_mesh", "set_tensor_model_parallel_rank",
           "set_tensor_model_parallel_world_size"]

mpu: Any = None
mesh_device: Any = None
expert_tensor_parallel_world_size = 1
_meshes: list[ref[Any]] = []
_set: dict[str, int] = {}


def initialize(ep_size: int = 1, mpu: Any = None) -> None:
    """Raise `DeprecatedException`."""
    raise DeprecatedException("groups.initialize: gone since DeepSpeed 0.10; pass mpu to deepspeed.initialize")


def set_mesh(mesh: Any) -> None:
    """Answer from `mesh` from now on."""
    _meshes[:] = [ref(mesh)]


def _mesh() -> Any:
    return _meshes[0]() if _meshes else None


def get_data_parallel_group() -> Any:
    """Return the group of this rank's data ranks."""
    return dist.group.WORLD if _mesh() is None else _mesh().get_data_parallel_group()


def get_data_parallel_rank() -> int:
    """Return this rank's number among the data ranks."""
    return dist.get_rank() if _mesh() is None else _mesh().get_data_parallel_rank()


def get_data_parallel_world_size() -> int:
    """Return the data ranks."""
    return dist.get_world_size() if _mesh() is None else _mesh().get_data_parallel_world_size()


def get_model_parallel_group() -> Any:
    """Return the group of one replica, None where a rank holds the whole model."""
    return None if _mesh() is None else _mesh().get_model_parallel_group()


def get_model_parallel_rank() -> int:
    """Return this rank's number among the ranks of one replica."""
    return 0 if _mesh() is None else _mesh().get_model_parallel_rank()


def get_model_parallel_world_size() -> int:
    """Return the ranks of one replica."""
    return 1 if _mesh() is None else _mesh().get_model_parallel_world_size()


def get_tensor_model_parallel_group() -> Any:
    """Return the group of this rank's tensor ranks, None where there are none."""
    return None if _mesh() is None else _mesh().get_tensor_model_parallel_group()


def get_tensor_model_parallel_rank() -> int:
    """Return this rank's number among the tensor ranks."""
    return _set.get("rank", 0 if _mesh() is None else _mesh().get_tensor_model_parallel_rank())


def get_tensor_model_parallel_world_size() -> int:
    """Return the tensor ranks."""
    return _set.get("size", 1 if _mesh() is None else _mesh().get_tensor_model_parallel_world_size())


def get_tensor_model_parallel_src_rank() -> int:
    """Return the job's number of the first of this rank's tensor ranks."""
    return dist.get_rank() // get_tensor_model_parallel_world_size() * get_tensor_model_parallel_world_size()


def set_tensor_model_parallel_rank(rank: int) -> None:
    """Answer `rank` from now on."""
    _set["rank"] = rank


def set_tensor_model_parallel_world_size(world_size: int) -> None:
    """Answer `world_size` from now on."""
    _set["size"] = world_size


_get_data_parallel_group, _get_data_parallel_rank = get_data_parallel_group, get_data_parallel_rank
_get_data_parallel_world_size, _get_model_parallel_group = get_data_parallel_world_size, get_model_parallel_group
_get_model_parallel_rank, _get_model_parallel_world_size = get_model_parallel_rank, get_model_parallel_world_size


def get_sequence_parallel_group() -> Any:
    """Return the group of the ranks that have parts of this rank's sequences. Raises `UsageError` before there is a mesh."""
    if _mesh() is None:
        raise UsageError("groups: there is no sequence-parallel group yet; call deepspeed.initialize first, with "
                         "sequence_parallel_size or mesh_param, or UlyssesSPAttentionHF.register_with_transformers")
    return _mesh().get_sequence_parallel_group()


def get_sequence_parallel_rank() -> int:
    """Return this rank's number among them."""
    return 0 if _mesh() is None else _mesh().get_sequence_parallel_rank()


def get_sequence_parallel_world_size() -> int:
    """Return their number, 1 where sequences are not split."""
    return 1 if _mesh() is None else _mesh().get_sequence_parallel_world_size()


def get_sequence_data_parallel_group() -> Any:
    """Return the group of the data and the sequence ranks together, over which gradients are averaged."""
    return dist.group.WORLD if _mesh() is None else _mesh().get_sequence_data_parallel_group()


def get_sequence_data_parallel_rank() -> int:
    """Return this rank's number among them."""
    return dist.get_rank() if _mesh() is None else _mesh().get_sequence_data_parallel_rank()


def get_sequence_data_parallel_world_size() -> int:
    """Return their number."""
    return dist.get_world_size() if _mesh() is None else _mesh().get_sequence_data_parallel_world_size()


_get_sequence_parallel_group, _get_sequence_parallel_rank = get_sequence_parallel_group, get_sequence_parallel_rank
_get_sequence_parallel_world_size = get_sequence_parallel_world_size
_get_sequence_data_parallel_group = get_sequence_data_parallel_group
_get_sequence_data_parallel_rank = get_sequence_data_parallel_rank
_get_sequence_data_parallel_world_size = get_sequence_data_parallel_world_size


def _get_expert_parallel_group(group_name: str = "") -> Any:
    """Raise `NotSupportedYet`: there is no expert-parallel group."""
    raise NotSupportedYet("groups: expert-parallel groups are not supported yet; experts are trained on every data rank")


_get_expert_data_parallel_group = _get_expert_parallel_group
