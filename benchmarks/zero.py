"""Time, bytes and memory of a training step: this library at every stage beside DDP, FSDP2 and DeepSpeed.

    python benchmarks/zero.py [--ranks 2] [--rounds 12] [--steps 6] [--systems ddp shoal-1 ...] [--model 30m]

A GPT in fp32, one thread a rank, gloo over loopback, AdamW, no gradient clipping. benchmarks/README.md says what the
columns mean.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from catalogue import ALONE, BASELINE, SYSTEMS
from interleave import PARAMETER, PROCESS, Plan, Result, measure
from machine import available
from progress import progress
from results import Outcome, Sheet, Target, quartiles
from tuning import Best, tuning_file
from workloads import parameters

COMPARED = (("shoal-1", "shoal-1-sockets", "deepspeed-1", "zero-redundancy"),
            ("shoal-2", "shoal-2-sockets", "deepspeed-2"),
            ("shoal-3", "shoal-3-sockets", "fsdp2", "fsdp2-kept", "deepspeed-3", "deepspeed-3-released"),
            ("shoal-0", "deepspeed-0"))
"""Systems that are compared with each other, beside DDP: they are alive at once. Peers are those of their families."""
CHOICES = tuple(name for together in COMPARED for name in together)
MEBI = 1 << 20
WAYS = {"by peer memory": "", "by sockets": "-sockets"}
BESIDE_DDP = {"by peer memory": {1: 0.92, 2: 0.92, 3: 1.00}, "by sockets": {1: 1.00, 2: 1.00, 3: 1.10}}
BESIDE_FSDP2 = {"by peer memory": 1.5, "by sockets": 1.4}
BESIDE_DEEPSPEED = 1.5
BESIDE_REDUNDANCY = {"by peer memory": 0.92, "by sockets": 1.00}  # stage 1: both keep a share of the optimizer's state


def main() -> None:
    options = _options()
    plan = Plan(workload=options.model, ranks=options.ranks, rounds=options.rounds, steps=options.steps,
                warm=options.warm, microbatch=options.microbatch, length=options.length)
    best = Best.load(options.best or tuning_file(options.ranks))
    names = list(dict.fromkeys(best.of(name) for name in options.systems))
    peers = [name for name in names if SYSTEMS[name].peer]
    groups: list[dict[str, Result]] = []
    with progress() as tell:
        most = available() // (options.ranks * (PROCESS + PARAMETER * parameters(options.model)))
        for group in grouped(names, best, most):
            groups.append({result.name: result for result in measure(group, plan, peers=peers, tell=tell)})
    _outcome(Measured(groups=groups, best=best), options, plan).publish(options.out)


def grouped(names: Sequence[str], best: Best, most: int) -> list[list[str]]:
    """Cut the systems into groups of at most `most`, each led by DDP, that keep together what is compared.

    Where memory does not hold one row of `COMPARED`, that is cut too, and what is apart is not compared.
    """
    lead = [best.of(BASELINE)]
    rows = [[best.of(name) for name in row if best.of(name) in names] for row in COMPARED]
    rows += [[name] for name in names if name not in lead and not any(name in row for row in rows)]
    room, found = max(1, most - len(lead)), list[list[str]]()
    for row in rows:
        for part in (row[start:start + room] for start in range(0, len(row), room)):
            if not found or len(found[-1]) + len(part) > room:
                found.append([])
            found[-1] += part
    return [[*lead, *group] for group in found or [[]]]


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
    parser.add_argument("--best", type=Path, help="what tuning.py found: the settings of the peers "
                                                  "(out/benchmarks/tuning-RANKS.json; without it their defaults)")
    parser.add_argument("--out", type=Path, help="where the JSON goes (out/benchmarks/zero-RANKS.json)")
    return parser.parse_args()


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Results by group of systems that were alive at once, and the settings of the peers."""

    groups: list[dict[str, Result]]
    best: Best

    @property
    def baseline(self) -> str:
        return self.best.of(BASELINE)

    def group(self, name: str) -> dict[str, Result] | None:
        return next((group for group in self.groups if name in group), None)

    def find(self, name: str) -> Result | None:
        """Return the result of a system, or of the best settings of a family; None where it did not run."""
        name = self.best.of(name)
        return next((group[name] for group in self.groups if name in group and not group[name].failure), None)

    def ratios(self, system: str, other: str) -> list[float]:
        """Return the seconds of a system over those of another, by round; none where they ran in different groups."""
        system, other = self.best.of(system), self.best.of(other)
        together = next((group for group in self.groups if system in group and other in group), None)
        return together[system].ratios(together[other]) if together else []


