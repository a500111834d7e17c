"""Samples a second of one GPT on several hosts with a slow link between them: data parallel beside our pipeline.

    python benchmarks/slow_network.py [--rates 100mbit 200mbit 500mbit 1gbit 2.5gbit unlimited] [--plot]
    python benchmarks/slow_network.py --quick                                  # a tiny model and two rates, to try it

Hosts are those of hosts.py, with one rank of one thread each. Every system trains the same model on the same batches, so
their losses agree. benchmarks/README.md says at which settings.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import link
from catalogue import BASELINE, SYSTEMS
from hosts import Hosts, HostsUnavailable
from interleave import Plan
from machine import ROOT
from progress import progress
from rate_curves import Point, crossover, picture, where
from results import Outcome, Sheet, Target, spread_ratio
from speeds import check_memory, curve, interface, round_times, sent
from sweep import Found, add_arguments, sweep
from workloads import parameters

RATES = ("100mbit", "200mbit", "500mbit", "1gbit", "2.5gbit", link.UNLIMITED)
PIPELINES = tuple(name for name, system in SYSTEMS.items() if system.whole)
CHOICES = (BASELINE, "ddp-fp16", "ddp-bf16", "ddp-powersgd-1-ordered", "ddp-powersgd-4-ordered", "ddp-local", "shoal-1",
           "shoal-2", *PIPELINES)
PROMISED, TIMES = "200mbit", 4.0  # the rate at which a pipeline is promised to be so many times as fast as DDP
MEBI = 1 << 20


def main() -> None:
    options = _options()
    plan = Plan(workload=options.model, ranks=options.hosts, rounds=options.rounds, steps=0, warm=4, length=options.length,
                microbatch=options.batch // options.hosts, pieces=options.microbatches)
    check_memory(options.systems, plan)
    sends = {name: sent(name, plan) for name in options.systems}
    try:
        with Hosts(plan.ranks, delay=options.delay) as hosts, progress() as tell:
            found = sweep(options.systems, plan, options.rates, hosts, sends=sends, seconds=options.seconds, tell=tell)
    except HostsUnavailable as reason:
        sys.stderr.write(f"skipped: {reason}\n")
        return
    _outcome(found, plan, sends, options).publish(options.out)
    if options.plot:
        _draw(found, plan, options)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser, RATES)
    parser.add_argument("--systems", nargs="+", choices=tuple(SYSTEMS), default=CHOICES, metavar="NAME",
                        help=f"which to measure ({' '.join(CHOICES)})")
    parser.add_argument("--batch", type=int, default=8, help="sequences of a step, on all hosts together (8)")
    parser.add_argument("--microbatches", type=int, default=8, help="into which a pipeline cuts them (8)")
    parser.add_argument("--quick", action="store_true", help="a tiny model, two rates, one round of short turns")
    parser.add_argument("--plot", action="store_true", help="draw the curves into docs/images/slow_network.png and .svg")
    parser.add_argument("--out", type=Path, help="where the JSON goes (out/benchmarks/slow-network.json)")
    options = parser.parse_args()
    if options.quick:
        options.model, options.rates, options.rounds, options.seconds = "tiny", ("50mbit", link.UNLIMITED), 1, 0.5
        options.batch, options.microbatches, options.length = 2 * options.hosts, 4, 32
    for count, name in ((options.hosts, "--hosts"), (options.microbatches, "--microbatches")):
        if options.batch % count:
            parser.error(f"--batch {options.batch} cannot be divided by {name} {count}")
    return options


def _outcome(found: Found, plan: Plan, sends: dict[str, float], options: argparse.Namespace) -> Outcome:
    curves = {name: curve(found, name, plan, options.rates) for name in options.systems if name not in found.failures}
    speeds = tuple((SYSTEMS[name].title, *(f"{point.middle:.2f}" for point in points)) for name, points in curves.items())
    ratios = tuple((SYSTEMS[name].title, *(spread_ratio(round_times(found, name, rate)) for rate in options.rates),
                    where(points, curves[BASELINE]))
                   for name, points in curves.items() if name != BASELINE and BASELINE in curves)
    wire = tuple((SYSTEMS[name].title, f"{sends[name] / 1e6:.2f}", f"{interface(found, name) / 1e6:.2f}",
                  f"{interface(found, name) / sends[name]:.3f}", f"{found.losses[name]:.4f}") for name in curves)
    sheets = (Sheet(title="Samples a second", columns=("system", *options.rates), rows=speeds),
              Sheet(title="Times DDP", columns=("system", *options.rates, "DDP as fast from"), rows=ratios),
              Sheet(title="On the interface", rows=wire, columns=("system", "formula, MB a step", "measured, MB a step",
                                                                  "measured / formula", "loss")))
    failures = [f"{SYSTEMS[name].title}: {reason}." for name, reason in found.failures.items()]
    note = (f"GPT of {parameters(plan.workload):,} parameters, fp32, {plan.ranks} hosts with one gloo rank of one thread "
            f"each, {plan.ranks * plan.microbatch} sequences of {plan.length} tokens a step, which a pipeline cuts into "
            f"{plan.pieces} microbatches and the others do not; AdamW, no clipping. {plan.rounds} round(s) of about "
            f"{options.seconds:g} s a turn, the first step of each not counted; the median over rounds. Losses are those "
            f"after {plan.warm} steps.")
    promised = plan.workload == "30m"  # a tiny model sends little, and of that much is not its gradients
    return Outcome(benchmark="slow-network", command=" ".join(["python", *sys.argv]), note=" ".join([note, *failures]),
                   sheets=sheets, targets=tuple(_targets(found, curves, sends, options.rates)) if promised else (),
                   raw={"plan": asdict(plan), "sends": sends, **asdict(found)})


def _targets(found: Found, curves: dict[str, list[Point]], sends: dict[str, float], rates: Sequence[str]) -> list[Target]:
    pipelines = [name for name in curves if SYSTEMS[name].whole and "zb-h2" in name]  # what the docs say slow links want
    faster = [Target.over(round_times(found, name, PROMISED), low=TIMES,
                          what=f"{SYSTEMS[name].title} at {PROMISED}: times DDP's samples a second")
              for name in pipelines if BASELINE in curves and PROMISED in rates]
    wire = [Target(what=f"{SYSTEMS[name].title}: bytes on the interface over the formula", low=0.97, high=1.03,
                   measured=interface(found, name) / sends[name]) for name in curves]
    losses = [loss for name, loss in found.losses.items() if not SYSTEMS[name].warm_up]  # the others train otherwise
    return [*faster, *wire, Target(what="losses of all systems that neither compress nor average differ by", high=2e-3,
                                   measured=max(losses) - min(losses))]


def _draw(found: Found, plan: Plan, options: argparse.Namespace) -> None:
    curves = {name: curve(found, name, plan, options.rates) for name in options.systems if name not in found.failures}
    pipelines = [curves[name] for name in curves if SYSTEMS[name].whole]
    crossings = [at for points in pipelines if BASELINE in curves and (at := crossover(points, curves[BASELINE]))]
    title = (f"GPT of {parameters(plan.workload) / 1e6:.1f} M parameters on {plan.ranks} hosts, "
             f"{plan.ranks * plan.microbatch} x {plan.length} tokens a step")
    files = [ROOT / "docs" / "images" / f"slow_network.{kind}" for kind in ("png", "svg")]
    picture({SYSTEMS[name].title: points for name, points in curves.items()}, files, title=title,
            crossing=max(crossings, default=None))


if __name__ == "__main__":
    main()
