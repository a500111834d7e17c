"""The published backend over torch.distributed, as an object; its methods are the functions of `deepspeed.comm`."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from shoal.compat.deepspeed.comm import comm
from shoal.compat.deepspeed.comm.backend import Backend

__all__ = ["TorchBackend"]


class TorchBackend(Backend):
    """Joins the job on construction, unless it is joined already."""

    has_all_reduce_coalesced = has_coalescing_manager = True

    def __init__(self, backend: str | None, timeout: timedelta, init_method: str | None, rank: int = -1,
                 world_size: int = -1, name: str = "torch"):
        super().__init__(name)
        self.init_process_group(backend, timeout, init_method, rank, world_size)
        self.world_rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.single_gpu_mode = self.world_size == 1
        self.using_mpi = dist.get_backend() == "mpi"

    def init_process_group(self, backend: str | None, timeout: timedelta, init_method: str | None, rank: int,
                           world_size: int) -> None:
        """Join the job; a second call changes nothing."""
        comm.init_distributed(backend, timeout=timeout, init_method=init_method, rank=rank, world_size=world_size)
        self.initialized = True

    @classmethod
    def joined(cls) -> TorchBackend:
        """Return the backend of the job that this process has joined."""
        return cls(None, comm.default_pg_timeout, None)

    def new_group(self, ranks: list[int]) -> Any:
        """Return a new group of these ranks. Every rank of the job calls it."""
        return comm.new_group(ranks)

    def get_backend(self, group: Any = None) -> str:
        """Return the name of torch's backend."""
        return dist.get_backend(group)

    def get_all_gather_function(self) -> Callable[..., Any]:
        """Return the all-gather into one tensor."""
        return comm.all_gather_into_tensor

    def get_reduce_scatter_function(self) -> Callable[..., Any]:
        """Return the reduce-scatter of one tensor."""
        return comm.reduce_scatter_tensor

    init_device_mesh = staticmethod(comm.initialize_mesh_device)
    all_gather_base = staticmethod(comm.all_gather_into_tensor)


for _name in ("all_gather", "all_gather_coalesced", "all_gather_into_tensor", "all_gather_object", "all_reduce",
              "all_reduce_coalesced", "all_to_all", "all_to_all_single", "barrier", "batch_isend_irecv", "broadcast",
              "broadcast_object_list", "destroy_process_group", "gather", "get_global_rank", "get_rank", "get_world_group",
              "get_world_size", "has_all_gather_into_tensor", "has_reduce_scatter_tensor", "inference_all_reduce", "irecv",
              "isend", "monitored_barrier", "recv", "reduce", "reduce_scatter", "reduce_scatter_tensor", "scatter", "send"):
    setattr(TorchBackend, _name, staticmethod(vars(comm)[_name]))
