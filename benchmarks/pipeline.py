"""Measures pipelines alone: the bubble of each schedule, the cost of a step without compute, the memory of activations.

    python benchmarks/pipeline.py [--ranks 4] [--microbatches 8] [--nap 50] [--rounds 5] [--quick]

Bubble: F, I and W of a stage each sleep for `nap` milliseconds; the bubble is the fraction of a step, from its first
instruction to its last, in which a rank does not sleep, over all ranks. Overhead: one tiny layer per stage, so that a step
consists of the executor and its messages. torch's Schedule1F1B runs the same layers and the same loss in ranks of its own,
in turns with ours whose order rotates. Both split the same batch, exchange activations and gradients, and sum the gradients
of all microbatches. Two kinds of call are compared, each with the same kind: the *executor* alone, without an optimizer
(ours is internal, torch's is `schedule.step`), and a *training step* as a user writes it (`engine.train_batch`;
`schedule.step`, SGD, zero_grad). Shoal gives gloo's thread another policy in its ranks (docs/decisions, 29); "gloo yields"
is torch with that policy, which torch itself does not set. Memory: a microbatch keeps `--kept` MiB at a stage; the result
is the growth of the first rank's peak memory in a step.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from results import Outcome, Sheet, Target
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

import shoal
from shoal.pipeline.executor import Batches
from shoal.pipeline.schedules import make_schedule
from shoal.pipeline.split_backward import WeightGradTask, current_queue
from shoal.testing import run_ranks
from shoal.transport.gloo_threads import let_ranks_go_first

WIDTH = 8
SCHEDULES = {"gpipe": 1, "1f1b": 1, "interleaved": 2, "zb-h1": 1, "zb-h2": 1, "zbv": 2}
"""Stages per rank."""
IDLE = {"gpipe": 3.0, "1f1b": 3.0, "interleaved": 1.5, "zb-h1": 1.0, "zb-h2": 1.0, "zbv": 0.5}
"""The idle time of a rank in a step where only naps take time, in naps per other rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    ranks: int
    microbatches: int
    nap: float
    rounds: int
    steps: int
    kept: int
    out: Path | None


def main() -> None:
    options = _options()
    bubbles = {name: run_ranks(options.ranks, naps, name, options) for name in SCHEDULES}
    overhead = overheads(options)
    counts = (1, options.microbatches, 4 * options.microbatches)
    memory = {name: [run_ranks(2, kept, name, count, options)[0] for count in counts] for name in ("gpipe", "1f1b", "zb-h1")}
    _publish(options, bubbles, overhead, counts, memory)


# Run on the ranks


