"""A small MLP cut over two ranks, forward and backward: our column and row layers beside DTensor's.

    python benchmarks/tensor_parallel.py [--hidden 64 512] [--rows 128] [--rounds 30] [--steps 20]

Linear(h, 4 h), GELU, Linear(4 h, h), with biases and a gradient for the input, fp32, gloo, one thread a rank. Both ways and
the whole MLP on every rank live in the same processes and take turns, in an order that rotates; a step takes as long as its
slowest rank. Ratios are taken within a round, and the median over rounds is reported.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from results import Outcome, Sheet, Target, quartiles
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from shoal.tensor_parallel import Column, Plan, Row, parallelize
from shoal.testing import run_ranks

OURS, THEIRS, WHOLE = "shoal", "DTensor", "whole on every rank"
Times = dict[str, list[list[float]]]
"""Seconds by way, round and step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """The task of every compared implementation."""

    hidden: int
    rows: int
    rounds: int
    steps: int


def main() -> None:
    options = _options()
    os.environ.setdefault("SHOAL_TEST_TIMEOUT", "3600")
    found: dict[int, Times] = {}
    for hidden in options.hidden:
        work = Work(hidden=hidden, rows=options.rows, rounds=options.rounds, steps=options.steps)
        found[hidden] = _slowest(run_ranks(2, measure, work))
    columns = ("hidden", "way", "median ms", "best ms", "x shoal", "quartiles")
    rows = tuple(_row(hidden, way, times) for hidden, times in found.items() for way in times)
    least = {64: 3.0, 512: 1.0}
    targets = tuple(Target.over(_ratios(found[hidden], THEIRS), low=low,
                                what=f"hidden {hidden}: times faster than DTensor's")
                    for hidden, low in least.items() if hidden in found)
    note = (f"2 gloo ranks, one thread each, {options.rows} rows, {options.rounds} rounds of {options.steps} steps after "
            "one that is not counted. The whole MLP does twice a rank's arithmetic, and sends nothing.")
    Outcome(benchmark="tensor_parallel", command=" ".join(["python", *sys.argv]), note=note, targets=targets, raw=found,
            sheets=(Sheet(title="A step of an MLP cut over two ranks", columns=columns, rows=rows),)).publish(options.out)


def measure(work: Work) -> Times:
    """Return the seconds of this rank's steps."""
    ways = _ways(work.hidden)
    x = torch.randn(work.rows, work.hidden, requires_grad=True)
    times: Times = {name: [] for name in ways}
    names = list(ways)
    for number in range(work.rounds + 1):
        shift = number % len(names)
        for name in [*names[shift:], *names[:shift]]:
            _together()
            steps = [_step(ways[name], x) for _ in range(work.steps + 1)]
            if number:  # the first round finds cold caches, and so does the first step of a turn
                times[name].append(steps[1:])
    return times


def _ways(hidden: int) -> dict[str, nn.Module]:
    group = dist.group.WORLD
    assert group is not None
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return {OURS: parallelize(_mlp(hidden), group, Plan({"up": Column(), "down": Row()})),
            THEIRS: parallelize_module(_mlp(hidden), mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()}),
            WHOLE: _mlp(hidden)}


def _mlp(hidden: int) -> nn.Module:
    torch.manual_seed(0)
    mlp = nn.Sequential()
    for name, layer in (("up", nn.Linear(hidden, 4 * hidden)), ("act", nn.GELU()), ("down", nn.Linear(4 * hidden, hidden))):
        mlp.add_module(name, layer)
    return mlp


def _step(mlp: nn.Module, x: Tensor) -> float:
    mlp.zero_grad(set_to_none=True)
    x.grad = None
    start = time.perf_counter()
    mlp(x).sum().backward()
    return time.perf_counter() - start


def _together() -> None:
    dist.barrier()


def _slowest(ranks: list[Times]) -> Times:
    return {way: [[max(step) for step in zip(*rounds, strict=True)] for rounds in
                  zip(*(times[way] for times in ranks), strict=True)] for way in ranks[0]}


def _ratios(times: Times, way: str) -> list[float]:
    """Return the seconds of a way in units of ours, round by round."""
    return [statistics.median(other) / statistics.median(mine) for other, mine in zip(times[way], times[OURS], strict=True)]


def _row(hidden: int, way: str, times: Times) -> tuple[str, ...]:
    steps = [step for steps in times[way] for step in steps]
    ratios = _ratios(times, way)
    low, middle, high = quartiles(ratios)
    return (str(hidden), way, f"{1e3 * statistics.median(steps):.2f}", f"{1e3 * min(steps):.2f}", f"{middle:.2f}",
            f"{low:.2f} to {high:.2f}")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, nargs="+", default=(64, 512), help="widths of the MLP (64 512)")
    parser.add_argument("--rows", type=int, default=128, help="rows of the input (128)")
    parser.add_argument("--rounds", type=int, default=30, help="turns of each way (30)")
    parser.add_argument("--steps", type=int, default=20, help="counted steps in a turn (20)")
    parser.add_argument("--out", type=Path, help="where the JSON goes (out/benchmarks/tensor_parallel.json)")
    return parser.parse_args()


if __name__ == "__main__":
    main()
