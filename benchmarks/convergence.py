"""How well a training that compresses learns beside one that does not: bits per byte of held-out text, over several seeds.

    python benchmarks/convergence.py [--seeds 0 1 2 3 4] [--plot]
    python benchmarks/convergence.py --model 30m --configs examples/gpt/zero1.json examples/gpt/onebit.json --hooks none \\
        powersgd-4 --out out/benchmarks/convergence-30m.json       # finalists at the size at which speed is measured: hours
    python benchmarks/convergence.py --quick                       # a tiny model, few steps and one seed, to try it

A run is examples/gpt/train.py under `shoal run`, once for each configuration and seed of the weights, and ddp_train.py,
which trains the first configuration under DDP, once for each way of ddp_hooks.py and seed. Each keeps a folder of its own
under --runs, and its checkpoints in it: what is there already is not run again, and what was interrupted goes on.

Differences are paired: of two runs with one seed. Their mean has an interval of 95 % confidence (Student's t), and the
verdict says what that tells. DDP's ways are held against DDP's own AdamW, so that what its program does otherwise falls on
none of them.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from catalogue import TRAINING_STEPS
from ddp_hooks import BY_NAME
from interrupts import leaving
from machine import ROOT
from progress import progress
from results import FOLDER, Outcome, Sheet, Target, interval
from runs import Run, RunFailed
from training_quality import Learned, band, picture

from shoal.config.load import read

CONFIGS = tuple(Path(f"examples/gpt/{name}.json") for name in ("zero1", "onebit", "zeroone", "zeroone-still", "lamb",
                                                               "onebit-lamb"))
BASELINE = "AdamW"
COUNTERPARTS = {"OneBitAdam": "AdamW", "ZeroOneAdam": "AdamW", "OneBitLamb": "Lamb"}
"""The optimizer that each compressing one is while it warms up."""
WITHIN = 0.5  # percent
DDP = "DDP"
PLAIN, LOOK_AHEAD = "none", "none-nadam"  # of DDP: AdamW, and AdamW with a look-ahead
IMAGES = ("convergence.svg", "convergence.png")


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A configuration: its file, its name, and the type of its optimizer."""

    path: Path
    optimizer: str
    steps: int
    hook: str = ""
    """Of DDP, which then trains in place of Shoal."""

    @classmethod
    def read(cls, path: Path, steps: int | None) -> Case:
        config: dict[str, Any] = read(path)
        return cls(path=path, optimizer=config["optimizer"]["type"],
                   steps=steps or config["scheduler"]["params"]["total_num_steps"])

    @property
    def name(self) -> str:
        return f"DDP, AdamW, hook {self.hook}" if self.hook else f"{self.optimizer} ({self.path.stem})"


def main() -> None:
    options = _options()
    cases = [Case.read(path, options.steps) for path in options.configs]
    cases += [replace(cases[0], hook=hook, optimizer=DDP) for hook in options.hooks]
    runs = {(case, seed): Run(config=case.path, seed=seed, steps=case.steps, model=options.model, ranks=options.ranks,
                              folder=options.runs, hook=case.hook) for seed in options.seeds for case in cases}
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
    parser.add_argument("--seeds", nargs="+", type=int, default=list(range(5)), help="of the weights (0 1 2 3 4)")
    parser.add_argument("--hooks", nargs="*", choices=tuple(BY_NAME), default=list(BY_NAME), metavar="HOOK",
                        help=f"of DDP, beside the first configuration ({' '.join(BY_NAME)})")
    parser.add_argument("--steps", type=int, default=TRAINING_STEPS,
                        help=f"of each run, to which its schedule and its warm-up are stretched ({TRAINING_STEPS})")
    parser.add_argument("--model", default="3m", help="preset of examples/gpt/model.py (3m)")
    parser.add_argument("--ranks", type=int, default=2, help="of each run (2)")
    parser.add_argument("--jobs", type=int, default=1, help="runs at the same time (1)")
    parser.add_argument("--quick", action="store_true", help="a tiny model, 20 steps, one seed")
    parser.add_argument("--plot", action="store_true", help="draw the curves into docs/images/convergence.png and .svg")
    parser.add_argument("--runs", type=Path, default=ROOT / "out" / "convergence", help="where runs are (out/convergence)")
    parser.add_argument("--out", type=Path, help="where the JSON goes (out/benchmarks/convergence.json)")
    options = parser.parse_args()
    if options.quick:
        options.model, options.steps, options.seeds = "tiny", min(options.steps, 20), options.seeds[:1]
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


