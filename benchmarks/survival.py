"""Costs of surviving: processor time and wall time of a step with copies in memory, with the guard, and under the watch.

    .venv/bin/python benchmarks/survival.py --ranks 4 --rounds 3

Each rank holds one engine per system. In each round all systems take their turns, in an order that rotates: as many steps as
lie between two copies, and the end of the copy that they began. Processor time is that of the whole process, its threads
included; a ratio is taken within a round. What a shared machine does between two turns is more than a copy costs: so a copy
is also timed while nothing else runs. The watch costs less still: the writes of a step are counted, and each is timed by
itself, as is a look of the agent.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from machine import BEFORE, ROOT
from results import Outcome, Sheet, Target, quartiles
from workloads import SEED, workload

import shoal
from shoal.engine.checkpointer import Checkpointer
from shoal.engine.training_objects import TrainingObjects
from shoal.launch.watching import LOOK
from shoal.recording.page import RankPage, TrainingPhase
from shoal.resilience.watch import Watch

SYSTEMS = {"no copies": {}, "copies": {"vault": True}, "copies and guard": {"vault": True, "guard": True}}
COPIES = 3
"""Copies that are timed by themselves."""
REPEATS = 20_000
"""Calls over which one write to the page is timed."""


def main() -> int:
    """Start the ranks, or be one of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--every", type=int, default=10, help="steps between two copies, and of a turn")
    parser.add_argument("--stage", type=int, default=2)
    parser.add_argument("--workload", default="30m")
    parser.add_argument("--microbatch", type=int, default=2)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.result is not None:
        measure(options)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        subprocess.run([sys.executable, "-m", "shoal", "run", "--ranks", str(options.ranks), "--watch", "off", "--no-spares",
                        __file__, *sys.argv[1:], "--result", str(result)], cwd=ROOT, check=True,
                       env={**os.environ, "OMP_NUM_THREADS": "1"})
        return report(options, json.loads(result.read_text()))


def measure(options: argparse.Namespace) -> None:
    """Take the turns of one rank; rank 0 writes the results of all."""
    torch.set_num_threads(1)
    steps = {name: build(options, settings) for name, settings in SYSTEMS.items()}
    for take, _ in steps.values():
        take()
    waits = {name: checkpointer.wait_for_copy for name, (_, checkpointer) in steps.items()}
    turns: list[dict[str, tuple[float, float]]] = []
    for number in range(options.rounds):
        names = list(steps)
        order = names[number % len(names):] + names[:number % len(names)]
        turns.append({name: turn(steps[name][0], waits[name], count=options.every) for name in order})
    found: list[Any] = [None] * dist.get_world_size()
    copy = copy_seconds(*steps["copies"])
    dist.all_gather_object(found, {"turns": turns, "page": page_seconds(steps["no copies"][0]), "look": look_seconds(),
                                   "copy": copy})
    if dist.get_rank() == 0:
        options.result.write_text(json.dumps(found))


def build(options: argparse.Namespace, settings: dict[str, bool]) -> tuple[Callable[[], None], Checkpointer]:
    """Build the engine of a system; return what takes a step, and what copies."""
    task = workload(options.workload, microbatch=options.microbatch, length=options.length)
    torch.manual_seed(SEED)
    resilience = {"vault": {"every": options.every if settings.get("vault") else None},
                  "guard": {"enabled": settings.get("guard", False)}}
    engine, *_ = shoal.initialize(model=task.build(), config={
        "train_micro_batch_size_per_gpu": options.microbatch, "zero_optimization": {"stage": options.stage},
        "optimizer": {"type": "AdamW"}, "resilience": resilience})

    def step() -> None:
        inputs, targets = task.batch(engine.global_steps, engine.global_rank)
        engine.backward(task.loss(engine(inputs), targets))
        engine.step()

    return step, engine.checkpointer


def turn(step: Callable[[], None], wait: Callable[[], None], *, count: int) -> tuple[float, float]:
    """Take `count` steps; return the processor and the wall seconds of one, with its part of the copy."""
    dist.barrier()
    began, used = time.perf_counter(), time.process_time()
    for _ in range(count):
        step()
    wait()
    dist.barrier()
    return (time.process_time() - used) / count, (time.perf_counter() - began) / count


