"""A lost node takes its agent and its copies in memory with it; the training goes on from the copies that others keep."""

from __future__ import annotations

import argparse
import os
import re
import signal
import socket
import time

import pytest

from shoal.errors import LaunchError
from shoal.launch import doctor
from shoal.launch.addresses import facing, own_addresses
from shoal.launch.rendezvous import multi_node_rendezvous

TRAIN = """
import os, sys, time, torch, shoal

config = {"train_batch_size": 4, "optimizer": {"type": "AdamW"}, "zero_optimization": {"stage": 3}, "timeout": 30,
          "resilience": {"vault": {"every": 1}}}
torch.manual_seed(0)
engine, _, loader, _ = shoal.initialize(model=torch.nn.Linear(4, 4), config=config,
                                        training_data=[torch.full((4,), float(index)) for index in range(400)])
engine.load_checkpoint("nowhere")
first = engine.global_steps
print(f"{engine.global_rank} of {engine.world_size} from {first}", flush=True)
for row in loader:
    engine.backward(engine(row).square().mean())
    engine.step()
    if engine.global_steps == 3 and first == 0:
        print(f"{engine.global_rank} is at 3", flush=True)
    if first == 0:
        time.sleep(0.2)
    elif engine.global_steps == first + 5:
        break
"""


@pytest.mark.parametrize(("nodes", "loss"), [("2", signal.SIGKILL), ("1:2", signal.SIGKILL), ("1:2", signal.SIGSTOP)],
                         ids=["killed and replaced", "killed", "frozen"])
def test_a_training_survives_the_loss_of_a_node(run, script, free_port, nodes, loss):
    path = script(TRAIN)
    command = ("--ranks", "1", "--nodes", nodes, "--rendezvous", f"127.0.0.1:{free_port}", "--no-bind-cores",
               "--max-restarts", "5", path)
    first, lost = run("--node-rank", "0", *command), run("--node-rank", "1", *command)
    assert sorted(first.read(1) + lost.read(1)) == ["0 of 2 from 0", "1 of 2 from 0"]
    assert {line.partition(" ")[2] for line in first.read(1) + lost.read(1)} == {"is at 3"}
    if loss == signal.SIGKILL:
        os.kill(lost.pid, loss)
        lost.wait_until_gone()  # its guardian removes its part of the copies, which one host alone would keep
    else:  # as where its link is down: connections stay open, and no message is answered
        for pid in (lost.pid, *lost.family()):
            os.kill(pid, loss)
    others = [run("--node-rank", "1", *command)] if nodes == "2" else []
    try:
        ends = [each.end() for each in (first, *others)]
    finally:
        if loss == signal.SIGSTOP:
            os.kill(lost.pid, signal.SIGKILL)
    assert [code for code, _, _ in ends] == [0] * len(ends), ends
    begun = sorted(out.splitlines()[-1] for _, out, _ in ends)
    assert [line.partition(" from ")[0] for line in begun] == [f"{rank} of {len(ends)}" for rank in range(len(ends))]
    assert all(int(line.partition(" from ")[2]) >= 1 for line in begun), ends  # loaded from memory, of which half was lost
    assert loss == signal.SIGKILL or "ended because node 1 has sent no heartbeat for" in ends[0][2], ends


def test_a_port_of_the_rendezvous_that_is_taken_is_named_with_the_remedy(run, script):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        where = f"127.0.0.1:{taken.getsockname()[1]}"
        code, _, err = run("--ranks", "1", "--rendezvous", where, "--node-rank", "0", script("")).end()
    assert code == 2
    assert err.startswith(f"shoal run: --rendezvous: the port of {where} cannot be opened on {socket.gethostname()}: ")
    assert err.endswith("address already in use; choose another, the same on each node\n")