class _Nap(torch.autograd.Function):
    """Sleeps in place of compute, and adds up the time."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, seconds: float, slept: list[float]) -> Tensor:
        ctx.seconds, ctx.slept, ctx.weight, ctx.queue = seconds, slept, weight, current_queue()
        _sleep(seconds, slept)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        _sleep(ctx.seconds, ctx.slept)

        def activation() -> Tensor:
            _sleep(ctx.seconds, ctx.slept)
            return torch.zeros_like(ctx.weight)

        if ctx.queue is None:
            return gradients[0], activation(), None, None
        ctx.queue.add(WeightGradTask((ctx.weight,), torch.zeros_like(ctx.weight), 1, activation))
        return gradients[0], None, None, None


def _sleep(seconds: float, slept: list[float]) -> None:
    start = time.perf_counter()
    time.sleep(seconds)
    slept[0] += time.perf_counter() - start


class Nap(nn.Module):
    def __init__(self, seconds: float):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1, 1))
        self.seconds = seconds
        self.slept = [0.0]

    def forward(self, x: Tensor) -> Tensor:
        return _Nap.apply(x, self.weight, self.seconds, self.slept)  # pyright: ignore[reportReturnType]


class Kept(nn.Module):
    """Saves `elements` elements for backward."""

    def __init__(self, elements: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.elements = elements

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(x.mean() * self.weight + torch.zeros(self.elements)).mean()


def engine_of(layers: list[Any], ranks: int, schedule: str, microbatches: int) -> Any:
    model = shoal.PipelineModule(layers, num_stages=ranks, loss_fn=lambda out, labels: out.mean(),
                                 partition_method="uniform", schedule=schedule, stages_per_rank=SCHEDULES[schedule])
    return shoal.initialize(model=model, config={
        "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": microbatches, "timeout": 60,
        "optimizer": {"type": "SGD", "params": {"lr": 1e-3}}})[0]


def batches(count: int) -> Any:
    return iter([(torch.randn(2, WIDTH, requires_grad=True), torch.zeros(2)) for _ in range(count)])


def naps(schedule: str, options: Options) -> list[tuple[float, float]]:
    """Return, for each round, the seconds of a step and the seconds that this rank slept."""
    per = SCHEDULES[schedule]
    layers = [shoal.LayerSpec(Nap, options.nap / per) for _ in range(options.ranks * per)]
    engine = engine_of(layers, options.ranks, schedule, options.microbatches)
    plan = make_schedule(schedule, ranks=options.ranks, microbatches=options.microbatches, stages_per_rank=per)
    found: list[tuple[float, float]] = []
    for _ in range(options.rounds + 1):
        data = list(batches(options.microbatches))
        given = Batches(inputs=[x for x, _ in data], labels=[y for _, y in data])
        for layer in _naps(engine):
            layer.slept[0] = 0.0
        dist.barrier()
        start = time.perf_counter()
        engine._executor.run(plan, engine.stage_id, given, 1.0)
        dist.barrier()
        found.append((time.perf_counter() - start, sum(layer.slept[0] for layer in _naps(engine))))
        engine.optimizer.zero_grad()
    engine.destroy()
    return found[1:]


def _naps(engine: Any) -> list[Nap]:
    return [module for module in engine.module.modules() if isinstance(module, Nap)]


def tiny(system: str, options: Options) -> float:
    """Return the median seconds of a step of `system`, in ranks that run nothing else."""
    step, clear, close = TINY[system](options)
    for _ in range(options.steps):  # not counted
        _timed(step, clear)
    median = statistics.median(_timed(step, clear) for _ in range(options.steps))
    close()
    return median


Steps = tuple[Callable[[], None], Callable[[], None], Callable[[], None]]
"""A step, what clears its gradients, and what closes the system."""


def _our_steps(options: Options, *, training: bool) -> Steps:
    count = options.microbatches
    engine = engine_of([shoal.LayerSpec(nn.Linear, WIDTH, WIDTH) for _ in range(2)], 2, "1f1b", count)
    plan = make_schedule("1f1b", ranks=2, microbatches=count)
    inputs, labels = torch.randn(2 * count, WIDTH).chunk(count), torch.zeros(2 * count).chunk(count)

    def executor() -> None:
        engine._executor.run(plan, engine.stage_id, Batches(inputs=list(inputs), labels=list(labels)), engine._factor)

    def train() -> None:
        engine.train_batch(iter(list(zip(inputs, labels, strict=True))))

    return (train, _nothing, engine.destroy) if training else (executor, engine.optimizer.zero_grad, engine.destroy)


def _their_steps(options: Options, *, training: bool, yields: bool = False) -> Steps:
    """Return torch's steps; where gloo `yields`, its thread has the policy that Shoal sets in its own ranks."""
    count = options.microbatches
    stage = PipelineStage(nn.Linear(WIDTH, WIDTH), dist.get_rank(), 2, torch.device("cpu"))
    schedule = Schedule1F1B(stage, count, loss_fn=lambda out, labels: out.mean())
    inputs, labels = torch.randn(2 * count, WIDTH), torch.zeros(2 * count)
    optimizer = torch.optim.SGD(stage.submod.parameters(), lr=1e-3)
    if yields:
        let_ranks_go_first()

    def executor() -> None:
        schedule.step(*([inputs] if dist.get_rank() == 0 else []), **({"target": labels} if dist.get_rank() == 1 else {}))

    def train() -> None:
        executor()
        optimizer.step()
        optimizer.zero_grad()

    return (train, _nothing, _nothing) if training else (executor, stage.submod.zero_grad, _nothing)


TINY: dict[str, Callable[[Options], Steps]] = {
    "shoal": partial(_our_steps, training=False),
    "torch": partial(_their_steps, training=False),
    "torch, gloo yields": partial(_their_steps, training=False, yields=True),
    "shoal, training step": partial(_our_steps, training=True),
    "torch, training step": partial(_their_steps, training=True),
    "torch, training step, gloo yields": partial(_their_steps, training=True, yields=True),
}


def overheads(options: Options) -> dict[str, list[float]]:
    """Return the seconds of a step of each system by round: the systems take turns, and their order rotates."""
    found: dict[str, list[float]] = {name: [] for name in TINY}
    for number in range(options.rounds):
        shift, order = number % len(TINY), list(TINY)
        for name in (*order[shift:], *order[:shift]):
            found[name].append(run_ranks(2, tiny, name, options)[0])
    return found


def _nothing() -> None:
    """Do nothing: a training step has cleared its gradients itself, and torch's objects need no end."""


def _timed(step: Callable[[], None], clear: Callable[[], None]) -> float:
    dist.barrier()
    start = time.perf_counter()
    step()
    dist.barrier()
    seconds = time.perf_counter() - start
    clear()
    return seconds


def kept(schedule: str, count: int, options: Options) -> int:
    """Return the growth of peak memory in a step, in bytes."""
    engine = engine_of([shoal.LayerSpec(Kept, options.kept << 18) for _ in range(2)], 2, schedule, count)
    engine.train_batch(batches(count))
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before = _resident("VmRSS")
    engine.train_batch(batches(count))
    grown = _resident("VmHWM") - before
    engine.destroy()
    return grown


def _resident(what: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(what))
    return int(line.split()[1]) * 1024


# Results