def copy_seconds(step: Callable[[], None], checkpointer: Checkpointer) -> float:
    """Return the processor seconds of one copy while ranks do nothing else, the median of `COPIES`."""
    copy, found = checkpointer.copy_to_memory, list[float]()

    def timed(training: TrainingObjects) -> None:
        dist.barrier()
        used = time.process_time()
        copy(training)
        checkpointer.wait_for_copy()
        found.append(time.process_time() - used)
        dist.barrier()

    with patch.object(checkpointer, "copy_to_memory", timed):
        while len(found) < COPIES:
            step()
    return statistics.median(found)


def page_seconds(step: Callable[[], None]) -> float:
    """Return the processor seconds of a step that are writes to the page: their number, and the time of each."""
    counts = Counter[str]()

    def counted(name: str) -> Callable[..., None]:
        def call(*args: Any, **kwargs: Any) -> None:
            counts[name] += 1
        return call

    with patch.multiple(RankPage, **{name: counted(name) for name in ("enter", "begin_wait", "end_wait")}):
        step()
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        page = RankPage()
        page.attach(folder, 0)
        calls: dict[str, Callable[[], None]] = {
            "enter": lambda: page.enter(TrainingPhase.STEP, 1), "begin_wait": lambda: page.begin_wait("a reduction", 1),
            "end_wait": lambda: page.end_wait(0)}
        return sum(counts[name] * seconds_of(call) for name, call in calls.items())


def look_seconds() -> float:
    """Return the processor seconds of one look of the agent at one rank."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        watch = Watch(folder, whole_job=True)
        RankPage().attach(folder, 0)
        return seconds_of(lambda: watch.poll({0: os.getpid()}), REPEATS // 100)


def seconds_of(call: Callable[[], object], repeats: int = REPEATS) -> float:
    """Return the processor seconds of one call."""
    used = time.process_time()
    for _ in range(repeats):
        call()
    return (time.process_time() - used) / repeats


def report(options: argparse.Namespace, ranks: list[dict[str, Any]]) -> int:
    """Print and keep the tables; return 0."""
    def values(name: str, kind: int) -> list[float]:
        return [statistics.mean(rank["turns"][number][name][kind] for rank in ranks) for number in range(options.rounds)]

    def ratios(name: str, kind: int) -> list[float]:
        return [100 * (mine / base - 1) for mine, base in zip(values(name, kind), values("no copies", kind), strict=True)]

    def spread(found: list[float]) -> str:
        low, middle, high = quartiles(found)
        return f"{middle:+.1f} ({low:+.1f} to {high:+.1f}) %"

    rows = [(name, f"{statistics.median(values(name, 0)):.3f}", f"{statistics.median(values(name, 1)):.3f}",
             *((spread(ratios(name, 0)), spread(ratios(name, 1))) if name != "no copies" else ("", "")))
            for name in SYSTEMS]
    cpu, wall = statistics.median(values("no copies", 0)), statistics.median(values("no copies", 1))
    page, look = statistics.mean(rank["page"] for rank in ranks), statistics.mean(rank["look"] for rank in ranks)
    sheet = Sheet(title="A step, seconds of a rank", rows=tuple(rows),
                  columns=("system", "processor", "wall", "more processor", "more wall"))
    copies = [100 * rank["copy"] / (options.every * cpu) for rank in ranks]
    watched = 100 * (page + look * wall / LOOK) / cpu
    targets = (Target(what=f"copies each {options.every} steps, of a step's processor time", high=2, unit=" %",
                      measured=statistics.mean(copies), spread=(min(copies), max(copies))),
               Target(what="the watch, of a step's processor time", measured=watched, high=0.2, unit=" %"))
    note = (f"GPT {options.workload}, {options.ranks} ranks, stage {options.stage}, microbatch {options.microbatch} x "
            f"{options.length}, {options.rounds} rounds. A copy by itself takes "
            f"{1e3 * statistics.mean(rank['copy'] for rank in ranks):.0f} ms of a rank's processor. Writes to the page take "
            f"{1e6 * page:.0f} us of a step, and a look of the agent {1e6 * look:.0f} us a rank, {1 / LOOK:g} times a "
            f"second. Load {BEFORE:.1f} before, {os.getloadavg()[0]:.1f} after on {os.cpu_count()} processors")
    Outcome(benchmark="survival", command=" ".join(["python", *sys.argv]), note=note, sheets=(sheet,), targets=targets,
            raw={"options": {name: str(value) for name, value in vars(options).items()}, "ranks": ranks}).publish(None)
    return 0


if __name__ == "__main__":
    sys.exit(main())
