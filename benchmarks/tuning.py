"""Peers at their best: a step of DDP, FSDP2 and DeepSpeed at several of their settings; the fastest of each is compared.

    python benchmarks/tuning.py [--ranks 2] [--rounds 6] [--families ddp fsdp2 ...]

Settings of a peer are rows of catalogue.py with its `family`. They take turns as in zero.py, which reads the file that this
writes, and takes for every peer the settings with the smallest median ratio to DDP at its defaults.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Self

from catalogue import BASELINE, SYSTEMS
from interleave import PARAMETER, PROCESS, Plan, Result, measure
from machine import available
from progress import progress
from results import FOLDER, Outcome, Sheet, quartiles
from workloads import parameters

FAMILIES = tuple(dict.fromkeys(system.family for system in SYSTEMS.values() if system.family))
MEBI = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Best:
    """The settings of each peer that were fastest."""

    names: dict[str, str] = field(default_factory=dict[str, str])
    words: str = "Peers at their defaults: tuning.py has not run here."

    @classmethod
    def load(cls, file: Path) -> Self:
        """Read what was found; nothing where there is no file."""
        if not file.exists():
            return cls()
        found = json.loads(file.read_text())
        return cls(names=found["raw"]["best"], words=f"Peers at the best of their settings, by {found['benchmark']} on "
                                                     f"{found['machine']['date']}.")

    def of(self, name: str) -> str:
        """Return the settings that stand for a peer, given by its family; a system of none is itself."""
        return self.names.get(name, name)


def tuning_file(ranks: int) -> Path:
    """Return where the results for so many ranks are."""
    return FOLDER / f"tuning-{ranks}.json"


def fitting_groups(names: Sequence[str], baseline: str, bytes_each: int) -> Iterator[tuple[str, ...]]:
    """Cut the systems into groups that fit the memory together, each led by the baseline."""
    others = [name for name in names if name != baseline]
    room = max(1, available() // bytes_each - 1)
    for start in range(0, max(1, len(others)), room):
        yield (baseline, *others[start:start + room])


def main() -> None:
    options = _options()
    plan = Plan(workload=options.model, ranks=options.ranks, rounds=options.rounds, steps=options.steps,
                warm=options.warm, microbatch=options.microbatch, length=options.length)
    names = [name for name, system in SYSTEMS.items() if system.family in options.families]
    peers = [name for name in names if SYSTEMS[name].peer]
    found: dict[str, tuple[Result, list[float]]] = {}
    with progress() as tell:
        for group in fitting_groups(names, BASELINE, plan.ranks * (PROCESS + PARAMETER * parameters(options.model))):
            results = {result.name: result for result in measure(group, plan, peers=peers, tell=tell)}
            for name in names:
                if name in results and name not in found:
                    found[name] = results[name], results[name].ratios(results[BASELINE])
    _outcome(found, options, plan).publish(options.out)


def _outcome(found: dict[str, tuple[Result, list[float]]], options: argparse.Namespace, plan: Plan) -> Outcome:
    ran = {name: ratios for name, (result, ratios) in found.items() if ratios and not result.failure}
    best = {family: min(mine, key=lambda name: statistics.median(ran[name])) for family in options.families
            if (mine := [name for name in ran if SYSTEMS[name].family == family])}
    rows = tuple(_row(name, found[name], plan.ranks, chosen=name in best.values()) for name in found)
    failures = [f"{SYSTEMS[name].title}: {result.failure}." for name, (result, _) in found.items() if result.failure]
    note = (f"A step of the GPT {plan.workload} in fp32, {plan.ranks} gloo ranks over loopback, one thread each, microbatch "
            f"{plan.microbatch} x {plan.length}; {plan.rounds} rounds of {plan.steps} steps, the first of each not counted. "
            f"Ratios are to DDP at its defaults in the same round: median and quartiles.")
    columns = ("peer and setting", "median ms", "x DDP", "quartiles", "CPU ms", "sent, Psi", "peak MiB", "fastest")
    return Outcome(benchmark=f"tuning-{plan.ranks}", command=" ".join(["python", *sys.argv]), targets=(),
                   note=" ".join([note, *failures]),
                   sheets=(Sheet(title=f"Peers at several settings, {plan.ranks} ranks", columns=columns, rows=rows),),
                   raw={"best": best, "plan": asdict(plan), "results": [asdict(result) for result, _ in found.values()]})


def _row(name: str, found: tuple[Result, list[float]], ranks: int, *, chosen: bool) -> tuple[str, ...]:
    result, ratios = found
    if result.failure or not ratios:
        return SYSTEMS[name].title, *["-"] * 7
    low, middle, high = quartiles(ratios)
    return (SYSTEMS[name].title, f"{1e3 * statistics.median(result.medians):.0f}", f"{middle:.3f}",
            f"{low:.3f} to {high:.3f}", f"{1e3 * statistics.median(result.cpu):.0f}", f"{result.psi(ranks):.3f}",
            f"{result.peak / MEBI:.0f}", "of its kind" if chosen else "")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", nargs="+", choices=FAMILIES, default=FAMILIES, metavar="PEER",
                        help=f"which peers ({' '.join(FAMILIES)})")
    parser.add_argument("--ranks", type=int, default=2, help="processes of each system (2)")
    parser.add_argument("--rounds", type=int, default=6, help="turns of each system (6)")
    parser.add_argument("--steps", type=int, default=5, help="steps in a turn, the first of which is not counted (5)")
    parser.add_argument("--warm", type=int, default=4, help="steps before the first turn (4)")
    parser.add_argument("--model", default="30m", help="preset of examples/gpt/model.py (30m)")
    parser.add_argument("--microbatch", type=int, default=2, help="sequences a rank and step (2)")
    parser.add_argument("--length", type=int, default=128, help="tokens a sequence (128)")
    parser.add_argument("--out", type=Path, help="where the JSON goes (out/benchmarks/tuning-RANKS.json)")
    return parser.parse_args()


if __name__ == "__main__":
    main()
