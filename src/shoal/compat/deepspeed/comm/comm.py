"""Collectives under their published names: torch's, with the keywords `prof`, `log_name` and `debug`."""

from __future__ import annotations

import torch.distributed as dist

from shoal.comm import all_gather as all_gather
from shoal.comm import all_gather_into_tensor as all_gather_into_tensor
from shoal.comm import all_to_all_single as all_to_all_single
from shoal.comm import barrier as barrier
from shoal.comm import broadcast as broadcast
from shoal.comm import configure as configure
from shoal.comm import destroy_process_group as destroy_process_group
from shoal.comm import get_all_ranks_from_group as get_all_ranks_from_group
from shoal.comm import get_local_rank as get_local_rank
from shoal.comm import is_available as is_available
from shoal.comm import is_initialized as is_initialized
from shoal.comm import log_summary as log_summary
from shoal.comm import reset_log as reset_log
from shoal.compat.collectives import ReduceOp as ReduceOp
from shoal.compat.collectives import all_gather_coalesced as all_gather_coalesced
from shoal.compat.collectives import all_reduce as all_reduce
from shoal.compat.collectives import all_reduce_coalesced as all_reduce_coalesced
from shoal.compat.collectives import allgather_fn as allgather_fn
from shoal.compat.collectives import get_comm_operation_count as get_comm_operation_count
from shoal.compat.collectives import get_global_rank as get_global_rank
from shoal.compat.collectives import get_logged_comm_ops as get_logged_comm_ops
from shoal.compat.collectives import get_rank as get_rank
from shoal.compat.collectives import get_world_group as get_world_group
from shoal.compat.collectives import get_world_size as get_world_size
from shoal.compat.collectives import has_all_gather_into_tensor as has_all_gather_into_tensor
from shoal.compat.collectives import has_all_reduce_coalesced as has_all_reduce_coalesced
from shoal.compat.collectives import has_coalescing_manager as has_coalescing_manager
from shoal.compat.collectives import has_comm_data as has_comm_data
from shoal.compat.collectives import has_reduce_scatter_tensor as has_reduce_scatter_tensor
from shoal.compat.collectives import inference_all_reduce as inference_all_reduce
from shoal.compat.collectives import init_deepspeed_backend as init_deepspeed_backend
from shoal.compat.collectives import initialize_mesh_device as initialize_mesh_device
from shoal.compat.collectives import mpi_discovery as mpi_discovery
from shoal.compat.collectives import new_group as new_group
from shoal.compat.collectives import plain
from shoal.compat.collectives import reduce as reduce
from shoal.compat.collectives import reduce_scatter as reduce_scatter
from shoal.compat.collectives import reduce_scatter_fn as reduce_scatter_fn
from shoal.compat.collectives import reduce_scatter_tensor as reduce_scatter_tensor
from shoal.compat.collectives import set_backend as set_backend
from shoal.compat.raising import as_published
from shoal.transport import process_group

ProcessGroup = dist.ProcessGroup
P2POp = dist.P2POp
init_distributed = as_published(process_group.init_distributed)
send, recv, isend, irecv = map(plain, (dist.send, dist.recv, dist.isend, dist.irecv))
gather, scatter, all_to_all = map(plain, (dist.gather, dist.scatter, dist.all_to_all))
all_gather_object = plain(dist.all_gather_object)
broadcast_object_list = plain(dist.broadcast_object_list)
batch_isend_irecv = plain(dist.batch_isend_irecv)
monitored_barrier = plain(dist.monitored_barrier)
