"""How well optimizers that compress learn beside those that do not: bits per byte of held-out text, over several seeds.

    python benchmarks/convergence.py [--seeds 0 1 2] [--plot]
    python benchmarks/convergence.py --quick                       # a tiny model, few steps and one seed, to try it

A run is examples/gpt/train.py under `shoal run`, once for each configuration and seed of the weights. Each keeps a folder of
its own under --runs, and its checkpoints in it: what is there already is not run again, and what was interrupted goes on.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from interrupts import leaving
from learned import Learned, band, picture
from machine import ROOT
from outcome import FOLDER, Outcome, Sheet, Target
from progress import progress
from runs import Run, RunFailed

from shoal.config.load import read

CONFIGS = tuple(Path(f"examples/gpt/{name}.json") for name in ("zero1", "onebit", "zeroone", "zeroone-still", "lamb",
                                                               "onebit-lamb"))
BASELINE = "AdamW"
COUNTERPARTS = {"OneBitAdam": "AdamW", "ZeroOneAdam": "AdamW", "OneBitLamb": "Lamb"}
"""The optimizer that each compressing one is while it warms up."""
WITHIN = 0.5  # percent
IMAGES = ("convergence.svg", "convergence.png")


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A configuration: its file, its name, and the type of its optimizer."""

    path: Path
    optimizer: str
    steps: int

    @classmethod
    def read(cls, path: Path, steps: int | None) -> Case:
        config: dict[str, Any] = read(path)
        return cls(path=path, optimizer=config["optimizer"]["type"],
                   steps=steps or config["scheduler"]["params"]["total_num_steps"])

    @property
    def name(self) -> str:
        return f"{self.optimizer} ({self.path.stem})"


def main() -> None:
    options = _options()
    cases = [Case.read(path, options.steps) for path in options.configs]
    runs = {(case, seed): Run(config=case.path, seed=seed, steps=case.steps, model=options.model, ranks=options.ranks,
                              folder=options.runs) for seed in options.seeds for case in cases}
    with leaving(), progress() as tell:
        failures = train(list(runs.values()), options.jobs, tell)
    learned = {case: [runs[case, seed].learned() for seed in options.seeds if runs[case, seed].done] for case in cases}
    learned = {case: found for case, found in learned.items() if len(found) == len(options.seeds)}
    if options.plot and learned:
        title = f"GPT {options.model}, {options.ranks} ranks, {len(options.seeds)} seed(s): mean, least and most"
        picture({case.name: found for case, found in learned.items()}, [ROOT / "docs" / "images" / name for name in IMAGES],
                title=title)
    outcome(learned, failures, options).publish(options.out)
    if failures:
        sys.exit(1)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--configs", nargs="+", type=Path, default=[ROOT / path for path in CONFIGS], metavar="FILE",
                        help=f"configurations of examples/gpt/train.py ({' '.join(map(str, CONFIGS))})")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2], help="of the weights (0 1 2)")
    parser.add_argument("--steps", type=int, help="of each run (the configuration's), to which its schedule is stretched")
    parser.add_argument("--model", default="3m", help="preset of examples/gpt/model.py (3m)")
    parser.add_argument("--ranks", type=int, default=2, help="of each run (2)")
    parser.add_argument("--jobs", type=int, default=1, help="runs at the same time (1)")
    parser.add_argument("--quick", action="store_true", help="a tiny model, 20 steps, one seed")
    parser.add_argument("--plot", action="store_true", help="draw the curves into docs/images/convergence.png and .svg")
    parser.add_argument("--runs", type=Path, default=ROOT / "out" / "convergence", help="where runs are (out/convergence)")
    parser.add_argument("--out", type=Path, help="where the JSON goes (out/benchmarks/convergence.json)")
    options = parser.parse_args()
    if options.quick:
        options.model, options.steps, options.seeds = "tiny", options.steps or 20, options.seeds[:1]
        options.out = options.out or FOLDER / "quick-convergence.json"
    return options


def train(runs: Sequence[Run], jobs: int, tell: Callable[[str], None]) -> list[str]:
    """Run what is not done yet, `jobs` at a time, and return why those failed that did."""
    waiting = [run for run in runs if not run.done]
    tell(f"{len(runs) - len(waiting)} of {len(runs)} runs are there already")

    def attempt(number: int) -> str:
        run = waiting[number]
        try:
            run.train(lambda line: tell(f"run {number + 1} of {len(waiting)}, {run.name}: {line}"))
        except RunFailed as failure:
            return str(failure)
        return ""

    with ThreadPoolExecutor(jobs) as pool:
        try:
            return [failure for failure in pool.map(attempt, range(len(waiting))) if failure]
        finally:  # an interruption: those that run save a checkpoint and end, the others do not begin
            pool.shutdown(wait=False, cancel_futures=True)
            for run in waiting:
                run.end()


def ratios(learned: dict[Case, list[Learned]], case: Case, optimizer: str) -> list[float]:
    """Return the bits per byte of a case over those of the first with that optimizer, by seed; none where it is that."""
    other = next((other for other in learned if other.optimizer == optimizer), None)
    if other is None or other is case:
        return []
    return [mine.bits / theirs.bits for mine, theirs in zip(learned[case], learned[other], strict=True)]


def outcome(learned: dict[Case, list[Learned]], failures: Sequence[str], options: argparse.Namespace) -> Outcome:
    """Lay the quality of every case beside that of AdamW and of its counterpart."""
    rows: list[tuple[str, ...]] = []
    targets: list[Target] = []
    for case, found in learned.items():
        counterpart = COUNTERPARTS.get(case.optimizer, BASELINE)
        beside = [ratios(learned, case, optimizer) for optimizer in (BASELINE, counterpart)]
        bits = [each.bits for each in found]
        rows.append((case.name, f"{statistics.fmean(bits):.4f}", *(f"{each:.4f}" for each in bits),
                     *(f"{statistics.fmean(each):.4f}" if each else "" for each in beside)))
        if case.optimizer in COUNTERPARTS and beside[0] and options.model != "tiny":  # which learns next to nothing
            targets.append(Target(what=f"{case.name}: bits per byte above {BASELINE}'s, the mean over seeds", unit=" %",
                                  measured=100 * (statistics.fmean(beside[0]) - 1), high=WITHIN))
    sheet = Sheet(title="Bits per byte of held-out text", rows=tuple(rows), columns=(
        "optimizer", "mean", *(f"seed {seed}" for seed in options.seeds), f"x {BASELINE}", "x what it warms up as"))
    steps = ", ".join(sorted({f"{case.steps:,}" for case in learned}))
    note = (f"GPT {options.model} of examples/gpt on the standard library's sources, {options.ranks} ranks, {steps} steps; "
            f"seeds are of the weights, and a ratio is taken within a seed. Less is better.")
    return Outcome(benchmark="convergence", command=" ".join(["python", *sys.argv]), sheets=(sheet,), targets=tuple(targets),
                   note=" ".join([note, *failures]), pictures=IMAGES[:1] if options.plot else (),
                   raw={case.name: {"bits": [each.bits for each in found],
                                    "training": [asdict(point) for point in band(found)]}
                        for case, found in learned.items()})


if __name__ == "__main__":
    main()