def test_a_node_that_comes_later_has_all_start_again_from_the_copies(run, script, free_port):
    command = ("--ranks", "1", "--nodes", "1:2", "--rendezvous", f"127.0.0.1:{free_port}", "--no-bind-cores",
               "--max-restarts", "1", script(TRAIN.replace("range(400)", "range(400000)")))
    first = run("--node-rank", "0", *command)
    assert first.read(2) == ["0 of 1 from 0", "0 is at 3"]
    later = run("--node-rank", "1", *command)
    (code, out, err), (later_code, later_out, later_err) = first.end(), later.end()
    assert (code, later_code) == (0, 0), (err, later_err)
    begun = [re.fullmatch(r"(\d) of 2 from (\d+)\n", text) for text in (out, later_out)]
    assert [found and found[1] for found in begun] == ["0", "1"], (out, later_out)
    assert all(found and int(found[2]) >= 3 for found in begun)
    assert "a node has come, or starts its ranks again: so do all others" in err


FAILS = """
import os, shoal, torch
shoal.init_distributed()
if os.environ["RANK"] == "1":
    raise ValueError("no such herring")
torch.distributed.barrier()
"""


def test_each_node_leaves_the_report_of_its_ranks(run, script, free_port, tmp_path, capsys):
    (tmp_path / "failure.node7.txt").write_text("of an earlier job")
    command = ("--ranks", "1", "--nodes", "2", "--rendezvous", f"127.0.0.1:{free_port}", "--no-bind-cores", "--log-dir",
               str(tmp_path), script(FAILS))
    launches = [run("--node-rank", str(node), *command) for node in range(2)]
    assert [launch.end()[0] for launch in launches] == [1, 1]
    left = {path.name: path.read_text() for path in tmp_path.glob("failure*.txt")}
    assert left.keys() == {"failure.node0.txt", "failure.node1.txt"}
    (found,) = [text for text in left.values() if "rank 1 of 2 failed: ValueError: no such herring" in text]
    assert doctor.main(doctor_arguments(tmp_path)) == 0
    assert found in capsys.readouterr().out


@pytest.mark.parametrize("failing", ["1", "0"])
def test_a_node_whose_ranks_end_well_does_not_wait_for_one_that_failed(run, script, free_port, tmp_path, failing):
    path = script(f"import os\nassert os.environ['RANK'] != {failing!r}")
    command = ("--ranks", "1", "--nodes", "2", "--rendezvous", f"127.0.0.1:{free_port}", "--no-bind-cores", path)
    launches = [run("--node-rank", str(node), *command) for node in range(2)]
    ended = [launch.end() for launch in launches]
    assert sorted(code for code, _, _ in ended) == [0, 1], ended
    assert sum("AssertionError" in err for _, _, err in ended) == 1, ended


ENDS_LATER = """
import sys, time
print("begins", flush=True)
time.sleep(float(sys.argv[1]))
"""


def test_the_node_with_the_store_leaves_last(run, script, free_port):
    command = ("--ranks", "1", "--nodes", "2", "--rendezvous", f"127.0.0.1:{free_port}", "--no-bind-cores")
    first, second = (run("--node-rank", node, *command, script(ENDS_LATER), seconds) for node, seconds in ("02", "10"))
    assert first.read(1) + second.read(1) == ["begins"] * 2
    time.sleep(1)
    os.kill(second.pid, signal.SIGSTOP)
    try:
        time.sleep(2)
    finally:
        os.kill(second.pid, signal.SIGCONT)
    for code, _, err in (first.end(), second.end()):
        assert code == 0
        assert "c10d" not in err, "a call into a store that is gone"


def doctor_arguments(target):
    """Return the arguments of `shoal doctor TARGET`."""
    parser = argparse.ArgumentParser()
    doctor.add_arguments(parser)
    return parser.parse_args([str(target)])


def test_a_node_is_reached_at_the_address_that_faces_the_rendezvous():
    assert facing("localhost") == ("127.0.0.1", True)
    assert facing("127.0.0.1") == ("127.0.0.1", True)
    own = own_addresses()[0]
    assert facing(own) == (own, True)
    assert facing(socket.gethostname())[1], "whatever address /etc/hosts gives the name"


def test_a_rendezvous_whose_name_does_not_resolve_is_named_in_one_line():
    with pytest.raises(LaunchError, match=r"^--rendezvous no-such-host.invalid:29400: \S+ cannot reach "
                                          r"no-such-host.invalid: [^\n]+; give an address of the node that hosts it$"):
        multi_node_rendezvous("no-such-host.invalid:29400", "job", (2, 2), None)
