"""A job whose hosts the launcher starts goes on with fewer of them, whichever is lost; here all hosts are this machine."""

from __future__ import annotations

import io
import os
import queue
import re
import signal
import socket
import sys
import time
from contextlib import suppress
from dataclasses import asdict
from types import SimpleNamespace
from typing import cast

import pytest
from launched import SECONDS, wait
from torch.distributed.elastic.multiprocessing import start_processes

from shoal.cluster.hostfile import Host
from shoal.cluster.launchers import LAUNCHERS
from shoal.launch import cluster
from shoal.launch.agent import RankFiles, close_own_ends
from shoal.launch.console import Console
from shoal.launch.facts import gather
from shoal.launch.job import ClusterJob
from shoal.launch.protocol import Channel, Hello
from shoal.launch.starting import Connected, HostEvent, Starter

TRAIN = """
import os, sys, time, torch, shoal

config = {"train_batch_size": 12, "optimizer": {"type": "AdamW"}, "zero_optimization": {"stage": 3}, "timeout": 30,
          "resilience": {"vault": {"every": 1}}}
torch.manual_seed(0)
engine, _, loader, _ = shoal.initialize(model=torch.nn.Linear(4, 4), config=config,
                                        training_data=[torch.full((4,), float(index)) for index in range(1200)])
engine.load_checkpoint("nowhere")
first = engine.global_steps
print(f"{engine.global_rank} of {engine.world_size} from {first}, agent {os.getppid()}, "
      f"host {os.environ['CROSS_RANK']} of {os.environ['CROSS_SIZE']}", flush=True)
for row in loader:
    engine.backward(engine(row).square().mean())
    engine.step()
    if engine.global_steps == first + 3 and first == 0:
        print("is at 3", flush=True)
    if engine.world_size == 3:
        time.sleep(0.2)
    elif engine.global_steps == first + 5:
        break
"""
FAILS = """
import os
attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
if os.environ["RANK"] == "1" and attempt < 2:
    raise ValueError(f"herring {attempt}")
print("rank", os.environ["RANK"], "attempt", attempt, flush=True)
import torch.distributed as dist
dist.init_process_group("gloo")
dist.barrier()
dist.destroy_process_group()
"""


def hosts(count: int) -> str:
    """Return so many names of this machine, with a slot each."""
    return "@".join(f"{name}:0" for name in (socket.gethostname(), "localhost", "127.0.0.1")[:count])


@pytest.mark.parametrize(("lost", "loss"), [(0, signal.SIGKILL), (1, signal.SIGKILL), (0, signal.SIGSTOP)],
                         ids=["first killed", "second killed", "first frozen"])
def test_a_job_survives_the_loss_of_any_host(run, script, lost, loss):
    launch = run("--hosts", hosts(3), "--nodes", "2:3", "--max-restarts", "5", "--no-bind-cores", script(TRAIN))
    begun = {int(found[1]): int(found[2]) for line in launch.read(3)
             if (found := re.search(r"\] (\d) of 3 from 0, agent (\d+), host \d of 3", line))}
    assert sorted(begun) == [0, 1, 2]
    assert all(line.endswith("is at 3") for line in launch.read(3))
    family = [begun[lost]] + ([] if loss == signal.SIGKILL else children(begun[lost]))
    for pid in family:
        os.kill(pid, loss)
    try:
        code, out, err = launch.end()
    finally:
        for pid in family:
            kill(pid)
    assert code == 0, err
    begun_again = sorted(re.findall(r"(\d of 2) from (\d+), agent \d+, (host \d of 2)", out))
    assert [(rank, host) for rank, _, host in begun_again] == [("0 of 2", "host 0 of 2"), ("1 of 2", "host 1 of 2")], err
    assert all(int(steps) >= 1 for _, steps, _ in begun_again), "loaded from memory, of which a third was lost"
    name = (socket.gethostname(), "localhost")[lost]
    assert f"shoal run: {name} is lost: " in err
    assert f"it ran rank {lost}; the job goes on with 2 hosts" in err
    assert "out of memory" not in err, "the reason of a rank that the agent killed is known"


def test_too_few_hosts_end_the_job(run, script):
    launch = run("--hosts", hosts(2), "--max-restarts", "5", "--no-bind-cores", script(TRAIN.replace("== 3", "== 2")))
    begun = {int(found[1]): int(found[2]) for line in launch.read(2)
             if (found := re.search(r"\] (\d) of 2 from 0, agent (\d+)", line))}
    os.kill(begun[1], signal.SIGKILL)
    code, _, err = launch.end()
    assert code != 0
    assert "shoal run: localhost is lost: the connection broke; it ran rank 1" in err


def test_a_failed_rank_has_all_hosts_begin_again(run, script, tmp_path):
    launch = run("--hosts", hosts(3), "--max-restarts", "3", "--no-bind-cores", "--log-dir", str(tmp_path), script(FAILS))
    code, out, err = launch.end()
    assert code == 0, err
    assert "herring 0" in err
    assert "herring 1" in err
    assert re.search(r"rank 1 attempt 2", out)
    assert "herring 1" in (tmp_path / "failure.txt").read_text(), "what `shoal doctor` shows"
    assert (tmp_path / "rank1.attempt2.out").read_text() == "rank 1 attempt 2\n"


