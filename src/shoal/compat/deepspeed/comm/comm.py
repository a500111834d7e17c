"""Collectives under their published names: torch.distributed's functions, counted and recorded by `shoal.comm`.

A function takes torch's arguments, the published `ReduceOp` or torch's, and the keywords `prof`, `log_name` and `debug`.
Before `init_distributed` it raises an `AssertionError`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import wraps
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup as ProcessGroup
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import shoal.comm
from shoal.comm import configure as configure
from shoal.comm import is_available as is_available
from shoal.comm import is_initialized as is_initialized
from shoal.comm import reset_log as reset_log
from shoal.compat import environment
from shoal.compat.comms_record import RecordedComms
from shoal.compat.deepspeed.accelerator.real_accelerator import get_accelerator
from shoal.compat.deepspeed.comm.constants import CCL_BACKEND as CCL_BACKEND
from shoal.compat.deepspeed.comm.constants import GLOO_BACKEND as GLOO_BACKEND
from shoal.compat.deepspeed.comm.constants import HCCL_BACKEND as HCCL_BACKEND
from shoal.compat.deepspeed.comm.constants import MPI_BACKEND as MPI_BACKEND
from shoal.compat.deepspeed.comm.constants import NCCL_BACKEND as NCCL_BACKEND
from shoal.compat.deepspeed.comm.reduce_op import ReduceOp as ReduceOp
from shoal.compat.deepspeed.comm.reduce_op import torch_op
from shoal.compat.deepspeed.constants import TORCH_DISTRIBUTED_DEFAULT_PORT, default_pg_timeout
from shoal.compat.deepspeed.utils.comms_logging import CommsLogger as CommsLogger
from shoal.compat.deepspeed.utils.timer import SynchronizedWallClockTimer
from shoal.compat.raising import as_published
from shoal.errors import UsageError
from shoal.recording import over, traffic
from shoal.recording.call import operation
from shoal.transport import process_group

PUBLISHED = frozenset({"prof", "log_name", "debug"})
"""Keywords that torch's functions do not have."""


class _NotInitialized(UsageError, AssertionError):
    """A collective before `init_distributed`."""


def _require_initialized() -> None:
    if not is_initialized():
        raise _NotInitialized("DeepSpeed backend not set, please initialize it using init_process_group(): call "
                              "deepspeed.init_distributed() first")


def _published(function: Callable[..., Any], *, counted: bool, name: str = "") -> Callable[..., Any]:
    """Return `function` with the published `name`, reductions and keywords; a `counted` one takes the keywords itself."""
    @wraps(function)
    def published(*args: Any, **kwargs: Any) -> Any:
        _require_initialized()
        given = {key: torch_op(value) for key, value in kwargs.items() if counted or key not in PUBLISHED}
        if name and given.get("log_name") is None:
            given["log_name"] = name
        return function(*map(torch_op, args), **given)

    published.__name__ = name or published.__name__
    return published


def init_distributed(dist_backend: str | None = None, auto_mpi_discovery: bool = True,
                     distributed_port: int = TORCH_DISTRIBUTED_DEFAULT_PORT, verbose: bool = True,
                     timeout: timedelta = default_pg_timeout, init_method: str | None = None,
                     dist_init_required: bool | None = None, config: Any = None, rank: int = -1,
                     world_size: int = -1) -> None:
    """Join the process group of this job; a second call changes nothing.

    Raises an `AssertionError` for `dist_init_required` false before the group is initialised.
    """
    if dist_init_required is False and not is_initialized():
        raise _NotInitialized("init_distributed: got dist_init_required=False, but the process group is not initialised; "
                              "leave it out, or call torch.distributed.init_process_group first")
    as_published(process_group.init_distributed)(
        dist_backend, auto_mpi_discovery, distributed_port, verbose, timeout, init_method, dist_init_required, config, rank,
        world_size)


all_reduce = _published(shoal.comm.all_reduce, counted=True)
reduce = _published(shoal.comm.reduce, counted=True)
broadcast = _published(shoal.comm.broadcast, counted=True)
all_gather = _published(shoal.comm.all_gather, counted=True)
all_gather_into_tensor = _published(shoal.comm.all_gather_into_tensor, counted=True, name="all_gather_into_tensor")
reduce_scatter = _published(shoal.comm.reduce_scatter, counted=True)
reduce_scatter_tensor = _published(shoal.comm.reduce_scatter_tensor, counted=True, name="reduce_scatter_tensor")
all_to_all_single = _published(shoal.comm.all_to_all_single, counted=True)
send = _published(shoal.comm.send, counted=True)
barrier = _published(shoal.comm.barrier, counted=True)
recv = _published(dist.recv, counted=False)
send_object_list = dist.send_object_list
recv_object_list = dist.recv_object_list
isend = _published(dist.isend, counted=False)
irecv = _published(dist.irecv, counted=False)
gather = _published(dist.gather, counted=False)
scatter = _published(dist.scatter, counted=False)
all_gather_object = _published(dist.all_gather_object, counted=False)
broadcast_object_list = _published(dist.broadcast_object_list, counted=False)
monitored_barrier = _published(dist.monitored_barrier, counted=False)


