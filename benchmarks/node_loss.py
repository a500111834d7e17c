"""Seconds from the loss of one of three nodes until the other two train again, from the copies in memory.

    python benchmarks/node_loss.py [--rounds 3]

Each node is an agent of its own on this machine, with one rank at stage 3 and a copy every step. `killed`: SIGKILL to the
agent, whose guardian removes its part of the copies. `frozen`: SIGSTOP to all processes of a node, as where its link is
down: connections stay open and nothing answers. Times are of this machine's clock, from the signal to what rank 0 prints.
Nodes that are started by hand lose the last, for the first has the rendezvous; hosts of one launcher lose the first.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

TRAIN = """
import os, time, torch, shoal

config = {"train_batch_size": 6, "optimizer": {"type": "AdamW"}, "zero_optimization": {"stage": 3},
          "resilience": {"vault": {"every": 1}}}
torch.manual_seed(0)
engine, _, loader, _ = shoal.initialize(model=torch.nn.Linear(64, 64), config=config,
                                        training_data=[torch.full((64,), float(index)) for index in range(6000)])
engine.load_checkpoint("nowhere")
first = engine.global_steps
for row in loader:
    engine.backward(engine(row).square().mean())
    engine.step()
    if engine.global_rank == 0 and engine.global_steps in (first + 1, 20):
        print(f"{engine.world_size} ranks from {first} step {engine.global_steps}, agent {os.getppid()}", flush=True)
    if first and engine.global_steps >= first + 5:
        break
    time.sleep(0.1)
"""
NODES = 3
RUN = [sys.executable, "-m", "shoal", "run", "--nodes", f"{NODES - 1}:{NODES}", "--no-bind-cores", "--max-restarts", "3"]


def descendants(pid: int) -> list[int]:
    """Return the processes below `pid`."""
    below: list[int] = []
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        below += [int(child), *descendants(int(child))]
    return below


def by_hand(script: Path) -> list[list[str]]:
    """Return the commands of three nodes that meet at the first of them."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    return [[*RUN, "--ranks", "1", "--rendezvous", f"127.0.0.1:{port}", "--node-rank", str(node), str(script)]
            for node in range(NODES)]


def by_launcher(script: Path) -> list[list[str]]:
    """Return the command that starts three hosts, all of which are this machine."""
    return [[*RUN, "--hosts", f"{socket.gethostname()}:0@localhost:0@127.0.0.1:0", str(script)]]


def lose(kind: str, commands: list[list[str]]) -> tuple[float, int]:
    """Train on three nodes, lose one, and return the seconds until the others have taken a step, and the steps again."""
    started = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
                                start_new_session=True) for command in commands]
    lost: list[int] = []
    try:
        stream = started[0].stdout
        assert stream is not None
        while (found := re.search(r"step 20, agent (\d+)", stream.readline())) is None:
            pass
        agent = int(found[1]) if len(commands) == 1 else started[-1].pid
        lost = [agent, *(descendants(agent) if kind == "frozen" else [])]
        began = time.monotonic()
        for pid in lost:
            os.kill(pid, signal.SIGSTOP if kind == "frozen" else signal.SIGKILL)
        found = re.search(r"(\d) ranks from (\d+) step", stream.readline())
        seconds = time.monotonic() - began
        assert found is not None
        assert int(found[1]) == NODES - 1
        for process in started:
            if process.pid != agent:
                process.wait()
        return seconds, 20 - int(found[2])
    finally:
        for pid in lost if kind == "frozen" else ():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for process in started:
            process.kill()
            process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="losses of each kind (3)")
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "train.py")
        script.write_text(TRAIN)
        for start, kind in ((start, kind) for start in (by_hand, by_launcher) for kind in ("killed", "frozen")):
            found = [lose(kind, start(script)) for _ in range(options.rounds)]
            seconds = [each for each, _ in found]
            sys.stdout.write(f"{start.__name__}, {kind}: median {statistics.median(seconds):.1f} s, {min(seconds):.1f} to "
                             f"{max(seconds):.1f}; at most {max(steps for _, steps in found)} steps again\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
