"""Savings of compressing optimizers between hosts: bytes of a step, samples a second over the rate of the link, packing.

    python benchmarks/communication.py [--rates 200mbit 1gbit unlimited] [--plot]
    python benchmarks/communication.py --quick                      # a tiny model and two rates, to try it

Hosts are those of hosts.py, with one rank of one thread each. Few sequences make a step, so that what is measured is
communication: DDP, plain and with the hooks that torch offers, pipelines, our AdamW, and each optimizer that compresses
(COMPRESSING in catalogue.py), in a step that is compressed. The speed of a training follows from the seconds of such a step,
of one that is not, and the share of both in the very training in which convergence.py measures quality. A short training
whose every step counts is run too, at the lowest rate (whole_training.py).
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from math import inf
from pathlib import Path

import link
from catalogue import (
    BASELINE,
    COMPRESSED,
    DDP_COMPRESSING,
    FREEZE,
    SYSTEMS,
    TORCH_PIPELINES,
    TRAINING_STEPS,
    exact_share,
)
from ddp_hooks import LATE
from hosts import Hosts, HostsUnavailable
from interleave import Plan
from link import FRAME, PAYLOAD
from machine import ROOT
from progress import progress
from rate_curves import picture
from results import FOLDER, Outcome, Sheet, Target, spread_ratio
from speeds import curve, fitting, interface, round_times, sent
from sweep import Cell, Found, add_arguments, sweep
from whole_training import Through, through
from workloads import parameters

RATES = ("200mbit", "1gbit", link.UNLIMITED)
QUICK = (BASELINE, "ddp-bf16", "ddp-powersgd-1-ordered", "torch-pipeline-1f1b", "shoal-1", "onebit-adam-1")
PIPELINES = (*TORCH_PIPELINES, "shoal-pipeline-1f1b", "shoal-pipeline-zb-h2-all")
CHOICES = (BASELINE, *DDP_COMPRESSING, *PIPELINES, "shoal-0", "shoal-1", "shoal-lamb-1", *COMPRESSED)
PIECES = 8
"""Microbatches of a pipeline at most."""
FEWER: dict[int, tuple[tuple[str, int, float], ...]] = {
    0: (("fp32", 4, 30.0), ("16-bit", 2, 15.0)),
    1: (("16-bit", 2, 12.0),),
}
"""By stage: beside which gradients and weights, their bytes an element, and how many times fewer bytes are promised."""
SLOW, END_TO_END = "200mbit", 3.0
FAST, NO_SLOWER = "1gbit", 1.0
PACKING = 0.1  # of a step, at most
LATE_TITLE = f", whole gradients in {LATE:.0%} of the steps"
IMAGES = ("communication.svg", "communication.png")


@dataclass(frozen=True, slots=True, kw_only=True)
class Results:
    """Results of the systems that ran, each in its group, and the bytes that each must send by its formula."""

    found: dict[str, Found]
    plan: Plan
    rates: tuple[str, ...]
    names: tuple[str, ...]
    sends: dict[str, float]
    trained: Through

    @property
    def compressed(self) -> list[str]:
        return [name for name in self.names if name in COMPRESSED]

    @property
    def whole(self) -> float:
        """Elements that a rank sends in a step where everything travels as it is: 2 Psi (N-1)/N."""
        return 2 * parameters(self.plan.workload) * (self.plan.ranks - 1) / self.plan.ranks

    def cells(self, name: str) -> list[Cell]:
        return [cell for cell in self.found[name].cells if cell.system == name and cell.sent]

    def compared(self, name: str) -> bool:
        """Whether DDP was measured beside the system, to the end."""
        return BASELINE in self.found[name].losses

    def ends(self, name: str) -> bool:
        """Whether the speed of training from end to end is known: its warm-up was measured beside it too."""
        return self.compared(name) and SYSTEMS[name].warm_up in self.found[name].losses

    @property
    def trainings(self) -> list[tuple[str, str, float]]:
        """Every training of known speed: its system, "-late" for a second schedule of PowerSGD, its uncompressed share.

        A late PowerSGD sends whole gradients in the first `LATE` of the steps, instead of in the fewest that it allows.
        """
        known = [name for name in self.names if name != BASELINE and self.compared(name)
                 and (not SYSTEMS[name].warm_up or self.ends(name))]
        late = [(name, "-late", LATE) for name in known if SYSTEMS[name].rank]
        return [*((name, "", exact_share(name) if SYSTEMS[name].warm_up else 0.0) for name in known), *late]

    def packing(self, name: str) -> dict[str, float]:
        """Return the share of packing and unpacking in a step, by rate: the median over rounds."""
        return {cell.rate: statistics.median(cell.packing) for cell in self.cells(name)}


def main() -> None:
    options = _options()
    plan = Plan(workload=options.model, ranks=options.hosts, rounds=options.rounds, steps=0, warm=2 * FREEZE,
                length=options.length, microbatch=options.microbatch, pieces=min(PIECES, options.hosts * options.microbatch))
    sends, found = {name: sent(name, plan) for name in options.systems}, list[Found]()
    try:
        with Hosts(plan.ranks, delay=options.delay) as hosts, progress() as tell:
            for group in fitting(options.systems, plan):
                found.append(sweep(group, plan, options.rates, hosts, sends=sends, seconds=options.seconds, tell=tell))
            lowest = min(options.rates, key=lambda rate: link.rate(rate) or inf)
            trained = through(options.systems, plan, lowest, hosts, tell)
    except HostsUnavailable as reason:
        sys.stderr.write(f"skipped: {reason}\n")
        return
    results = collected(found, plan, options.systems, options.rates, trained)
    if options.plot:
        draw(results)
    outcome(results, found, seconds=options.seconds, pictures=IMAGES[:1] if options.plot else ()).publish(options.out)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser, RATES)
    parser.add_argument("--systems", nargs="+", choices=tuple(SYSTEMS), metavar="NAME",
                        help=f"which to measure ({' '.join(CHOICES)})")
    parser.add_argument("--microbatch", type=int, default=2, help="sequences a host and step (2)")
    parser.add_argument("--quick", action="store_true", help="a tiny model, two rates, few systems, one short round")
    parser.add_argument("--plot", action="store_true", help="draw the curves into docs/images/communication.png and .svg")
    parser.add_argument("--out", type=Path, help="where the JSON goes (out/benchmarks/communication.json)")
    options = parser.parse_args()
    options.systems = options.systems or (QUICK if options.quick else CHOICES)
    if options.quick:
        options.model, options.rates, options.rounds, options.seconds = "tiny", ("50mbit", link.UNLIMITED), 1, 0.5
        options.length, options.out = 32, options.out or FOLDER / "quick-communication.json"
    return options


def collected(found: Sequence[Found], plan: Plan, systems: Sequence[str], rates: Sequence[str], trained: Through) -> Results:
    """Gather what the groups found; of a system that is in several, what the first did in which it did not fail."""
    ran = {name: each for each in reversed(found) for name in each.losses if name not in each.failures}
    return Results(found=ran, plan=plan, rates=tuple(rates), names=tuple(name for name in systems if name in ran),
                   sends={name: sent(name, plan) for name in systems}, trained=trained)


def outcome(results: Results, groups: Sequence[Found], *, seconds: float, pictures: tuple[str, ...] = ()) -> Outcome:
    """Lay what was found into tables, beside what was promised."""
    plan, rates = results.plan, results.rates
    sheets = (Sheet(title="Samples a second", columns=("system", *rates), rows=tuple(
        (SYSTEMS[name].title, *(f"{point.middle:.2f}" for point in curve(results.found[name], name, plan, rates)))
        for name in results.names)), *_speeds(results), *_trained(results), _bytes(results), _packing(results))
    failures = [f"{SYSTEMS[name].title}: {reason}." for found in (*groups, results.trained)
                for name, reason in found.failures.items()]
    note = (
        f"GPT of {parameters(plan.workload):,} parameters, fp32, {plan.ranks} hosts with one gloo rank of one thread "
        f"each, {plan.microbatch} sequence(s) of {plan.length} tokens a host and step, which a pipeline cuts into "
        f"{plan.pieces} microbatches; no clipping. {plan.rounds} "
        f"round(s) of about {seconds:g} s a turn, the first step of each not counted; the median over rounds. Losses are "
        f"those after {plan.warm} steps; ratios are medians over rounds with their quartiles. The steps of compressing "
        f"optimizers and of PowerSGD are past their warm-up. A training is computed: w x seconds of an uncompressed step "
        f"+ (1 - w) x seconds of a compressed one, w being the share that examples/gpt's configuration sends "
        f"uncompressed in {TRAINING_STEPS} steps, the training of convergence.py; a short one is run at "
        f"{results.trained.rate}. Two settings of PowerSGD stand here, because its stock hook fails on gloo with several "
        f"buckets: one bucket of the whole model, or bucket after bucket in a thread beside backward. The interfaces "
        f"count headers once for up to 64 KiB (offload); in packets of 1500 bytes they are 4.6 % of the payload.")
    promised = plan.workload == "30m"  # a tiny model sends little, and of that much is not its gradients
    return Outcome(benchmark="communication", command=" ".join(["python", *sys.argv]), note=" ".join([note, *failures]),
                   sheets=sheets, targets=tuple(targets(results)) if promised else (), pictures=pictures,
                   raw={"plan": asdict(plan), "sends": results.sends, "groups": [asdict(found) for found in groups],
                        "trained": results.trained.raw, "training times": {
                            name + late: {rate: training_times(results, name, rate, share) for rate in rates}
                            for name, late, share in results.trainings}})


def targets(results: Results) -> list[Target]:
    """Return what is promised of the compressing systems, beside what was measured."""
    infinite = float("inf")
    targets: list[Target] = []
    for name in results.compressed:
        found = results.found[name]
        title, measured, packing = SYSTEMS[name].title, interface(found, name), results.packing(name)
        targets += [Target(what=f"{title}: times fewer bytes than {dtype} gradients and weights", low=fewer, high=infinite,
                           measured=size * results.whole / measured) for dtype, size, fewer in FEWER[SYSTEMS[name].stage]]
        targets += [Target(what=f"{title}: bytes on the interface over the formula", low=0.97, high=1.03,
                           measured=measured / results.sends[name])]
        if FAST in results.rates and results.compared(name):
            targets += [Target.over(round_times(found, name, FAST), low=NO_SLOWER,
                                    what=f"{title} at {FAST}: times DDP's samples a second")]
        targets += [Target(what=f"{title}: packing and unpacking, of the step, at the rate where that is most", unit=" %",
                           measured=100 * max(packing.values()), high=100 * PACKING)]
    return targets + (results.trained.targets(END_TO_END) if results.trained.rate == SLOW else [])


def _speeds(results: Results) -> list[Sheet]:
    others = [name for name in results.names if name != BASELINE and results.compared(name)]
    if not others:
        return []
    rows = [(SYSTEMS[name].title, *(spread_ratio(round_times(results.found[name], name, rate)) for rate in results.rates))
            for name in others]
    sheets = [Sheet(title="Times DDP, a step", columns=("system", *results.rates), rows=tuple(rows))]
    whole = [(f"{SYSTEMS[name].title}{LATE_TITLE if late else ''}", f"{share:.1%}",
              *(spread_ratio(training_times(results, name, rate, share)) for rate in results.rates))
             for name, late, share in results.trainings]
    sheets.append(Sheet(title=f"Times DDP, a training of {TRAINING_STEPS} steps, computed", rows=tuple(whole),
                        columns=("system", "sent uncompressed", *results.rates)))
    return sheets


def training_times(results: Results, name: str, rate: str, share: float) -> list[float]:
    """Return the speed of a training relative to DDP, by round, of which `share` is sent uncompressed."""
    return round_times(results.found[name], name, rate, warm_up=share)


def _trained(results: Results) -> list[Sheet]:
    return [results.trained.sheet(results.plan.ranks * results.plan.microbatch)] if results.trained.compared else []


def _bytes(results: Results) -> Sheet:
    rows: list[tuple[str, ...]] = []
    for name in results.names:
        cells, formula, measured = results.cells(name), results.sends[name], interface(results.found[name], name)
        payload, state, words = (_middle(turns) for turns in (
            (cell.payload for cell in cells), (cell.state for cell in cells), (cell.words for cell in cells)))
        rows.append((SYSTEMS[name].title, _mega(formula), _mega(state) if state else "-", f"{words:.0f} B" if state else "-",
                     _mega(payload), _mega(measured), f"{measured / formula:.4f}", _mega(payload * FRAME / PAYLOAD),
                     f"{4 * results.whole / measured:.2f}", f"{results.found[name].losses[name]:.4f}"))
    return Sheet(title="MB that a rank sends in a step", rows=tuple(rows), columns=(
        "system", "formula", "own count: state", "own count: words", "payload of TCP", "interface", "interface / formula",
        "in packets of 1500", "fp32 / interface", "loss"))


def _mega(bytes: float) -> str:
    return f"{bytes / 1e6:.4f}"


def _middle(turns: Iterable[list[float]]) -> float:
    return statistics.median(bytes for turn in turns for bytes in turn)


def _packing(results: Results) -> Sheet:
    rows = tuple((SYSTEMS[name].title, *(f"{100 * share:.1f} %" for share in results.packing(name).values()))
                 for name in results.compressed)
    return Sheet(title="Packing and unpacking, of the step's time", columns=("system", *results.rates), rows=rows)


def draw(results: Results, folder: Path = ROOT / "docs" / "images") -> None:
    """Draw samples a second over the rate of the link, and how many times DDP's they are where DDP was measured."""
    curves = {SYSTEMS[name].title: curve(results.found[name], name, results.plan, results.rates) for name in results.names}
    title = (f"GPT of {parameters(results.plan.workload) / 1e6:.1f} M parameters on {results.plan.ranks} hosts, "
             f"{results.plan.microbatch} x {results.plan.length} tokens a host and step")
    picture(curves, [folder / image for image in IMAGES], title=title,
            over=SYSTEMS[BASELINE].title if BASELINE in results.names else "")


if __name__ == "__main__":
    main()