def allgather_fn(output_tensor: Tensor, input_tensor: Tensor, group: Any = None, async_op: bool = False,
                 debug: str | None = None) -> Any:
    """Gather the ranks' inputs into one tensor."""
    return all_gather_into_tensor(output_tensor, input_tensor, group=group, async_op=async_op, debug=debug)


def reduce_scatter_fn(output_tensor: Tensor, tensor: Tensor, op: Any = ReduceOp.SUM, group: Any = None,
                      async_op: bool = False, prof: bool = False, debug: str | None = None) -> Any:
    """Reduce the ranks' tensors, and keep this rank's part."""
    return reduce_scatter_tensor(output_tensor, tensor, op=op, group=group, async_op=async_op, prof=prof, debug=debug)


def inference_all_reduce(tensor: Tensor, op: Any = ReduceOp.SUM, group: Any = None, async_op: bool = False,
                         **keywords: Any) -> Any:
    """Reduce a tensor over the ranks; return it, or the handle of an `async_op`."""
    work = all_reduce(tensor, op=op, group=group, async_op=async_op, **keywords)
    return work if async_op else tensor


class _Works:
    """Several operations in flight, as one."""

    def __init__(self, works: Sequence[Any]):
        self._works = works

    def wait(self) -> None:
        """Wait for all of them."""
        for work in self._works:
            work.wait()

    def is_completed(self) -> bool:
        """Whether all of them are done."""
        return all(work.is_completed() for work in self._works)


def _together(start: Callable[..., Any], calls: Sequence[tuple[Any, ...]], async_op: bool, **keywords: Any) -> _Works | None:
    works = _Works([start(*each, async_op=True, **keywords) for each in calls])
    if async_op:
        return works
    works.wait()
    return None


def all_reduce_coalesced(tensors: Sequence[Tensor], op: Any = ReduceOp.SUM, group: Any = None, async_op: bool = False,
                         **keywords: Any) -> Any:
    """Reduce several tensors over the ranks."""
    return _together(all_reduce, [(each,) for each in tensors], async_op, op=op, group=group, **keywords)


def all_gather_coalesced(output_tensors: Sequence[Tensor], input_tensors: Sequence[Tensor], group: Any = None,
                         async_op: bool = False) -> Any:
    """Gather several inputs, each into one tensor."""
    return _together(all_gather_into_tensor, list(zip(output_tensors, input_tensors, strict=True)), async_op, group=group)


def all_to_all(output_tensor_list: Sequence[Tensor], input_tensor_list: Sequence[Tensor], group: Any = None,
               async_op: bool = False, **keywords: Any) -> Any:
    """Send one tensor to each rank, and receive one of each; gloo exchanges them as one buffer."""
    _require_initialized()
    if dist.get_backend(group) != GLOO_BACKEND:
        return dist.all_to_all(list(output_tensor_list), list(input_tensor_list), group=group, async_op=async_op)
    received = torch.cat([each.new_empty(each.numel()) for each in output_tensor_list])
    all_to_all_single(received, torch.cat([each.reshape(-1) for each in input_tensor_list]),
                      [each.numel() for each in output_tensor_list], [each.numel() for each in input_tensor_list],
                      group=group, **keywords)
    for whole, part in zip(output_tensor_list, received.split([each.numel() for each in output_tensor_list]), strict=True):
        whole.copy_(part.view_as(whole))
    return _Works([]) if async_op else None


def log_summary(show_straggler: bool = False, return_dict: bool = False) -> dict[str, Any] | None:
    """Print the record on rank 0, and with `return_dict` return it; a collective call over the job."""
    if return_dict:
        return shoal.comm.log_summary(show_straggler, return_dict=True)
    shoal.comm.log_summary(show_straggler)
    return None


class P2POp:
    """One send or receive of `batch_isend_irecv`; `op` is `isend` or `irecv`, of this module or of torch."""

    def __init__(self, op: Callable[..., Any], tensor: Tensor, peer: int, group: Any = None, tag: int = 0):
        self.op = op
        self.tensor = tensor
        self.peer = peer
        self.group = group
        self.tag = tag


def batch_isend_irecv(p2p_op_list: Sequence[Any], **keywords: Any) -> list[Any]:
    """Start sends and receives together, and return their handles."""
    _require_initialized()
    torch_of: dict[Any, Any] = {isend: dist.isend, irecv: dist.irecv}
    return dist.batch_isend_irecv([
        dist.P2POp(torch_of.get(each.op, each.op), each.tensor, each.peer, each.group, each.tag) for each in p2p_op_list])


def get_rank(group: Any = None) -> int:
    """Return this rank's number in `group`."""
    _require_initialized()
    return dist.get_rank(group)