def _outcome(measured: Measured, options: argparse.Namespace, plan: Plan) -> Outcome:
    rows = [row for name in SYSTEMS if (row := _row(name, measured, plan.ranks))]
    everyone = [result for group in measured.groups for result in group.values()]
    missing = [f"{SYSTEMS[result.name].title}: {result.failure}." for result in everyone if result.failure]
    note = (f"GPT of {max(result.parameters for result in everyone):,} parameters, fp32, {plan.ranks} gloo ranks over "
            f"loopback, one thread each, microbatch {plan.microbatch} x {plan.length}, AdamW, no clipping. "
            f"{plan.rounds} rounds of {plan.steps} steps, the first step of each round not counted; "
            f"{len(measured.groups)} group(s) of systems, each interleaved with DDP. {measured.best.words} A ratio is the "
            f"median over rounds, with the quartiles.")
    columns = ("system", "median ms", "best ms", "x DDP", "quartiles", "CPU ms", "CPU x DDP", "sent, Psi", "by memory",
               "peak MiB", "rest MiB", "loss")
    return Outcome(benchmark=f"zero-{plan.ranks}", command=" ".join(["python", *sys.argv]),
                   note=" ".join([note, *missing]),
                   sheets=(Sheet(title=f"{plan.ranks} ranks", columns=columns, rows=tuple(rows)), *_bounds(measured)),
                   targets=tuple(_targets(measured, plan.ranks)),
                   raw={"plan": asdict(plan), "groups": [[asdict(r) for r in group.values()] for group in measured.groups]})


def _row(name: str, measured: Measured, ranks: int) -> tuple[str, ...] | None:
    group = measured.group(name)
    if group is None:
        return None
    result, baseline = group[name], group[measured.baseline]
    if result.failure:
        return SYSTEMS[name].title, *["-"] * 11
    low, middle, high = quartiles(result.ratios(baseline))
    cpu = statistics.median(result.cpu)
    return (SYSTEMS[name].title, f"{1e3 * statistics.median(result.medians):.0f}", f"{1e3 * result.best:.0f}",
            f"{middle:.3f}", "" if result is baseline else f"{low:.3f} to {high:.3f}", f"{1e3 * cpu:.0f}",
            f"{cpu / statistics.median(baseline.cpu):.3f}" if baseline.cpu else "-", f"{result.psi(ranks):.3f}",
            f"{result.by_memory:.0%}", f"{result.peak / MEBI:.0f}", f"{result.resting / MEBI:.0f}",
            f"{result.losses[-1]:.4f}")


def _bounds(measured: Measured) -> Iterator[Sheet]:
    """Give how many times faster than each system that sends a step is that computes the same and sends nothing."""
    columns = ("what sends nothing", "beside", "times faster", "quartiles")
    rows = [(SYSTEMS[floor].title, SYSTEMS[name].title, f"{middle:.3f}", f"{low:.3f} to {high:.3f}")
            for floor in ALONE for name in SYSTEMS if name not in ALONE and measured.best.of(name) == name
            and (ratios := measured.ratios(name, floor))
            for low, middle, high in [quartiles(ratios)]]
    if rows:
        yield Sheet(title="Bounds", columns=columns, rows=tuple(rows))


def _targets(measured: Measured, ranks: int) -> Iterator[Target]:
    for way, suffix in WAYS.items():
        for stage, limit in BESIDE_DDP[way].items():
            yield from _faster(f"stage {stage} {way}: step time, x DDP", measured, f"shoal-{stage}{suffix}", BASELINE,
                               high=limit)
        for peer, kind in (("fsdp2", ""), ("fsdp2-kept", " that keeps its weights after forward")):
            yield from _faster(f"stage 3 {way}: times faster than FSDP2{kind}", measured, peer, f"shoal-3{suffix}",
                               low=BESIDE_FSDP2[way])
        for stage in (1, 2, 3):
            yield from _faster(f"stage {stage} {way}: times faster than DeepSpeed's", measured, f"deepspeed-{stage}",
                               f"shoal-{stage}{suffix}", low=BESIDE_DEEPSPEED)
        yield from _faster(f"stage 1 {way}: step time, x ZeroRedundancyOptimizer", measured, f"shoal-1{suffix}",
                           "zero-redundancy", high=BESIDE_REDUNDANCY[way])
    for stage, bound in ((0, 1.0), (1, 1.0), (2, 1.0), (3, 1.5)):
        for way, suffix in WAYS.items():
            result = measured.find(f"shoal-{stage}{suffix}")
            if result and ranks > 1:
                yield Target(what=f"stage {stage} {way}: bytes sent over the bound of {2 * bound:g} Psi (N-1)/N",
                             measured=result.psi(ranks) / bound, low=0.98, high=1.02)
    losses = [result.losses[-1] for group in measured.groups for result in group.values()
              if result.losses and result.name not in ALONE]
    if losses:
        yield Target(what="all systems' last losses differ by", measured=max(losses) - min(losses), high=2e-3)


def _faster(what: str, measured: Measured, system: str, other: str, *, low: float = float("-inf"),
            high: float = float("inf")) -> Iterator[Target]:
    """Compare the seconds of a system with those of another, where both ran in one group."""
    if ratios := measured.ratios(system, other):
        yield Target.over(ratios, what=what, low=low, high=high)


if __name__ == "__main__":
    main()
