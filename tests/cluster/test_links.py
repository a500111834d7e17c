"""A link between two hosts is lost that the launcher reaches both: the job goes on with the hosts that reach each other."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from test_launchers import SHOAL, left_over, variables, wait_until_gone

TRAIN = """
import time, torch, shoal

config = {"train_batch_size": 6, "optimizer": {"type": "AdamW"}, "zero_optimization": {"stage": 2},
          "resilience": {"vault": {"every": 1}}}
torch.manual_seed(0)
engine, _, loader, _ = shoal.initialize(model=torch.nn.Linear(64, 64), config=config,
                                        training_data=[torch.full((64,), float(index)) for index in range(60000)])
engine.load_checkpoint("nowhere")
first = engine.global_steps
for row in loader:
    engine.backward(engine(row).square().mean())
    engine.step()
    if engine.global_rank == 0 and engine.global_steps in (first + 1, 20):
        print(f"{engine.world_size} ranks from {first} step {engine.global_steps}", flush=True)
    if first and engine.global_steps >= first + 5:
        break
    time.sleep(0.1)
"""


MOST = 120
"""Seconds after which a launch is ended that waits without end."""


class Training:
    """A launch from node0 of ranks on some machines."""

    def __init__(self, machines, tmp_path, hosts, *more):
        (tmp_path / "script.py").write_text(TRAIN)
        self.token = f"links-{time.monotonic_ns():x}"
        self.process = machines.popen(
            0, ["timeout", str(MOST), *SHOAL, "run", "--hosts", "@".join(f"node{host}:0" for host in hosts),
                "--max-restarts", "3", "--grace", "5", "--export", "SHOAL_TEST_TOKEN", *more, str(tmp_path / "script.py")],
            env=variables(machines, self.token), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def read(self, pattern):
        """Return the next line of output that has a pattern; fail with the errors where output ends."""
        while line := self.process.stdout.readline():
            if found := re.search(pattern, line):
                return found
        raise AssertionError(self.process.communicate(timeout=60.0)[1])

    def stop(self):
        """Signal the launch itself, which the process that entered the machine has started."""
        pid = self.process.pid
        os.kill(int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0]), signal.SIGTERM)

    def end(self):
        """Return the exit code and what was written to the error stream, once no process is left on any host."""
        _, err = self.process.communicate(timeout=60.0)
        wait_until_gone(self.token)
        return self.process.returncode, err


@pytest.mark.parametrize(("hosts", "kept"), [((0, 1, 2), 2), ((1, 2), 1)], ids=["3 hosts", "2 hosts"])
def test_a_job_goes_on_without_a_host_that_another_cannot_reach(machines, tmp_path, hosts, kept):
    training = Training(machines, tmp_path, hosts, "--nodes", f"{kept}:{len(hosts)}")
    training.read("step 20")
    began = time.monotonic()
    with machines.hosts.cut((1, 2)):
        again = training.read(r"(\d) ranks from (\d+) step")
        seconds = time.monotonic() - began
        code, err = training.end()
    sys.stdout.write(f"{len(hosts)} hosts to {kept}: {seconds:.1f} s from the cut to the next new step\n")
    assert code == 0, err
    assert (int(again[1]), int(again[2]) >= 18) == (kept, True), err
    assert (f"shoal run: node2 is lost: host node1 cannot reach host node2, though this machine reaches them; see to the "
            f"network between them; it ran rank {len(hosts) - 1}; the job goes on with {kept} host") in err


def test_a_job_that_needs_both_hosts_of_a_lost_link_ends_and_names_them(machines, tmp_path):
    training = Training(machines, tmp_path, (1, 2), "--lost-after", "6")
    training.read("step 20")
    with machines.hosts.cut((1, 2)):
        code, err = training.end()
    assert code == 1, err
    assert "shoal run: node2 is lost: host node1 cannot reach host node2, though this machine reaches them" in err


def test_a_slow_host_is_not_cut_off(machines, tmp_path):
    training = Training(machines, tmp_path, (0, 1, 2), "--nodes", "2:3")
    training.read("step 20")
    for _ in range(2):
        with machines.hosts.cut((1, 2)):
            time.sleep(3.0)
        time.sleep(1.0)
    assert left_over(training.token)
    training.stop()
    _, err = training.end()
    assert "cannot reach" not in err
