"""`init_distributed` creates or reuses the process group and selects the device of a rank."""

import json
import logging
import os
import subprocess
import sys
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from shoal.device import group_backends
from shoal.errors import LaunchError, UsageError
from shoal.testing import run_ranks
from shoal.transport import process_group
from shoal.transport.launcher_env import RankInfo
from shoal.transport.process_group import device, init_distributed

TWO = RankInfo(rank=1, ranks=2, local_rank=1, local_ranks=2, source="Open MPI", job="ompi-7/8")


@pytest.fixture
def unlaunched(monkeypatch):
    """A process without launcher variables; its process group is destroyed after the test."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    if dist.is_initialized():  # by an earlier test in this process
        dist.destroy_process_group()
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def reuse_group():
    group = dist.group.WORLD
    init_distributed(dist_init_required=False)
    init_distributed("gloo")
    dist.barrier()
    return dist.group.WORLD is group, dist.get_rank()


def test_an_initialized_process_group_is_reused():
    assert run_ranks(2, reuse_group) == [(True, 0), (True, 1)]


def test_a_single_process_joins_a_group_of_one_and_logs_why(unlaunched, caplog):
    with caplog.at_level(logging.INFO, logger="shoal"):
        init_distributed("gloo")
    assert (dist.get_rank(), dist.get_world_size()) == (0, 1)
    assert "found by alone, over gloo" in caplog.text


def test_the_init_method_can_be_given(unlaunched, tmp_path):
    init_distributed("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    assert dist.get_world_size() == 1


def test_a_rank_without_a_rendezvous_address_is_rejected(unlaunched):
    with pytest.raises(UsageError, match="got rank=0 and world_size=2 but no rendezvous address; pass init_method"):
        init_distributed("gloo", rank=0, world_size=2)


def test_a_missing_required_process_group_is_an_error(unlaunched):
    with pytest.raises(UsageError, match=r"dist_init_required is False, but torch.distributed is not initialised"):
        init_distributed(dist_init_required=False)


def test_a_worker_that_imports_the_script_is_told_that_it_is_no_rank(unlaunched, tmp_path):
    (tmp_path / "script.py").write_text(
        "import torch, shoal\nshoal.init_distributed('gloo')\n"
        "if __name__ == '__main__':\n"
        "    numbers = torch.utils.data.DataLoader(range(4), num_workers=1, multiprocessing_context='spawn')\n"
        "    print([int(number) for number in numbers])\n")
    done = subprocess.run([sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True, timeout=120,
                          env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert done.returncode
    assert "the worker SpawnProcess-1 imports the script to begin, and is no rank; put what the script does" in done.stderr


def test_a_timeout_that_is_not_a_number_is_rejected(unlaunched, monkeypatch):
    monkeypatch.setenv("DEEPSPEED_TIMEOUT", "soon")
    with pytest.raises(LaunchError, match="DEEPSPEED_TIMEOUT: got 'soon'; a number of minutes is expected"):
        init_distributed("gloo")


def test_an_interface_that_this_host_lacks_is_named_with_those_it_has(unlaunched, monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo,nowhere0")
    with pytest.raises(LaunchError, match=r"GLOO_SOCKET_IFNAME: .* has no interface nowhere0; it has .*\blo\b"):
        init_distributed("gloo")


def test_an_ignored_configuration_argument_gives_a_warning(unlaunched, caplog):
    with caplog.at_level(logging.WARNING, logger="shoal"):
        init_distributed("gloo", config={})
    assert "config has no effect here; shoal.initialize reads it" in caplog.text


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_the_device_of_a_rank_without_gpus_is_the_cpu():
    assert device() == torch.device("cpu")


def pretend_gpus(setattr):
    """Have torch answer as on a host with two GPUs, of which the second is current."""
    setattr(torch.accelerator, "current_accelerator", lambda check_available=False: torch.device("cuda"))
    setattr(torch.accelerator, "device_count", lambda: 2)
    setattr(torch.accelerator, "current_device_index", lambda: 1)


@pytest.fixture
def gpus(unlaunched, monkeypatch):
    """A process without launcher variables, on a host with two GPUs."""
    pretend_gpus(monkeypatch.setattr)


def test_ranks_beyond_the_number_of_gpus_share_them(gpus, monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert device() == torch.device("cuda", 1)


def test_a_rank_without_a_local_rank_keeps_its_current_gpu(gpus, monkeypatch):
    for name in ("OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "SLURM_LOCALID"):
        monkeypatch.delenv(name, raising=False)
    assert device() == torch.device("cuda", 1)
    assert process_group.local_rank() == 0


@pytest.mark.parametrize(("backends", "found"), [
    ("cpu:gloo,cuda:gloo", "cpu"), ("cpu:gloo", "cpu"), ("cuda:nccl", "cuda:0"), ("cpu:gloo,cuda:nccl", "cuda:0"),
    ("cpu:mpi,cuda:mpi", "cuda:0"),
])  # fmt: skip
def test_a_job_uses_gpus_that_its_backend_supports(gpus, monkeypatch, backends, found):
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_backend_config", lambda group=None: backends)
    try:
        assert str(device()) == found
    finally:
        monkeypatch.undo()  # before other fixtures query the process group


def on_a_host_with_gpus():
    pretend_gpus(setattr)  # the process exits after the test
    heard = []
    logging.getLogger("shoal").addHandler(handler := logging.Handler())
    handler.emit = lambda record: heard.append(record.getMessage())
    init_distributed()
    return str(device()), [line for line in heard if line.startswith("ranks train on the CPU")]


def test_gloo_ranks_say_that_they_train_on_the_cpu_of_a_host_with_gpus():
    found = run_ranks(2, on_a_host_with_gpus)
    assert [name for name, _ in found] == ["cpu", "cpu"]
    assert ["(cpu:gloo,cuda:gloo) does not send their tensors" in line for line in found[0][1]] == [True]


def test_nccl_rejects_a_rank_without_its_own_gpu(monkeypatch):
    pretend_gpus(monkeypatch.setattr)
    monkeypatch.setattr(process_group, "discover", lambda variables, **more: RankInfo(
        rank=6, ranks=8, local_rank=2, local_ranks=4, source="Slurm"))
    with pytest.raises(LaunchError, match="rank 6 has no device of its own: it is local rank 2, and this host has 2;"):
        init_distributed("nccl")


def test_a_process_group_is_bound_to_the_device_of_its_rank(gpus, monkeypatch):
    calls = []
    monkeypatch.setattr(torch.accelerator, "set_device_index", lambda index: calls.append(("current", index)))
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **more: calls.append((backend, more.get("device_id"))))
    monkeypatch.setattr(process_group, "_made_here", [])
    for backend in ("cpu:gloo,cuda:nccl", "nccl", "gloo", "cpu:gloo"):
        process_group._init_group(backend, 2)
    first = torch.device("cuda", 0)
    assert calls == [("current", 0), ("cpu:gloo,cuda:nccl", first), ("current", 0), ("nccl", first), ("gloo", None),
                     ("cpu:gloo", None)]


def test_the_backends_of_a_group_follow_the_kind_of_device():
    kinds = [None, torch.device("cuda"), torch.device("xpu"), torch.device("mps")]
    assert [group_backends(kind) for kind in kinds] == ["gloo", "cpu:gloo,cuda:nccl", "cpu:gloo,xpu:xccl", "gloo"]


def test_the_announcement_of_a_dead_job_is_ignored(monkeypatch, tmp_path):
    monkeypatch.setattr(process_group.tempfile, "gettempdir", lambda: str(tmp_path))
    path = process_group._announcement(TWO)
    path.write_text(json.dumps({"port": 1, "pid": os.getpid(), "born": "an earlier life"}))
    with pytest.raises(LaunchError, match=r"rank 0 announced no port in .*ompi-7-8.json within 0.05 s"):
        process_group._announced_port(path, timedelta(seconds=0.05))


def test_the_announcement_of_a_live_job_is_used(monkeypatch, tmp_path):
    monkeypatch.setattr(process_group.tempfile, "gettempdir", lambda: str(tmp_path))
    path = process_group._announcement(TWO)
    path.write_text(json.dumps({"port": 4321, "pid": os.getpid(), "born": process_group._start_time(os.getpid())}))
    assert process_group._announced_port(path, timedelta(seconds=5)) == 4321


def test_announcements_of_another_users_folder_are_ignored(monkeypatch, tmp_path):
    monkeypatch.setattr(process_group.tempfile, "gettempdir", lambda: str(tmp_path))
    process_group._announcement(TWO)
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    (tmp_path / "shoal-12345").mkdir()
    with pytest.raises(LaunchError, match="shoal-12345 belongs to another user"):
        process_group._announcement(TWO)
