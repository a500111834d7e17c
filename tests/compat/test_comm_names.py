"""The published collectives: their keywords, reductions, return values and errors."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

from shoal.compat.deepspeed import comm
from shoal.compat.deepspeed.comm import comm as comm_module
from shoal.compat.deepspeed.comm import utils
from shoal.compat.deepspeed.comm.torch import TorchBackend
from shoal.compat.deepspeed.runtime.utils import PartitionedTensor
from shoal.compat.deepspeed.utils import comms_logging
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
    keep("inference", comm.inference_all_reduce(tensor), None)
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


# Backends and the log


def backend() -> dict[str, Any]:
    present = comm_module.cdb
    mine, whole = torch.ones(2), torch.zeros(2 * comm.get_world_size())
    present.all_reduce(mine, op=comm.ReduceOp.SUM)
    present.all_gather_into_tensor(whole, mine)
    return {"kind": isinstance(present, TorchBackend), "facts": (present.name, present.world_size, present.get_backend()),
            "sums": whole.tolist(), "functions": (present.get_all_gather_function().__name__, present.is_initialized())}


def test_the_backend_is_an_object_with_the_collectives() -> None:
    assert comm_module.cdb is None
    found, _ = run_ranks(2, backend)
    assert found == {"kind": True, "facts": ("torch", 2, "gloo"), "sums": [2.0] * 4,
                     "functions": ("all_gather_into_tensor", True)}


def logged() -> dict[str, Any]:
    log = comm.comms_logger
    comm.configure(enabled=True, prof_all=True)
    comm.all_reduce(torch.ones(4))
    comm.all_gather_into_tensor(torch.zeros(4 * comm.get_world_size()), torch.ones(4), log_name="mine")
    comm.timed_op(doubled)(torch.ones(2), log_name="custom")
    found = {name: {size: record[0] for size, record in sizes.items()} for name, sizes in log.comms_dict.items()}
    log.stop_profiling_comms()
    comm.all_reduce(torch.ones(4))
    log.start_profiling_op(["broadcast"])
    comm.broadcast(torch.ones(1), 0)
    later = (log.enabled, log.prof_all, log.prof_ops, log.get_total_operations(), comm.get_comm_operation_count())
    log.reset_data()
    summary = comm.log_summary()
    comm.configure(enabled=False)
    return {"found": found, "later": later, "empty": not log.has_data(), "summary": summary}


def doubled(tensor: torch.Tensor, log_name: str = "") -> torch.Tensor:
    return 2 * tensor


def test_the_published_logger_reads_and_switches_the_record() -> None:
    found, _ = run_ranks(2, logged)
    assert found == {"found": {"all_reduce": {16: 1}, "mine": {32: 1}, "custom": {8: 1}},
                     "later": (True, False, ["broadcast"], 4, 4), "empty": True, "summary": None}


def test_a_logger_of_a_script_computes_the_published_bandwidths() -> None:
    log = comms_logging.CommsLogger()
    log.append("all_reduce", "grads", 2.0, 1000)
    log.append("all_reduce", "grads", 4.0, 1000)
    log.append("broadcast", "weights", 1.0, 10)
    assert log.comms_dict["grads"] == {1000: [2, [2.0, 4.0], [pytest.approx(0.008), pytest.approx(0.004)], [0.0, 0.0]]}
    assert (log.get_operation_names(), log.get_total_operations()) == (["grads", "weights"], 3)
    found = log.log_all(print_log=False, show_straggler=True, return_dict=True)
    assert found is not None and found["straggler_analysis"]["weights"][10]["total_straggler_ms"] == 0.0
    assert found["summary"]["grads"][1000]["avg_latency_ms"] == 3.0 and log.log_all(print_log=False) is None
    with pytest.raises(ValueError, match="all_reduce"):
        comms_logging.calc_bw_log("bogus", 1, 1.0)


@pytest.mark.parametrize(("size", "text"), [(0, "0B"), (1023, "1023.0 B"), (1024, "1.0 KB"), (5000, "4.88 KB"),
                                            (3 * 10**12, "2.73 TB")])
def test_sizes_are_written_as_published(size: int, text: str) -> None:
    assert comms_logging.convert_size(size) == text


def test_the_tensor_of_a_call_is_found_by_the_names_of_parameters() -> None:
    assert (utils.get_tensor_position(doubled), utils.get_default_args(doubled)) == (0, {"log_name": ""})
    assert utils.get_msg_size_from_args(doubled, torch.ones(4)) == utils.get_msg_size_from_args(
        doubled, tensor=torch.ones(4)) == 16
    assert utils.get_debug_log_name({"log_name": "a"}, False) == "a"


AZURE = {"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "8", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
         "AZ_BATCHAI_MPI_MASTER_NODE": "10.0.0.5", "AZ_BATCH_MASTER_NODE": "10.0.0.4:6000"}
JOINED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


@pytest.mark.parametrize(("local", "address", "port"), [("8", "10.0.0.5", "6111"), ("4", "10.0.0.4", "6000")])
def test_azure_variables_become_those_of_torch(monkeypatch: pytest.MonkeyPatch, local: str, address: str, port: str) -> None:
    for name in (*JOINED, "NCCL_SOCKET_IFNAME"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    for name, value in {**AZURE, "OMPI_COMM_WORLD_LOCAL_SIZE": local}.items():
        monkeypatch.setenv(name, value)
    comm_module.patch_aml_env_for_torch_nccl_backend(6111)
    assert [os.environ[name] for name in JOINED] == ["3", "8", "1", address, port]


def test_sagemaker_variables_become_those_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in JOINED[:3]:
        monkeypatch.setenv(name, "")
    for name, value in AZURE.items():
        monkeypatch.setenv(name, value)
    comm_module.patch_aws_sm_env_for_torch_nccl_backend()
    assert [os.environ[name] for name in JOINED[:3]] == ["3", "8", "1"]
    monkeypatch.delenv("OMPI_COMM_WORLD_RANK")
    with pytest.raises(KeyError, match="OMPI_COMM_WORLD_RANK"):
        comm_module.patch_aws_sm_env_for_torch_nccl_backend()
