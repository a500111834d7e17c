"""Published collectives over torch.distributed, beside those that `shoal.comm` has under the same names."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum
from functools import wraps
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from shoal import comm
from shoal.transport import process_group

__all__ = ["ReduceOp"]


class ReduceOp(Enum):
    """How tensors of several ranks become one."""

    SUM = 0
    PRODUCT = 1
    MIN = 2
    MAX = 3
    BAND = 4
    BOR = 5
    BXOR = 6
    AVG = 7
    UNUSED = 8


def torch_op(op: Any) -> Any:
    """Return torch's operation of the same name."""
    return getattr(dist.ReduceOp, op.name) if isinstance(op, ReduceOp) else op


KEYWORDS = ("prof", "log_name", "debug")
"""Published keywords of every collective, which torch's functions lack."""


def plain(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return torch's `function` with the published keywords, which have no effect on it."""
    @wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        for keyword in KEYWORDS:
            kwargs.pop(keyword, None)
        return function(*args, **kwargs)

    return wrapped


def reducing(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return `function` with its `op` in the published enumeration as well, and the mean where the backend has none."""
    @wraps(function)
    def wrapped(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        args = tuple(torch_op(each) for each in args)
        if "op" in kwargs:
            kwargs["op"] = torch_op(kwargs["op"])
        return function(tensor, *args, **kwargs)

    return wrapped


all_reduce = reducing(comm.all_reduce)
reduce = reducing(comm.reduce)
reduce_scatter = reducing(comm.reduce_scatter)
reduce_scatter_tensor = reducing(comm.reduce_scatter_tensor)


def inference_all_reduce(tensor: Tensor, op: Any = ReduceOp.SUM, group: Any = None, async_op: bool = False,
                         **kwargs: Any) -> Any:
    """Reduce `tensor` over the ranks, in place."""
    return all_reduce(tensor, op=op, group=group, async_op=async_op, **kwargs)


def all_reduce_coalesced(tensors: Sequence[Tensor], op: Any = ReduceOp.SUM, group: Any = None, async_op: bool = False,
                         **kwargs: Any) -> Any:
    """Reduce each of `tensors` over the ranks, in place."""
    for tensor in tensors:
        all_reduce(tensor, op=op, group=group, **kwargs)


def all_gather_coalesced(output_tensors: Sequence[Tensor], input_tensors: Sequence[Tensor], group: Any = None,
                         async_op: bool = False) -> Any:
    """Gather each of `input_tensors` into its output."""
    for output, own in zip(output_tensors, input_tensors, strict=True):
        comm.all_gather_into_tensor(output, own, group=group)


def allgather_fn(output_tensor: Tensor, input_tensor: Tensor, group: Any = None, async_op: bool = False,
                 debug: str | None = None) -> Any:
    """Gather `input_tensor` of all ranks into `output_tensor`."""
    return comm.all_gather_into_tensor(output_tensor, input_tensor, group=group, async_op=async_op)


def reduce_scatter_fn(output_tensor: Tensor, tensor: Tensor, op: Any = ReduceOp.SUM, group: Any = None,
                      async_op: bool = False, prof: bool = False, debug: str | None = None) -> Any:
    """Reduce `tensor` over the ranks, and give each its part."""
    return reduce_scatter_tensor(output_tensor, tensor, op=op, group=group, async_op=async_op, prof=prof)


def new_group(ranks: Sequence[int] | None = None) -> Any:
    """Make a process group; every rank of the job calls it."""
    return comm.new_group(ranks)


def get_rank(group: Any = None) -> int:
    """Return this rank's number in a group; raises `AssertionError` before `init_distributed`."""
    assert dist.is_initialized(), "get_rank: torch.distributed is not initialised; call init_distributed first"
    return dist.get_rank(group)


def get_world_size(group: Any = None) -> int:
    """Return the ranks of a group; raises `AssertionError` before `init_distributed`."""
    assert dist.is_initialized(), "get_world_size: torch.distributed is not initialised; call init_distributed first"
    return dist.get_world_size(group)


def get_world_group() -> Any:
    """Return the group of all ranks."""
    assert dist.is_initialized(), "get_world_group: torch.distributed is not initialised; call init_distributed first"
    return dist.group.WORLD


def get_global_rank(group: Any = None, group_rank: int = 0) -> int:
    """Return the job's number of a rank of a group."""
    return group_rank if group is None else dist.get_global_rank(group, group_rank)


def initialize_mesh_device(mesh_shape: tuple[int, ...], mesh_dim_names: tuple[str, ...]) -> DeviceMesh:
    """Return torch's device mesh of this shape."""
    return init_device_mesh(process_group.device().type, mesh_shape, mesh_dim_names=mesh_dim_names)


def has_all_reduce_coalesced() -> bool:
    """Return True."""
    return True


def has_coalescing_manager() -> bool:
    """Return False: collectives are grouped by Shoal, not by torch."""
    return False


def has_all_gather_into_tensor() -> bool:
    """Return True."""
    return True


def has_reduce_scatter_tensor() -> bool:
    """Return True."""
    return True


def mpi_discovery(distributed_port: int = 29500, verbose: bool = True) -> None:
    """Do nothing: `init_distributed` finds the ranks of an MPI job by itself."""


def set_backend() -> None:
    """Do nothing: the backend follows from the device."""


def init_deepspeed_backend(ds_backend: str | None = None, timeout: Any = None, init_method: str | None = None) -> None:
    """Do nothing: torch.distributed is the backend."""


def has_comm_data() -> bool:
    """Whether collectives were recorded."""
    return bool(get_comm_operation_count())


def get_comm_operation_count() -> int:
    """Return how many collectives were recorded."""
    return len(get_logged_comm_ops())


def get_logged_comm_ops() -> list[str]:
    """Return the names of the recorded collectives."""
    recorder = comm.traffic.recorder
    return [] if recorder is None else sorted({row.key.kind for row in recorder.rows})