def test_the_output_of_a_rank_ends_with_it(tmp_path):
    lines = []
    files = RankFiles(str(tmp_path), cast(Console, SimpleNamespace(takes_output=True, output=lines.append)))
    ranks = start_processes(name="rank", entrypoint=sys.executable, args={0: ("-c", "print('herring')")},
                            envs={0: {"RANK": "0"}}, logs_specs=files)
    ended = ranks.wait()
    assert ended is not None and not ended.is_failed()
    close_own_ends(ranks)
    files.close()
    assert [line.text for line in lines] == ["herring"]
    assert not files.streams._selector.get_map(), "a pipe whose end was not read is waited for in vain"


def test_a_job_begins_without_a_host_that_is_down(run, script):
    launch = run("--hosts", f"{hosts(2)}@192.0.2.1:0", "--nodes", "2:3", "--max-restarts", "1", "--no-bind-cores",
                 "--launcher-args", "-o ConnectTimeout=1", script("import os; print(os.environ['WORLD_SIZE'])"))
    code, out, err = launch.end()
    assert code == 0, err
    assert [line.rpartition(" ")[2] for line in out.splitlines()] == ["2", "2"]
    assert "192.0.2.1: " in err
    assert "the others begin without it" in err


class QuietStarter:
    """Has one host with a connection from the start, which says nothing."""

    def __init__(self) -> None:
        self.events: queue.SimpleQueue[HostEvent] = queue.SimpleQueue()
        (self.sent, writer), reader = map(os.fdopen, os.pipe(), ("rb", "wb")), io.BytesIO()
        channel = Channel(reader, writer)
        for message in (Connected(channel=channel), Hello(node=0, host="node0", pid=1, facts=asdict(gather(".")))):
            self.events.put(HostEvent(node=0, message=message))

    def start(self, job: ClusterJob) -> None:
        """Do nothing: the host runs."""

    def forget(self) -> None:
        """Do nothing: there is no file."""

    def end(self, seconds: float) -> None:
        """Do nothing: there is no process."""


@pytest.fixture
def quiet_host(monkeypatch):
    """A cluster of one silent host, which is lost after 6 s of a clock that the test sets; and what it is sent."""
    clock = [100.0]
    monkeypatch.setattr(cluster, "time", SimpleNamespace(monotonic=lambda: clock[0], time=time.time))
    monkeypatch.setattr(cluster, "BEAT", 0.01)
    starter = QuietStarter()
    job = ClusterJob(secret="", hosts=(Host(name="node0", slots=(0,)),), environment={}, folder=".", plan=None,
                     least=1, quiet=6.0)
    with starter.sent, cluster.Cluster(cast("Starter", starter), job, LAUNCHERS["ssh"]) as made:
        yield made, starter.sent, clock


def test_hosts_get_beats_while_the_launcher_waits_for_a_reader(quiet_host):
    _, sent, _ = quiet_host
    assert [sent.readline() for _ in range(3)] == [b'["Beat", {}]\n'] * 3  # though nothing asks the cluster for messages


def test_no_host_is_silent_while_the_launcher_itself_is_stopped(quiet_host):
    made, _, clock = quiet_host
    clock[0] += 60.0
    made.receive()
    assert not made.nodes[0].lost
    for _ in range(7):
        clock[0] += 1.0
        made.receive()
    assert made.nodes[0].lost == "no message from it for 6 s; it is down, stopped, or cut off"


@pytest.mark.parametrize(("count", "what"), [(2, "import signal; signal.pause()"), (1, "while True: print('x' * 80)")],
                         ids=["they wait", "one prints"])
def test_hosts_that_a_stopped_launcher_has_left_say_why_they_end(run, script, count, what):
    launch = run("--hosts", hosts(count), "--lost-after", "8", "--no-bind-cores",
                 script(f"import os\nprint(os.getpid(), flush=True)\n{what}"))
    ranks = [int(line.rpartition(" ")[2]) for line in launch.read(count)]
    os.kill(launch.pid, signal.SIGSTOP)
    for pid in ranks:
        wait(pid, time.monotonic() + SECONDS)
    os.kill(launch.pid, signal.SIGCONT)
    code, _, err = launch.end()
    assert code == 128 + signal.SIGTERM, err
    assert err.count("] nothing came from the launcher for 8 s: the ranks end\n") == count, err
    assert "is lost" not in err


def test_a_job_that_is_suspended_as_a_whole_goes_on(run, script, tmp_path):
    os.mkfifo(tmp_path / "go")
    launch = run("--hosts", hosts(1), "--lost-after", "3", "--no-bind-cores",
                 script("import sys\nprint('begun', flush=True)\nprint(open(sys.argv[1]).read())"), str(tmp_path / "go"))
    assert launch.read(1)[0].endswith("begun")
    family = [launch.pid, *launch.family()]
    for number in (signal.SIGSTOP, signal.SIGCONT):
        for pid in family:
            os.kill(pid, number)
        time.sleep(5.0)
    (tmp_path / "go").write_text("goes on")
    code, out, err = launch.end()
    assert code == 0, err
    assert out.endswith("goes on\n")


def children(pid: int) -> list[int]:
    """Return the processes that `pid` has started, and theirs."""
    with open(f"/proc/{pid}/task/{pid}/children") as file:
        found = [int(each) for each in file.read().split()]
    return [*found, *(each for child in found for each in children(child))]


def kill(pid: int) -> None:
    """Kill a process, if there still is one."""
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
