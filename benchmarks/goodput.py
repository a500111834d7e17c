"""Goodput under faults: the share of the time that goes into steps which count, of Shoal and of torchrun with DCP.

    .venv/bin/python benchmarks/goodput.py --minutes 10 --rates 1 2

Ranks train the GPT of 30 M. At a steady rate, in faults a minute, one of them gets SIGKILL. Shoal goes on from its copies in
memory. The peer is DDP under torchrun: it saves the model and AdamW by DCP's async_save into a folder in memory, and loads
the newest one that is complete. Both keep two. Goodput is the number of steps that count, times the time of a step, over the
time from the first step to the end. Steps taken again do not count. The time of a step is the mean of the medians of two
runs of the same system without faults or copies, before and after: the speed of a shared machine drifts.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from machine import ROOT
from torch.nn.parallel import DistributedDataParallel
from workloads import SEED, workload

import shoal

SYSTEMS = ("shoal", "torchrun")
ENVIRONMENT: dict[str, dict[str, str]] = {"shoal": {}, "torchrun": {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}}
"""Variables of a launch. From the store that torchrun shares with its ranks, those of a restart read the addresses of ranks
that are gone, and wait for 30 minutes (https://github.com/pytorch/pytorch/issues/135712)."""
ASKED = {1.0: 0.88, 2.0: 0.80}
"""The goodput that Shoal must reach, by faults a minute."""
MICROBATCH, LENGTH = 2, 128
PLAIN_STEPS = 25
"""Steps of the run without faults, of which the first five do not count."""
START = 120.0
"""Seconds within which a job must take its first step."""


def main() -> int:
    """Run the jobs, or be a rank of one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0, help="of each run with faults (10)")
    parser.add_argument("--rates", type=float, nargs="+", default=[1.0, 2.0], help="faults a minute (1 2)")
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS))
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--workload", default="30m")
    parser.add_argument("--every", type=int, default=5, help="steps between two copies of Shoal (5)")
    parser.add_argument("--peer-every", type=int, default=5, help="steps between two saves of the peer (5)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, help="where the JSON goes (out/benchmarks/goodput.json)")
    parser.add_argument("--train", choices=SYSTEMS, help=argparse.SUPPRESS)
    parser.add_argument("--steps", type=int, default=1 << 30, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.train is not None:
        train(options)
        return 0
    found: dict[tuple[str, float], dict[str, float]] = {}
    for rate in options.rates:
        for system in options.systems:
            found[system, rate] = row = measure(options, system, rate)
            print(f"{system}, {rate:g} faults a minute: goodput {row['goodput']:.1%}, {row['steps']:.0f} steps in "
                  f"{row['seconds']:.0f} s, {row['faults']:.0f} faults, a step takes {row['step']:.2f} s", flush=True)
    return report(options, found)


# One rank


def train(options: argparse.Namespace) -> None:
    """Train to the last step, from what an earlier attempt left; rank 0 notes the time of each step."""
    torch.set_num_threads(1)
    task = workload(options.workload, microbatch=MICROBATCH, length=LENGTH)
    torch.manual_seed(SEED)
    begin = shoal_steps if options.train == "shoal" else peer_steps
    step, rank = begin(options, task)
    (options.folder / f"pid{rank}").write_text(str(os.getpid()))
    notes = os.open(options.folder / "steps", os.O_CREAT | os.O_APPEND | os.O_WRONLY)
    done = 0
    while done < options.steps:
        done = step()
        if rank == 0:
            os.write(notes, f"{time.monotonic()} {done}\n".encode())


def shoal_steps(options: argparse.Namespace, task: Any) -> tuple[Callable[[], int], int]:
    """Return what takes a step of Shoal's and gives its number, and the rank."""
    engine, *_ = shoal.initialize(model=task.build(), config={
        "train_micro_batch_size_per_gpu": MICROBATCH, "zero_optimization": {"stage": 2}, "optimizer": {"type": "AdamW"},
        "resilience": {"vault": {"every": options.every if options.steps > PLAIN_STEPS else None}}})
    engine.load_checkpoint(options.folder / "none")

    def step() -> int:
        inputs, targets = task.batch(engine.global_steps, engine.global_rank)
        engine.backward(task.loss(engine(inputs), targets))
        engine.step()
        return engine.global_steps

    return step, engine.global_rank


def peer_steps(options: argparse.Namespace, task: Any) -> tuple[Callable[[], int], int]:
    """Return what takes a step of DDP's and gives its number, and the rank."""
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
    from torch.distributed.checkpoint.state_dict_loader import load
    from torch.distributed.checkpoint.state_dict_saver import async_save

    dist.init_process_group("gloo")
    savers = dist.new_group(backend="gloo")  # its thread beside the reductions of the same group waits for ever
    rank, done, saving = dist.get_rank(), 0, None
    model = DistributedDataParallel(task.build(), gradient_as_bucket_view=True, static_graph=True)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    if complete := sorted(options.folder.glob("step[0-9]*/.metadata")):
        folder = complete[-1].parent
        weights, state = get_state_dict(model, optimizer)
        load({"model": weights, "optimizer": state}, checkpoint_id=folder)
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)
        done = int(folder.name.removeprefix("step"))

    def step() -> int:
        nonlocal done, saving
        inputs, targets = task.batch(done, rank)
        task.loss(model(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
        done += 1
        if options.steps > PLAIN_STEPS and done % options.peer_every == 0:
            if saving is not None:
                saving.result()
                old = sorted(options.folder.glob("step[0-9]*"))[:-2] if rank == 0 else ()
                for folder in old:
                    shutil.rmtree(folder, ignore_errors=True)
            weights, state = get_state_dict(model, optimizer)
            saving = async_save({"model": weights, "optimizer": state}, process_group=savers,
                                checkpoint_id=options.folder / f"step{done:09}")
        return done

    return step, rank


# All jobs


def start(options: argparse.Namespace, system: str, folder: Path, steps: int | None) -> subprocess.Popen[bytes]:
    """Start a job of `steps` steps without copies, or with None one without an end."""
    launcher = {"shoal": [sys.executable, "-m", "shoal", "run", "--ranks", str(options.ranks), "--grace", "2"],
                "torchrun": [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node",
                             str(options.ranks), "--monitor-interval", "0.1"]}[system]
    words = [*launcher, "--max-restarts", "10000", str(Path(__file__)), "--train", system, "--folder", str(folder),
             "--workload", options.workload, "--every", str(options.every), "--peer-every", str(options.peer_every)]
    return subprocess.Popen([*words, *([] if steps is None else ["--steps", str(steps)])], cwd=ROOT, start_new_session=True,
                            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                            env={**os.environ, "OMP_NUM_THREADS": "1", **ENVIRONMENT[system]})


def notes(folder: Path) -> list[tuple[float, int]]:
    """Return when rank 0 had taken each step."""
    lines = (folder / "steps").read_text().splitlines() if (folder / "steps").exists() else []
    return [(float(moment), int(step)) for moment, step in (line.split() for line in lines)]


def measure(options: argparse.Namespace, system: str, rate: float) -> dict[str, float]:
    """Run a job without faults or copies, then one with them; return its goodput and what it is made of."""
    folder = Path(tempfile.mkdtemp(prefix="shoal-goodput-", dir="/dev/shm"))
    try:
        before = undisturbed(options, system, folder / "before")
        found = disturb(options, system, rate, folder)
        after = undisturbed(options, system, folder / "after")
        step = (before + after) / 2
        return {**found, "goodput": found["steps"] * step / found["seconds"], "step": step, "before": before, "after": after}
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def undisturbed(options: argparse.Namespace, system: str, folder: Path) -> float:
    """Run a job without faults or copies; return the median time of a step in seconds."""
    folder.mkdir()
    start(options, system, folder, PLAIN_STEPS).wait()
    moments = [moment for moment, _ in notes(folder)]
    return statistics.median(after - before for before, after in pairwise(moments[5:]))


def disturb(options: argparse.Namespace, system: str, rate: float, folder: Path) -> dict[str, float]:
    """Run a job, and kill a rank at the rate."""
    chance, faults = random.Random(options.seed), 0
    job = start(options, system, folder, None)
    try:
        deadline = time.monotonic() + START
        while not notes(folder):
            assert time.monotonic() < deadline, f"{system} has not taken a step within {START:g} s"
            time.sleep(0.1)
        began = notes(folder)[0][0]
        end = began + options.minutes * 60
        while time.monotonic() < end:
            assert job.poll() is None, f"{system} ended with {job.poll()}"
            if time.monotonic() >= began + (faults + 1) * 60 / rate:
                victim = int((folder / f"pid{chance.randrange(options.ranks)}").read_text())
                with suppress(ProcessLookupError):  # it starts again just now
                    os.kill(victim, signal.SIGKILL)
                faults += 1
            time.sleep(0.02)
        over = time.monotonic()
    finally:
        os.killpg(job.pid, signal.SIGTERM)
        job.wait()
    found = [each for each in notes(folder) if each[0] <= over]
    steps = found[-1][1] - found[0][1]
    return {"steps": steps, "seconds": over - began, "faults": faults, "again": len(found) - 1 - steps}


def report(options: argparse.Namespace, found: dict[tuple[str, float], dict[str, float]]) -> int:
    """Print and keep the table."""
    from results import Outcome, Sheet, Target  # a rank needs none of it, and starts again often

    rows = [(system, f"{rate:g}", f"{row['faults']:.0f}", f"{row['before']:.3f}, {row['after']:.3f}", f"{row['steps']:.0f}",
             f"{row['again']:.0f}", f"{row['goodput']:.1%}") for (system, rate), row in found.items()]
    sheet = Sheet(title=f"Goodput over {options.minutes:g} minutes", rows=tuple(rows),
                  columns=("system", "faults a minute", "faults", "s a step, before and after", "steps that count",
                           "taken again", "goodput"))
    targets = [Target(what=f"goodput at {rate:g} faults a minute", measured=row["goodput"], low=ASKED[rate],
                      high=float("inf")) for (system, rate), row in found.items() if system == "shoal" and rate in ASKED]
    note = (f"{options.ranks} ranks, {options.workload}, microbatch {MICROBATCH} x {LENGTH}; copies every {options.every} "
            f"steps, the peer's saves every {options.peer_every}; load {os.getloadavg()[0]:.1f} on {os.cpu_count()} "
            f"processors at the end")
    Outcome(benchmark="goodput", command=" ".join(["python", *sys.argv]), note=note, sheets=(sheet,), targets=tuple(targets),
            raw={f"{system} {rate:g}": row for (system, rate), row in found.items()}).publish(options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