def baseline(learned: dict[Case, list[Learned]], case: Case) -> Case | None:
    """Return AdamW in the same program: Shoal's, or DDP's of a hook."""
    return next((each for each in learned if (each.hook == PLAIN if case.hook else each.optimizer == BASELINE)), None)


def counterpart(learned: dict[Case, list[Learned]], case: Case) -> Case | None:
    """Return what the case is but for its compression: its warm-up, or DDP's optimizer; of DDP's AdamW, Shoal's."""
    if not case.hook or case.hook == PLAIN:
        kind = COUNTERPARTS.get(case.optimizer, BASELINE)
        return next((each for each in learned if each.optimizer == kind), None)
    plain = LOOK_AHEAD if case.hook.endswith("-nadam") and case.hook != LOOK_AHEAD else PLAIN
    return next((each for each in learned if each.hook == plain), None)


def percent(learned: dict[Case, list[Learned]], case: Case, other: Case | None) -> list[float]:
    """Return how much more bits per byte a case has than another, by seed; none where it is that."""
    if other is None or other is case:
        return []
    return [100 * (mine.bits / theirs.bits - 1) for mine, theirs in zip(learned[case], learned[other], strict=True)]


def verdict(above: Sequence[float]) -> str:
    """Say what an interval of the mean tells: better, no worse than by the limit, worse, or neither."""
    low, high = interval(above)
    if high < 0:
        return "better"
    if high <= WITHIN:
        return f"equal within {WITHIN} %"
    return "worse" if low > 0 else "not resolved"


def text(above: Sequence[float]) -> str:
    """Return a mean, its interval, and the verdict."""
    if not above:
        return ""
    low, high = interval(above)
    mean = f"{statistics.fmean(above):+.2f} %"
    return f"{mean} ({low:+.2f} to {high:+.2f}), {verdict(above)}" if len(above) > 1 else f"{mean}, one seed"


def outcome(learned: dict[Case, list[Learned]], failures: Sequence[str], options: argparse.Namespace) -> Outcome:
    """Lay the quality of every case beside that of AdamW and of its counterpart."""
    rows: list[tuple[str, ...]] = []
    targets: list[Target] = []
    above = {case: percent(learned, case, baseline(learned, case)) for case in learned}
    for case, found in learned.items():
        bits = [each.bits for each in found]
        rows.append((case.name, f"{statistics.fmean(bits):.4f}", *(f"{each:.4f}" for each in bits), text(above[case]),
                     text(percent(learned, case, counterpart(learned, case)))))
        if (case.optimizer in COUNTERPARTS or case.hook) and above[case] and options.model != "tiny":  # which learns little
            targets.append(Target(what=f"{case.name}: bits per byte above {BASELINE}'s, the mean over seeds", unit=" %",
                                  measured=statistics.fmean(above[case]), high=WITHIN, spread=interval(above[case])))
    sheet = Sheet(title="Bits per byte of held-out text", rows=tuple(rows), columns=(
        "optimizer", "mean", *(f"seed {seed}" for seed in options.seeds), f"above {BASELINE}'s", "above its counterpart's"))
    steps = ", ".join(sorted({f"{case.steps:,}" for case in learned}))
    note = (f"GPT {options.model} of examples/gpt on the standard library's sources, {options.ranks} ranks, {steps} steps; "
            f"seeds are of the weights, and less is better. A difference is taken within a seed; the mean over seeds has "
            f"its interval of 95 % confidence. {BASELINE} is that of the same program, and a counterpart is the same "
            f"without compression: the warm-up of a Shoal optimizer, DDP with the same optimizer; of DDP's "
            f"{BASELINE}, Shoal's.")
    return Outcome(benchmark="convergence", command=" ".join(["python", *sys.argv]), sheets=(sheet,), targets=tuple(targets),
                   note=" ".join([note, *failures]), pictures=IMAGES[:1] if options.plot else (),
                   raw={case.name: {"above": above[case], "model": options.model, "steps": case.steps,
                                    "bits": [each.bits for each in found],
                                    "training": [asdict(point) for point in band(found)]}
                        for case, found in learned.items()})


if __name__ == "__main__":
    main()
