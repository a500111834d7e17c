"""Seconds from the loss of one of three nodes until the other two train again, from the copies in memory.

    python benchmarks/node_loss.py [--rounds 3]

Each node is an agent of its own on this machine, with one rank at stage 3 and a copy every step. `killed`: SIGKILL to the
agent, whose guardian removes its part of the copies. `frozen`: SIGSTOP to all processes of a node, as where its link is
down: connections stay open and nothing answers. Times are of this machine's clock, from the signal to what rank 0 prints.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

TRAIN = """
import time, torch, shoal

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
        print(f"{engine.world_size} ranks from {first} step {engine.global_steps}", flush=True)
    if first and engine.global_steps >= first + 5:
        break
    time.sleep(0.1)
"""
NODES = 3


def descendants(pid: int) -> list[int]:
    """Return the processes below `pid`."""
    below: list[int] = []
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        below += [int(child), *descendants(int(child))]
    return below


def lose(kind: str, script: Path) -> tuple[float, int]:
    """Train on three nodes, lose one, and return the seconds until the others have taken a step, and the steps again."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    command = [sys.executable, "-m", "shoal", "run", "--ranks", "1", "--nodes", f"{NODES - 1}:{NODES}", "--rendezvous",
               f"127.0.0.1:{port}", "--no-bind-cores", "--max-restarts", "3"]
    agents = [subprocess.Popen([*command, "--node-rank", str(node), str(script)], stdout=subprocess.PIPE,
                               stderr=subprocess.DEVNULL, text=True, start_new_session=True) for node in range(NODES)]
    lost: list[int] = []
    try:
        stream = agents[0].stdout
        assert stream is not None
        while not stream.readline().endswith("step 20\n"):
            pass
        lost = [agents[-1].pid, *(descendants(agents[-1].pid) if kind == "frozen" else [])]
        began = time.monotonic()
        for pid in lost:
            os.kill(pid, signal.SIGSTOP if kind == "frozen" else signal.SIGKILL)
        words = stream.readline().split()
        seconds = time.monotonic() - began
        assert words[:1] == [str(NODES - 1)], words
        for agent in agents[:-1]:
            agent.wait()
        return seconds, 20 - int(words[3])
    finally:
        for pid in lost if kind == "frozen" else ():
            os.kill(pid, signal.SIGKILL)
        for agent in agents:
            agent.kill()
            agent.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="losses of each kind (3)")
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "train.py")
        script.write_text(TRAIN)
        for kind in ("killed", "frozen"):
            found = [lose(kind, script) for _ in range(options.rounds)]
            seconds = [each for each, _ in found]
            sys.stdout.write(f"{kind}: median {statistics.median(seconds):.1f} s, {min(seconds):.1f} to {max(seconds):.1f}; "
                             f"at most {max(steps for _, steps in found)} steps again\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
