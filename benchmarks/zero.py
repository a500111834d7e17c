"""Time, bytes and memory of a training step: this library at every stage beside DDP, FSDP2 and DeepSpeed.

    python benchmarks/zero.py [--ranks 2] [--rounds 12] [--steps 6] [--systems ddp shoal-1 ...] [--model 30m]

A GPT in fp32, one thread a rank, gloo over loopback, AdamW, no gradient clipping. benchmarks/README.md says what the
columns mean.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from catalogue import BASELINE, COMPRESSED, FROM_THE_START, LOOKUPS, SYSTEMS
from interleave import PARAMETER, PROCESS, Plan, Result, measure
from machine import available
from outcome import Outcome, Sheet, Target
from progress import progress
from workloads import parameters

ALONE = "plain"  # no communication: the floor of every stage 0; each rank trains a model of its own
SLOW = ("ddp-fp16", "shoal-lamb-1", *(name for name, system in SYSTEMS.items() if system.whole), *LOOKUPS, *COMPRESSED,
        *FROM_THE_START)
"""Systems of benchmarks with hosts: slow_network.py, sparse.py and communication.py."""
CHOICES = tuple(name for name in SYSTEMS if name not in (ALONE, *SLOW))
MEBI = 1 << 20


def main() -> None:
    options = _options()
    plan = Plan(workload=options.model, ranks=options.ranks, rounds=options.rounds, steps=options.steps,
                warm=options.warm, microbatch=options.microbatch, length=options.length)
    peers = [name for name in options.systems if SYSTEMS[name].peer]
    groups: list[dict[str, Result]] = []
    with progress() as tell:
        for names in _groups(options.systems, options.ranks * (PROCESS + PARAMETER * parameters(options.model))):
            groups.append({result.name: result for result in measure(names, plan, peers=peers, tell=tell)})
    _outcome(groups, options, plan).publish(options.out)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--systems", nargs="+", choices=tuple(SYSTEMS), default=CHOICES, metavar="NAME",
                        help=f"which to measure: {', '.join(SYSTEMS)} (default: {', '.join(CHOICES)})")
    parser.add_argument("--ranks", type=int, default=2, help="processes of each system (2)")
    parser.add_argument("--rounds", type=int, default=12, help="turns of each system (12)")
    parser.add_argument("--steps", type=int, default=6, help="steps in a turn, the first of which is not counted (6)")
    parser.add_argument("--warm", type=int, default=4, help="steps before the first turn (4)")
    parser.add_argument("--model", default="30m", help="preset of examples/gpt/model.py (30m)")
    parser.add_argument("--microbatch", type=int, default=2, help="sequences a rank and step (2)")
    parser.add_argument("--length", type=int, default=128, help="tokens a sequence (128)")
    parser.add_argument("--out", type=Path, help="where the JSON goes (out/benchmarks/zero-RANKS.json)")
    return parser.parse_args()


def _groups(names: Sequence[str], bytes_each: int) -> Iterator[tuple[str, ...]]:
    """Cut the systems into groups that fit the memory together, each led by the baseline."""
    others = [name for name in names if name != BASELINE]
    room = max(1, available() // bytes_each - 1)
    for start in range(0, max(1, len(others)), room):
        yield (BASELINE, *others[start:start + room])


def _outcome(groups: list[dict[str, Result]], options: argparse.Namespace, plan: Plan) -> Outcome:
    rows = [row for name in SYSTEMS if (row := _row(name, groups, plan.ranks))]
    everyone = [result for group in groups for result in group.values()]
    missing = [f"{SYSTEMS[result.name].title}: {result.failure}." for result in everyone if result.failure]
    note = (f"GPT of {max(result.parameters for result in everyone):,} parameters, fp32, {plan.ranks} gloo ranks over "
            f"loopback, one thread each, microbatch {plan.microbatch} x {plan.length}, AdamW, no clipping. "
            f"{plan.rounds} rounds of {plan.steps} steps, the first step of each round not counted; "
            f"{len(groups)} group(s) of systems, each interleaved with DDP.")
    columns = ("system", "median ms", "best ms", "x DDP", "quartiles", "CPU ms", "CPU x DDP", "sent, Psi", "by memory",
               "peak MiB", "rest MiB", "loss")
    return Outcome(benchmark=f"zero-{plan.ranks}", command=" ".join(["python", *sys.argv]),
                   note=" ".join([note, *missing]),
                   sheets=(Sheet(title=f"{plan.ranks} ranks", columns=columns, rows=tuple(rows)),),
                   targets=tuple(_targets(groups, plan.ranks)),
                   raw={"plan": asdict(plan), "groups": [[asdict(r) for r in group.values()] for group in groups]})


def _row(name: str, groups: list[dict[str, Result]], ranks: int) -> tuple[str, ...] | None:
    group = next((group for group in groups if name in group), None)
    if group is None:
        return None
    result, baseline = group[name], group[BASELINE]
    if result.failure:
        return SYSTEMS[name].title, *["-"] * 11
    low, middle, high = _quartiles(result.ratios(baseline))
    cpu = statistics.median(result.cpu)
    return (SYSTEMS[name].title, f"{1e3 * statistics.median(result.medians):.0f}", f"{1e3 * result.best:.0f}",
            f"{middle:.3f}", "" if name == BASELINE else f"{low:.3f} to {high:.3f}", f"{1e3 * cpu:.0f}",
            f"{cpu / statistics.median(baseline.cpu):.3f}" if baseline.cpu else "-", f"{result.psi(ranks):.3f}",
            f"{result.by_memory:.0%}", f"{result.peak / MEBI:.0f}", f"{result.resting / MEBI:.0f}",
            f"{result.losses[-1]:.4f}")


def _quartiles(values: list[float]) -> tuple[float, float, float]:
    """Return the quartiles and median; not-a-number where there is nothing to compare with."""
    if len(values) < 2:
        only = values[0] if values else math.nan
        return only, only, only
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high


def _targets(groups: list[dict[str, Result]], ranks: int) -> Iterator[Target]:
    for stage, limit in ((1, 1.00), (2, 1.00), (3, 1.15)):
        yield from _faster(f"stage {stage}: step time, x DDP", groups, f"shoal-{stage}", BASELINE, high=limit)
    yield from _faster("stage 3: times faster than FSDP2", groups, "fsdp2", "shoal-3", low=1.5)
    for stage in (0, 1, 2, 3):
        yield from _faster(f"stage {stage}: times faster than DeepSpeed's", groups, f"deepspeed-{stage}",
                           f"shoal-{stage}", low=1.5)
    for stage, bound in ((0, 1.0), (1, 1.0), (2, 1.0), (3, 1.5)):
        for way in ("", "-sockets"):
            result = _find(f"shoal-{stage}{way}", groups)
            if result and ranks > 1:
                alone = " by sockets alone" if way else ""
                yield Target(what=f"stage {stage}{alone}: bytes sent over the bound of {2 * bound:g} Psi (N-1)/N",
                             measured=result.psi(ranks) / bound, low=0.98, high=1.02)
    losses = [result.losses[-1] for group in groups for result in group.values()
              if result.losses and result.name != ALONE]
    if losses:
        yield Target(what="all systems' last losses differ by", measured=max(losses) - min(losses), high=2e-3)


def _faster(what: str, groups: list[dict[str, Result]], system: str, other: str, *, low: float = float("-inf"),
            high: float = float("inf")) -> Iterator[Target]:
    """Compare two systems by round; where they ran in different groups, by way of the baseline of each."""
    if not _find(system, groups) or not _find(other, groups):
        return
    together = next((group for group in groups if system in group and other in group), None)
    if together:
        measured = statistics.median(together[system].ratios(together[other]))
    else:
        measured = _to_baseline(system, groups) / _to_baseline(other, groups)
    yield Target(what=what, measured=measured, low=low, high=high)


def _to_baseline(name: str, groups: list[dict[str, Result]]) -> float:
    group = next(group for group in groups if name in group)
    return statistics.median(group[name].ratios(group[BASELINE]))


def _find(name: str, groups: list[dict[str, Result]]) -> Result | None:
    return next((group[name] for group in groups if name in group and not group[name].failure), None)


if __name__ == "__main__":
    main()