def _publish(options: Options, bubbles: dict[str, list[list[tuple[float, float]]]], overhead: dict[str, list[float]],
             counts: tuple[int, ...], memory: dict[str, list[int]]) -> None:
    measured = {name: statistics.median(_bubbles(ranks)) for name, ranks in bubbles.items()}
    idle = {name: statistics.median(_idles(ranks)) for name, ranks in bubbles.items()}
    formula = (options.ranks - 1) / (options.microbatches + options.ranks - 1)
    least = {name: waits * (options.ranks - 1) for name, waits in IDLE.items()}
    rows = [(name, f"{1000 * statistics.median(step for step, _ in ranks[0]):.0f}", f"{100 * measured[name]:.1f} %",
             f"{100 * least[name] / (least[name] + 3 * options.microbatches):.1f} %", f"{idle[name] / idle['1f1b']:.3f}",
             f"{IDLE[name] / IDLE['1f1b']:.3f}") for name, ranks in bubbles.items()]
    ratios = {what: [ours / theirs for ours, theirs in zip(overhead[f"shoal{kind}"], overhead[f"torch{kind}{way}"],
                                                           strict=True)]
              for kind, name in (("", ", executor alone"), (", training step", ", training step"))
              for way, what in (("", name), (", gloo yields", f"{name}, gloo yields for both"))}
    costs = [(name, f"{1000 * statistics.median(found):.2f}", f"{1e6 * statistics.median(found) / options.microbatches:.0f}")
             for name, found in overhead.items()]
    sizes = [(name, *(f"{grown / 2**20:.0f}" for grown in found)) for name, found in memory.items()]
    Outcome(
        benchmark="pipeline", command=" ".join(["python", *sys.argv]),
        note=(f"{options.ranks} ranks, {options.microbatches} microbatches, naps of {1000 * options.nap:.0f} ms for F, I "
              f"and W, {options.rounds} rounds; 1F1B's bubble by the formula (p-1)/(m+p-1) is {100 * formula:.1f} %. "
              f"Overhead on 2 ranks, tiny layers, {options.steps} steps a round after as many. Memory on 2 ranks, "
              f"{options.kept} MiB kept by a microbatch."),
        sheets=(Sheet(title="Bubble", rows=tuple(rows), columns=("schedule", "ms a step", "bubble", "by the formula",
                                                                 "idle time, of 1F1B's", "by the formula")),
                Sheet(title="A step without compute", columns=("executor", "ms", "us a microbatch"), rows=tuple(costs)),
                Sheet(title="Growth of peak memory in a step, MiB, first rank",
                      columns=("schedule", *(f"{count} microbatches" for count in counts)), rows=tuple(sizes))),
        targets=(Target(what="1f1b: bubble over the formula", measured=measured["1f1b"] / formula, low=0.95, high=1.05),
                 Target(what="zbv: idle time over 1F1B's, at the same memory", measured=idle["zbv"] / idle["1f1b"], low=0.0,
                        high=1 / 3),
                 Target(what="zb-h1: the same, where the limit is what it takes by the formula, without any overhead",
                        measured=idle["zb-h1"] / idle["1f1b"], low=0.0, high=1 / 3),
                 *(Target.over(each, what=f"a step without compute over torch's Schedule1F1B{what}", low=0.0, high=1.0)
                   for what, each in ratios.items()),
                 *(Target(what="1f1b: memory at 4 times the microbatches", measured=more / few, low=0.0, high=1.1)
                   for few, more in [memory["1f1b"][1:3]] if few)),  # a tiny run may not raise the peak
        raw={"bubble": measured, "idle": idle, "overhead": overhead, "memory": memory}).publish(options.out)


def _bubbles(ranks: list[list[tuple[float, float]]]) -> list[float]:
    """Return the fraction of a step that is not slept, over all ranks, by round."""
    return [1 - sum(slept for _, slept in row) / sum(step for step, _ in row) for row in zip(*ranks, strict=True)]


def _idles(ranks: list[list[tuple[float, float]]]) -> list[float]:
    return [sum(step - slept for step, slept in row) for row in zip(*ranks, strict=True)]


def _options() -> Options:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4, help="pipeline ranks of the bubble measurement (4)")
    parser.add_argument("--microbatches", type=int, default=8, help="microbatches per step (8)")
    parser.add_argument("--nap", type=float, default=50, help="milliseconds of F, of I and of W (50)")
    parser.add_argument("--rounds", type=int, default=5, help="rounds of each measurement (5)")
    parser.add_argument("--steps", type=int, default=20, help="steps per round of the overhead measurement (20)")
    parser.add_argument("--kept", type=int, default=32, help="MiB that a microbatch keeps (32)")
    parser.add_argument("--quick", action="store_true", help="a small run that only checks that the script works")
    parser.add_argument("--out", type=Path, help="the JSON output file (out/benchmarks/pipeline.json)")
    given = vars(parser.parse_args())
    quick = given.pop("quick")
    options = Options(**(given | {"nap": given["nap"] / 1000}))
    return replace(options, microbatches=4, nap=0.005, rounds=1, steps=3, kept=4) if quick else options


if __name__ == "__main__":
    main()
