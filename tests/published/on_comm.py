"""Collectives, groups and the environment of `deepspeed.comm`."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import deepspeed
import torch
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator

from .case import case, raised

DTYPES = [torch.float32, torch.bfloat16, torch.int64]


def mine(dtype: torch.dtype, size: int = 4) -> torch.Tensor:
    return (torch.arange(size) + 10 * (dist.get_rank() + 1)).to(dtype)


@case(ranks=2)
def ranks_and_sizes() -> Any:
    deepspeed.init_distributed(dist_backend="gloo")
    return [
        dist.get_rank(),
        dist.get_world_size(),
        dist.get_local_rank(),
        dist.is_initialized(),
        dist.is_available(),
        dist.get_world_size(dist.get_world_group()),
    ]


@case(ranks=2, op=["SUM", "PRODUCT", "MIN", "MAX"], dtype=DTYPES, late=[False, True])
def all_reduce(op: str, dtype: torch.dtype, late: bool) -> Any:
    deepspeed.init_distributed("gloo")
    value = mine(dtype)
    work = dist.all_reduce(value, op=getattr(dist.ReduceOp, op), async_op=late)
    if late:
        work.wait()
    return [value, late or work is None]


@case(ranks=3, dtype=DTYPES)
def inference_all_reduce(dtype: torch.dtype) -> Any:
    deepspeed.init_distributed("gloo")
    value = mine(dtype)
    dist.inference_all_reduce(value)
    return value


@case(ranks=2, dtype=DTYPES, source=[0, 1])
def broadcast(dtype: torch.dtype, source: int) -> Any:
    deepspeed.init_distributed("gloo")
    value = mine(dtype)
    dist.broadcast(value, src=source)
    return value


@case(ranks=2, dtype=DTYPES)
def all_gather(dtype: torch.dtype) -> Any:
    deepspeed.init_distributed("gloo")
    parts = [torch.zeros(4, dtype=dtype) for _ in range(2)]
    dist.all_gather(parts, mine(dtype))
    whole = torch.zeros(8, dtype=dtype)
    dist.all_gather_into_tensor(whole, mine(dtype))
    again = torch.zeros(8, dtype=dtype)
    dist.allgather_fn(again, mine(dtype))
    return [parts, whole, again]


@case(ranks=2, dtype=DTYPES)
def reduce_scatter(dtype: torch.dtype) -> Any:
    deepspeed.init_distributed("gloo")
    out, again = torch.zeros(2, dtype=dtype), torch.zeros(2, dtype=dtype)
    dist.reduce_scatter_fn(out, mine(dtype))
    dist.reduce_scatter_tensor(again, mine(dtype))
    return [out, again]


@case(ranks=2)
def coalesced() -> Any:
    deepspeed.init_distributed("gloo")
    values = [mine(torch.float32), mine(torch.float32, 3)]
    dist.all_reduce_coalesced(values)
    return values


@case(ranks=2)
def all_gather_coalesced() -> Any:
    deepspeed.init_distributed("gloo")
    outs = [torch.zeros(8), torch.zeros(6)]
    work = dist.all_gather_coalesced(outs, [mine(torch.float32), mine(torch.float32, 3)], async_op=True)
    if work is not None:
        work.wait()
    return outs


@case(ranks=2)
def all_to_all_single() -> Any:
    deepspeed.init_distributed("gloo")
    out = torch.zeros(4)
    dist.all_to_all_single(out, mine(torch.float32))
    return out


@case(ranks=2)
def point_to_point() -> Any:
    deepspeed.init_distributed("gloo")
    value = mine(torch.float32) if dist.get_rank() == 0 else torch.zeros(4)
    if dist.get_rank() == 0:
        dist.send(value, 1)
        dist.isend(value + 1, 1).wait()
    else:
        dist.recv(value, 0)
        other = torch.zeros(4)
        dist.irecv(other, 0).wait()
        return [value, other]
    return value


@case(ranks=3)
def reduce_gather_scatter() -> Any:
    deepspeed.init_distributed("gloo")
    rank = dist.get_rank()
    value = mine(torch.float32)
    dist.reduce(value, 1)
    parts = [torch.zeros(2) for _ in range(3)] if rank == 0 else None
    dist.gather(mine(torch.float32, 2), parts, dst=0)
    out = torch.zeros(2)
    dist.scatter(out, [torch.full((2,), float(each)) for each in range(3)] if rank == 0 else None, src=0)
    return [value if rank == 1 else None, parts, out]


@case(ranks=2)
def objects() -> Any:
    deepspeed.init_distributed("gloo")
    found: list[Any] = [None, None]
    dist.all_gather_object(found, {"rank": dist.get_rank()})
    shared: list[Any] = ["from 0", 3] if dist.get_rank() == 0 else [None, None]
    dist.broadcast_object_list(shared, src=0)
    return [found, shared]


@case(ranks=4, members=[[0, 1], [1, 3], [0, 1, 2, 3]])
def new_group(members: list[int]) -> Any:
    deepspeed.init_distributed("gloo")
    group = dist.new_group(members)
    value = mine(torch.float32)
    if dist.get_rank() in members:
        dist.all_reduce(value, group=group)
        return [value, dist.get_world_size(group), dist.get_rank(group), dist.get_all_ranks_from_group(group)]
    return value


@case(ranks=2)
def barriers() -> Any:
    deepspeed.init_distributed("gloo")
    dist.barrier()
    dist.monitored_barrier(timeout=timedelta(seconds=20))
    return True


@case()
def capabilities() -> Any:
    deepspeed.init_distributed("gloo")
    return [dist.has_all_gather_into_tensor(), dist.has_reduce_scatter_tensor(), dist.has_all_reduce_coalesced()]


@case()
def reduce_operations() -> Any:
    return {
        name: int(getattr(dist.ReduceOp, name).value)
        for name in ("SUM", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR", "AVG", "UNUSED")
    }


@case(ranks=2)
def init_twice_and_adopted() -> Any:
    deepspeed.init_distributed("gloo")
    deepspeed.init_distributed("gloo", verbose=False)
    deepspeed.init_distributed(dist_backend=get_accelerator().communication_backend_name(), dist_init_required=False)
    return [dist.is_initialized(), torch.distributed.is_initialized()]


@case(keyword=[None, True, False])
def init_required(keyword: bool | None) -> Any:
    torch.distributed.destroy_process_group()
    os.environ["MASTER_PORT"] = str(23000 + os.getpid() % 9000)
    return [raised(lambda: deepspeed.init_distributed("gloo", dist_init_required=keyword)), dist.is_initialized()]


@case(missing=["RANK", "WORLD_SIZE", "MASTER_PORT"])
def init_without_discovery(missing: str) -> Any:
    torch.distributed.destroy_process_group()
    os.environ["MASTER_PORT"] = str(23000 + os.getpid() % 9000)
    del os.environ[missing]
    return raised(lambda: deepspeed.init_distributed("gloo", auto_mpi_discovery=False)) != {"raised": []}


@case(ranks=2)
def destroyed() -> Any:
    deepspeed.init_distributed("gloo")
    dist.all_reduce(torch.ones(2))
    dist.destroy_process_group()
    return dist.is_initialized()


@case()
def before_init() -> Any:
    torch.distributed.destroy_process_group()
    return [dist.is_initialized()]


@case(ranks=2, debug=[False, True])
def logged(debug: bool) -> Any:
    deepspeed.init_distributed("gloo")
    dist.configure(enabled=True, prof_all=True, verbose=False, debug=debug)
    for _ in range(3):
        dist.all_reduce(torch.ones(4))
    dist.broadcast(torch.ones(2), 0)
    found = dist.log_summary(return_dict=True)
    dist.configure(enabled=False)
    if found is None:
        return None
    summary = found["summary"]
    return [
        sorted(found),
        {
            name: {size: [row["count"], row["msg_size_bytes"], row["msg_size_str"]] for size, row in sizes.items()}
            for name, sizes in summary.items()
            if "reduce" in name or "broadcast" in name
        },
    ]


@case(ranks=2)
def logged_counts() -> Any:
    deepspeed.init_distributed("gloo")
    dist.configure(enabled=True, prof_all=False, prof_ops=["all_reduce"])
    dist.all_reduce(torch.ones(4))
    dist.broadcast(torch.ones(4), 0)
    first = [dist.has_comm_data(), dist.get_logged_comm_ops(), dist.get_comm_operation_count()]
    dist.reset_log()
    return [first, dist.has_comm_data()]


@case(ranks=4, sizes=[(2, 2), (4, 1), (1, 4)])
def mesh(sizes: tuple[int, int]) -> Any:
    deepspeed.init_distributed("gloo")
    found = dist.initialize_mesh_device(sizes, ("data_parallel", "sequence_parallel"))
    return [list(found.mesh_dim_names), found.mesh.tolist(), found.get_group("data_parallel").size()]


@case(ranks=2, seed=[3, 7])
def set_random_seed(seed: int) -> Any:
    import random

    import numpy as np
    from deepspeed.runtime.utils import set_random_seed as seeding

    seeding(seed)
    return [torch.rand(3), random.random(), float(np.random.rand())]


@case(ranks=4)
def groups_without_a_mesh() -> Any:
    from deepspeed.utils import groups

    deepspeed.init_distributed("gloo")
    return [
        groups.get_data_parallel_world_size(),
        groups.get_data_parallel_rank(),
        groups._get_sequence_parallel_world_size(),
        groups._get_sequence_parallel_rank(),
        groups.get_model_parallel_world_size(),
        groups.get_tensor_model_parallel_world_size(),
        groups._get_data_parallel_world_size(),
        groups._get_model_parallel_world_size(),
    ]


@case()
def groups_initialize() -> Any:
    from deepspeed.utils import groups

    return raised(groups.initialize)


@case()
def accelerator() -> Any:
    held = get_accelerator()
    return [
        held.device_name(),
        held.device_name(0),
        held.current_device_name(),
        held.communication_backend_name(),
        held.is_available(),
        held.is_bf16_supported(),
        held.is_fp16_supported(),
        held.device_count() > 0,
        held.is_synchronized_device(),
        held.use_host_timers(),
        held.resolves_data_dependency(),
        held.handles_memory_backpressure(),
        [str(dtype) for dtype in held.supported_dtypes()],
        held.on_accelerator(torch.ones(1)),
        held.is_triton_supported(),
    ]
