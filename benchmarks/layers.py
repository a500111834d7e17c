"""The cost of sharding per layer: a chain of 200 small layers, at stage 3 and under FSDP2, over the same chain alone.

    python benchmarks/layers.py [--ranks 1 4] [--rounds 12] [--steps 6]

The overhead of a layer is (step of the sharded chain - step of the plain chain) / 200, by round; the plain chain trains
in as many processes at a time, without communication.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from dataclasses import asdict
from pathlib import Path

from catalogue import SYSTEMS
from interleave import Plan, Result, measure
from progress import progress
from results import Outcome, Sheet, Target
from workloads import LAYERS

PLAIN, PEER, OURS = "plain", "fsdp2", "shoal-3"


def main() -> None:
    options = _options()
    measured: dict[int, list[Result]] = {}
    for ranks in options.ranks:
        plan = Plan(workload="layers", ranks=ranks, rounds=options.rounds, steps=options.steps, warm=options.steps)
        with progress() as tell:
            measured[ranks] = measure((PLAIN, PEER, OURS), plan, peers=(), tell=tell)
    rows = tuple(_row(result, results[0], ranks) for ranks, results in measured.items() for result in results)
    targets = tuple(Target(what=f"{ranks} rank(s): overhead of a layer at stage 3 over FSDP2's", high=2.0,
                           measured=_overhead(results[2], results[0]) / _overhead(results[1], results[0]))
                    for ranks, results in measured.items() if not any(result.failure for result in results))
    failures = [f"{result.name} at {ranks} rank(s): {result.failure}." for ranks, results in measured.items()
                for result in results if result.failure]
    note = (f"{LAYERS} blocks of Linear(64, 64) and ReLU, 16 rows, fp32, fused AdamW, one thread a rank. "
            f"{options.rounds} rounds of {options.steps} steps, the first step of each round not counted.")
    columns = ("system", "ranks", "median ms", "best ms", "over plain, us a layer", "sent, Psi")
    Outcome(benchmark="layers", command=" ".join(["python", *sys.argv]), note=" ".join([note, *failures]),
            sheets=(Sheet(title="Overhead per layer", columns=columns, rows=rows),), targets=targets,
            raw={ranks: [asdict(result) for result in results] for ranks, results in measured.items()}
            ).publish(options.out)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=(1, 4), help="numbers of processes (1 4)")
    parser.add_argument("--rounds", type=int, default=12, help="turns of each system (12)")
    parser.add_argument("--steps", type=int, default=20, help="steps in a turn, the first of which is not counted (20)")
    parser.add_argument("--out", type=Path, help="where the JSON goes (out/benchmarks/layers.json)")
    return parser.parse_args()


def _row(result: Result, plain: Result, ranks: int) -> tuple[str, ...]:
    if result.failure or plain.failure:
        return SYSTEMS[result.name].title, str(ranks), *["-"] * 4
    return (SYSTEMS[result.name].title, str(ranks), f"{1e3 * statistics.median(result.medians):.1f}",
            f"{1e3 * result.best:.1f}", f"{1e6 * _overhead(result, plain):.0f}" if result is not plain else "",
            f"{result.psi(ranks):.3f}")


def _overhead(result: Result, plain: Result) -> float:
    """Return the seconds that sharding adds to a layer: the median over rounds."""
    return statistics.median(mine - alone for mine, alone in zip(result.medians, plain.medians, strict=True)) / LAYERS


if __name__ == "__main__":
    main()
