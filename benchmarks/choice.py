"""The choice on a slow link: of all ways whose loss is within 0.5 % of AdamW's, which is fastest, and by how much.

    python benchmarks/choice.py [--rate 200mbit]

Reads what communication.py (speed) and convergence.py (quality) left in out/benchmarks: both are of the same training, with
the same share of steps that are uncompressed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from catalogue import DDP_COMPRESSING, SYSTEMS, TRAINING_STEPS
from communication import LATE_TITLE
from results import FOLDER, Outcome, Sheet, Target, spread_ratio

WITHIN = 0.5  # percent above AdamW
LEAD = 1.25
QUALITY = {
    "ddp": "AdamW (zero1)", "ddp-fp16": "DDP, AdamW, hook fp16", "ddp-bf16": "DDP, AdamW, hook bf16",
    **{f"ddp-powersgd-{rank}{way}{late}": f"DDP, AdamW, hook powersgd-{rank}{late}"
       for rank in (1, 4) for way in ("", "-waiting") for late in ("", "-late")},
    "onebit-adam-0": "OneBitAdam (onebit)", "onebit-adam-1": "OneBitAdam (onebit)", "zeroone-adam-1": "ZeroOneAdam "
    "(zeroone)",
    "onebit-lamb-1": "OneBitLamb (onebit-lamb)",
}
"""The training of convergence.py in which the quality of a system is measured; DDP in fp32 is AdamW."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A way to train: how fast in times DDP, by round, and its bits per byte above AdamW in percent, by seed."""

    name: str
    times: list[float]
    above: list[float]

    @property
    def system(self) -> str:
        return self.name.removesuffix("-late")

    @property
    def title(self) -> str:
        return SYSTEMS[self.system].title + (LATE_TITLE if self.name != self.system else "")

    @property
    def of_torch(self) -> bool:
        return self.system == "ddp" or self.system in DDP_COMPRESSING

    @property
    def speed(self) -> float:
        return statistics.median(self.times)

    @property
    def learns(self) -> bool:
        return statistics.fmean(self.above) <= WITHIN


def main() -> None:
    options = _options()
    speed, quality = (json.loads((options.folder / f"{name}.json").read_text()) for name in ("communication", "convergence"))
    choices = collected(speed["raw"], quality["raw"], options.rate)
    outcome(choices, speed, quality, options.rate).publish(options.out)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", default="200mbit", help="of the link (200mbit)")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where communication.json and convergence.json are")
    parser.add_argument("--out", type=Path, help="where the JSON goes (out/benchmarks/choice.json)")
    return parser.parse_args()


def collected(speed: dict[str, Any], quality: dict[str, Any], rate: str) -> list[Choice]:
    """Join both by system; those that only one of them has are left out."""
    steps = {found["steps"] for found in quality.values()}
    if steps - {TRAINING_STEPS}:
        sys.exit(f"choice: convergence.json is of {sorted(steps)} steps and the speed of {TRAINING_STEPS}; run "
                 f"benchmarks/convergence.py with --steps {TRAINING_STEPS}")
    return [Choice(name=name, times=times[rate], above=quality[QUALITY[name]]["above"] or [0.0])
            for name, times in {"ddp": {rate: [1.0]}, **speed["training times"]}.items()
            if rate in times and name in QUALITY and QUALITY[name] in quality]


def outcome(choices: list[Choice], speed: dict[str, Any], quality: dict[str, Any], rate: str) -> Outcome:
    """Lay the choices side by side, the fastest first, and compare ours with the fastest of plain torch."""
    rows = tuple((each.title, spread_ratio(each.times),
                  f"{statistics.fmean(each.above):+.2f} % ({min(each.above):+.2f} to {max(each.above):+.2f})",
                  "yes" if each.learns else "no") for each in sorted(choices, key=lambda each: -each.speed))
    theirs = [each for each in choices if each.of_torch and each.learns]
    ours = [each for each in choices if not each.of_torch and each.learns]
    targets: list[Target] = []
    if theirs and ours:
        best, other = max(ours, key=lambda each: each.speed), max(theirs, key=lambda each: each.speed)
        targets.append(Target(what=f"{rate}: {best.title} over {other.title}, the fastest "
                                   f"of plain torch that learns as well", low=LEAD, high=float("inf"),
                              measured=best.speed / other.speed))
    made = " and ".join(f"{found['benchmark']} ({found['machine']['date']}, commit {found['machine']['commit']})"
                        for found in (speed, quality))
    return Outcome(benchmark="choice", command=" ".join(["python", *sys.argv]), targets=tuple(targets),
                   note=f"A training of {TRAINING_STEPS} steps from {made}: the speed of a GPT of 30 M parameters, "
                        f"the loss of one of 3 M. A way learns as well as AdamW where its bits per byte are, in the mean "
                        f"over seeds, at most "
                        f"{WITHIN} % above.",
                   sheets=(Sheet(title=f"At {rate}", rows=rows, columns=(
                       "way", "times DDP, a training", "bits per byte above AdamW", "learns as well")),),
                   raw={each.name: {"times": each.times, "above": each.above} for each in choices})


if __name__ == "__main__":
    main()
