"""The choice on a slow link: of all ways whose loss is within 0.5 % of AdamW's, which is fastest, and by how much.

    python benchmarks/choice.py [--rate 200mbit] [--quality out/benchmarks/convergence-30m.json]

Reads what communication.py (speed) and convergence.py (quality) left in out/benchmarks: both are of the same training, with
the same share of steps that are uncompressed. A way is held against AdamW in the same program, and learns as well where the
interval of the mean over seeds lies below the limit. NAdam is taken to be as fast as the fused AdamW of DDP.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from catalogue import DDP_COMPRESSING, SYSTEMS, TORCH_PIPELINES, TRAINING_STEPS
from communication import LATE_TITLE
from convergence import WITHIN, text
from results import FOLDER, Outcome, Sheet, Target, interval, quartiles, spread_ratio

LEAD = 1.25
SHOAL, DDP = "AdamW (zero1)", "DDP, AdamW, hook none"
NADAM = "-nadam"
QUALITY = {
    "ddp": DDP, **dict.fromkeys(TORCH_PIPELINES, DDP), "shoal-1": SHOAL,
    **{f"shoal-pipeline-{name}": SHOAL for name in ("1f1b", "zb-h2-all")},
    f"ddp{NADAM}": f"DDP, AdamW, hook none{NADAM}",
    **{f"ddp-{hook}": f"DDP, AdamW, hook {hook}" for hook in ("fp16", "bf16", "local")},
    **{f"ddp-powersgd-{rank}{way}{late}{nadam}": f"DDP, AdamW, hook powersgd-{rank}{late}{nadam}"
       for rank in (1, 4) for way in ("", "-ordered") for late in ("", "-late") for nadam in ("", NADAM)},
    "onebit-adam-0": "OneBitAdam (onebit)", "onebit-adam-1": "OneBitAdam (onebit)",
    "zeroone-adam-1": "ZeroOneAdam (zeroone)", "onebit-lamb-1": "OneBitLamb (onebit-lamb)",
}
"""The training of convergence.py in which the quality of a system is measured; pipelines are AdamW in fp32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A way to train: how fast in times DDP, by round, and its bits per byte above AdamW in percent, by seed."""

    name: str
    times: list[float]
    above: list[float]

    @property
    def system(self) -> str:
        return self.name.removesuffix(NADAM).removesuffix("-late")

    @property
    def title(self) -> str:
        late, nadam = self.name.removesuffix(NADAM).endswith("-late"), self.name.endswith(NADAM)
        return SYSTEMS[self.system].title + (LATE_TITLE if late else "") + (", NAdam" if nadam else "")

    @property
    def of_torch(self) -> bool:
        return self.system in ("ddp", *DDP_COMPRESSING, *TORCH_PIPELINES)

    @property
    def speed(self) -> float:
        return statistics.median(self.times)

    @property
    def learns(self) -> bool:
        return interval(self.above)[1] <= WITHIN


def main() -> None:
    options = _options()
    files = options.folder / "communication.json", options.quality or options.folder / "convergence.json"
    speed, quality = (json.loads(file.read_text()) for file in files)
    choices = collected(speed["raw"], quality["raw"], options.rate)
    outcome(choices, speed, quality, options.rate).publish(options.out)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", default="200mbit", help="of the link (200mbit)")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where communication.json and convergence.json are")
    parser.add_argument("--quality", type=Path, help="what convergence.py left (FOLDER/convergence.json)")
    parser.add_argument("--out", type=Path, help="where the JSON goes (out/benchmarks/choice.json)")
    return parser.parse_args()


def collected(speed: dict[str, Any], quality: dict[str, Any], rate: str) -> list[Choice]:
    """Join both by system; those that only one of them has are left out."""
    steps = {found["steps"] for found in quality.values()}
    if steps - {TRAINING_STEPS}:
        sys.exit(f"choice: convergence.json is of {sorted(steps)} steps and the speed of {TRAINING_STEPS}; run "
                 f"benchmarks/convergence.py with --steps {TRAINING_STEPS}")
    times = {"ddp": {rate: [1.0]}, **speed["training times"]}
    return [Choice(name=name, times=times[name.removesuffix(NADAM)][rate], above=quality[kind]["above"] or [0.0, 0.0])
            for name, kind in QUALITY.items() if rate in times.get(name.removesuffix(NADAM), {}) and kind in quality]


def outcome(choices: list[Choice], speed: dict[str, Any], quality: dict[str, Any], rate: str) -> Outcome:
    """Lay the choices side by side, the fastest first, and compare ours with the fastest of plain torch."""
    rows = tuple((each.title, spread_ratio(each.times), text(each.above), "yes" if each.learns else "no")
                 for each in sorted(choices, key=lambda each: -each.speed))
    theirs = [each for each in choices if each.of_torch and each.learns]
    ours = [each for each in choices if not each.of_torch and each.learns]
    targets: list[Target] = []
    if theirs and ours:
        best, other = max(ours, key=lambda each: each.speed), max(theirs, key=lambda each: each.speed)
        (low, _, high), (least, _, most) = quartiles(best.times), quartiles(other.times)
        targets.append(Target(what=f"{rate}: {best.title} over {other.title}, the fastest "
                                   f"of plain torch that learns as well", low=LEAD, high=float("inf"),
                              measured=best.speed / other.speed, spread=(low / most, high / least)))
    model = next(iter(quality["raw"].values()))["model"]
    made = " and ".join(f"{found['benchmark']} ({found['machine']['date']}, commit {found['machine']['commit']})"
                        for found in (speed, quality))
    return Outcome(benchmark="choice", command=" ".join(["python", *sys.argv]), targets=tuple(targets),
                   note=f"A training of {TRAINING_STEPS} steps from {made}: the speed of a GPT of 30 M parameters, the loss "
                        f"of one of {model}. A way learns as well as AdamW where the interval of the mean over seeds ends "
                        f"at most {WITHIN} % above. The spread of the target is of the quartiles of both.",
                   sheets=(Sheet(title=f"At {rate}", rows=rows, columns=(
                       "way", "times DDP, a training", "bits per byte above AdamW", "learns as well")),),
                   raw={each.name: {"times": each.times, "above": each.above} for each in choices})


if __name__ == "__main__":
    main()