def get_world_size(group: Any = None) -> int:
    """Return the number of ranks of `group`."""
    _require_initialized()
    return dist.get_world_size(group)


def get_local_rank() -> int:
    """Return this rank's number on its host."""
    _require_initialized()
    return shoal.comm.get_local_rank()


def get_world_group() -> Any:
    """Return the group of all ranks."""
    _require_initialized()
    return dist.group.WORLD


def get_global_rank(group: Any = None, group_rank: int = 0) -> int:
    """Return the number in the job of a rank of `group`."""
    _require_initialized()
    return dist.get_global_rank(dist.group.WORLD if group is None else group, group_rank)  # pyright: ignore[reportArgumentType]


def get_all_ranks_from_group(group: Any = None) -> list[int]:
    """Return the ranks of the job that are in `group`, in its order."""
    _require_initialized()
    return dist.get_process_group_ranks(group)


def new_group(ranks: Sequence[int]) -> Any:
    """Return a new group of these ranks. Every rank of the job calls it."""
    _require_initialized()
    return dist.new_group(list(ranks))


def destroy_process_group(group: Any = None) -> None:
    """Leave a group, by default the job."""
    shoal.comm.destroy_process_group(group)


def initialize_mesh_device(mesh_shape: Sequence[int], mesh_dim_names: Sequence[str]) -> DeviceMesh:
    """Return a device mesh of all ranks."""
    _require_initialized()
    return init_device_mesh(get_accelerator().current_device_name().split(":")[0], tuple(mesh_shape),
                            mesh_dim_names=tuple(mesh_dim_names))


def has_all_gather_into_tensor() -> bool:
    """Return True: there is such a collective."""
    _require_initialized()
    return True


has_reduce_scatter_tensor = has_coalescing_manager = has_all_reduce_coalesced = has_all_gather_into_tensor


def set_backend() -> None:
    """Do nothing: the backend is torch.distributed's."""


def init_deepspeed_backend(ds_backend: str | None, timeout: timedelta, init_method: str | None) -> None:
    """Join the process group of this job with a backend."""
    init_distributed(ds_backend, timeout=timeout, init_method=init_method)


def mpi_discovery(distributed_port: int = TORCH_DISTRIBUTED_DEFAULT_PORT, verbose: bool = True) -> None:
    """Join the job that mpirun started, by its variables."""
    init_distributed(auto_mpi_discovery=True, distributed_port=distributed_port, verbose=verbose)


def has_comm_data() -> bool:
    """Whether the record of collectives has a call."""
    return bool(get_logged_comm_ops())


def get_logged_comm_ops() -> list[str]:
    """Return the names of the recorded collectives, in the order of their first calls."""
    recorder = traffic.recorder
    return [] if recorder is None else list(dict.fromkeys(row.key.kind for row in recorder.rows))


def get_comm_operation_count() -> int:
    """Return the number of calls that were recorded."""
    recorder = traffic.recorder
    return 0 if recorder is None else sum(row.calls for row in recorder.rows)


def timed_op(func: Callable[..., Any]) -> Callable[..., Any]:
    """Return `func`, a collective of a script, recorded under its name or the keyword `log_name` if the record is on."""
    @wraps(func)
    def log_wrapper(*args: Any, **kwargs: Any) -> Any:
        tensors = [each for each in (*args, *kwargs.values()) if isinstance(each, Tensor)][:1]
        ranks = tuple(dist.get_process_group_ranks(kwargs.get("group"))) if is_initialized() else (0,)
        call = traffic.count(str(kwargs.get("log_name") or func.__name__), 0, op=operation(func.__name__), of=tensors,
                             ranks=ranks, requested=bool(kwargs.get("prof")))
        return over(None if kwargs.get("async_op") else call, lambda: func(*args, **kwargs))

    return log_wrapper


comms_logger: CommsLogger = RecordedComms()
"""The record of this process, as the published logger."""

timers = SynchronizedWallClockTimer()


def __getattr__(name: str) -> Any:
    if name == "cdb":
        backend = vars(import_module("shoal.compat.deepspeed.comm.torch"))["TorchBackend"]
        return backend.joined() if is_initialized() else None
    raise AttributeError(f"module '{__name__}' has no attribute '{name}'")


def in_aml() -> bool:
    """Whether Azure's machine learning service started this process."""
    return environment.on_azure()


def in_aws_sm() -> bool:
    """Whether Amazon's SageMaker started this process."""
    return environment.on_sagemaker()


def in_dlts() -> bool:
    """Whether Microsoft's deep learning training service started this process."""
    return environment.on_dlts()


def patch_aml_env_for_torch_nccl_backend(master_port: int = 6105, verbose: bool = True) -> None:
    """Set the variables of torch.distributed from those of Azure's service."""
    environment.patch_azure(master_port)


def patch_aws_sm_env_for_torch_nccl_backend(verbose: bool = True) -> None:
    """Set the variables of torch.distributed from those of Amazon's SageMaker."""
    environment.patch_sagemaker()
