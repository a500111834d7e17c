"""The published collectives: their keywords, reductions, return values and errors."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from shoal.compat.deepspeed import comm
from shoal.compat.deepspeed.runtime.utils import PartitionedTensor
from shoal.testing import run_ranks


def test_the_reductions_are_numbered_as_published() -> None:
    assert [(each.name, each.value) for each in comm.ReduceOp] == [
        ("SUM", 0), ("PRODUCT", 1), ("MIN", 2), ("MAX", 3), ("BAND", 4), ("BOR", 5), ("BXOR", 6), ("AVG", 7), ("UNUSED", 8)]


@pytest.mark.parametrize("call", [comm.get_rank, comm.get_world_size, comm.get_local_rank, comm.get_world_group,
                                  comm.barrier, comm.has_all_gather_into_tensor])
def test_a_call_before_the_process_group_is_an_assertion_error(call: Any) -> None:
    with pytest.raises(AssertionError, match="not set"):
        call()


def test_no_initialization_where_none_is_wanted_is_an_assertion_error() -> None:
    with pytest.raises(AssertionError, match="dist_init_required"):
        comm.init_distributed(dist_init_required=False)


def every_collective() -> dict[str, list[float]]:
    rank, ranks = comm.get_rank(), comm.get_world_size()
    mine = torch.tensor([rank + 1.0])
    found: dict[str, torch.Tensor] = {}

    def keep(name: str, tensor: torch.Tensor, work: Any) -> None:
        if work is not None:
            work.wait()
        found[name] = tensor

    for name, op in (("max", comm.ReduceOp.MAX), ("torch", torch.distributed.ReduceOp.SUM)):
        tensor = mine.clone()
        keep(name, tensor, comm.all_reduce(tensor, op=op, prof=True, log_name="x", debug="y"))
    tensor = mine.clone()
    keep("async", tensor, comm.all_reduce(tensor, async_op=True))
    tensor = mine.clone()
    keep("inference", tensor, comm.inference_all_reduce(tensor))
    tensor = mine.clone()
    keep("coalesced", tensor, comm.all_reduce_coalesced([tensor], async_op=True))
    whole = torch.empty(ranks)
    keep("allgather_fn", whole, comm.allgather_fn(whole, mine))
    part = torch.empty(1)
    keep("reduce_scatter_fn", part, comm.reduce_scatter_fn(part, torch.arange(1.0, ranks + 1)))
    swapped = [torch.empty(1) for _ in range(ranks)]
    comm.all_to_all(swapped, [mine + 10 * place for place in range(ranks)])
    found["all_to_all"] = torch.cat(swapped)
    if rank == 0:
        comm.send(mine, 1)
    else:
        tensor = torch.empty(1)
        comm.recv(tensor, 0)
        found["recv"] = tensor
    tensor = torch.empty(1)
    pair = [comm.P2POp(comm.isend, mine, 1 - rank), comm.P2POp(comm.irecv, tensor, 1 - rank)]
    for work in comm.batch_isend_irecv(pair):
        work.wait()
    found["batch"] = tensor
    whole = PartitionedTensor(torch.arange(5.0), None).full()
    found["partitioned"] = whole
    objects: list[Any] = [None] * ranks
    comm.all_gather_object(objects, rank)
    assert objects == [0, 1]
    group = comm.new_group([0, 1])
    assert comm.get_all_ranks_from_group(group) == [0, 1] and comm.get_global_rank(group, 1) == 1
    comm.monitored_barrier()
    assert comm.initialize_mesh_device((1, ranks), ("a", "b")).size() == ranks
    comm.configure(enabled=True)
    comm.all_reduce(mine)
    assert comm.has_comm_data() and comm.get_logged_comm_ops() == ["all_reduce"] and comm.get_comm_operation_count() == 1
    return {name: tensor.tolist() for name, tensor in found.items()}


def test_every_collective_gives_what_torch_gives() -> None:
    first, second = run_ranks(2, every_collective)
    both = {"max": [2.0], "torch": [3.0], "async": [3.0], "inference": [3.0], "coalesced": [3.0], "allgather_fn": [1.0, 2.0],
            "partitioned": [0.0, 1.0, 2.0, 3.0, 4.0]}
    assert first == {**both, "reduce_scatter_fn": [2.0], "all_to_all": [1.0, 2.0], "batch": [2.0]}
    assert second == {**both, "reduce_scatter_fn": [4.0], "all_to_all": [11.0, 12.0], "recv": [1.0], "batch": [1.0]}
