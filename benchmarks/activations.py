"""Where saved tensors rest until backward: the time of a step of each way beside keeping everything, and its memory.

    python benchmarks/activations.py [--path FOLDER] [--rounds 7] [--model 30m] [--microbatch 4] [--length 256]

One rank at stage 0, fp32, one thread, the GPT of examples/gpt. The engines are alive together and take turns, after two
turns that are not counted; a ratio is the median of the ratios of the rounds. `on disk` rests saved tensors in a file below
`--path`. Memory is the growth of a process's resident memory in the forward and backward of a warm step, each way in a
process of its own: it holds gradients and scratch space beside what autograd saves. `budget` is asked for the share of what
keeping everything takes; its peak is what the engine expects of saved tensors by the bytes that it counted.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from progress import progress
from results import Outcome, Sheet, Target, quartiles
from workloads import workload

import shoal
from shoal.activation import RecomputeMode
from shoal.tier import trim

KEEP, SELECTIVE, FULL, DISK = "kept", "selective recompute", "full recompute", "on disk"
SHARES = (0.75, 0.5)
UNLIMITED = str(64 * 10**9)
MEBI = 1 << 20


def section(way: str, path: Path) -> dict[str, Any]:
    """Return the section `activation_checkpointing` of a way; any other name is a budget in bytes."""
    named = {KEEP: {}, SELECTIVE: {"recompute": "selective"}, FULL: {"recompute": "full"},
             DISK: {"rest": "nvme", "nvme_path": str(path)}}
    return named[way] if way in named else {"budget": int(way)}


class Training:
    """One engine in training on the same batch; `step` is a turn."""

    def __init__(self, way: str, options: argparse.Namespace):
        self._load = workload(options.model, microbatch=options.microbatch, length=options.length)
        self._batch = self._load.batch(0, 0)
        torch.manual_seed(0)
        self.engine = shoal.initialize(model=self._load.build(), config={
            "train_micro_batch_size_per_gpu": options.microbatch, "log_level": "error", "gradient_clipping": 1.0,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
            "activation_checkpointing": section(way, options.path)})[0]

    def passes(self) -> float:
        """Run forward and backward; return the loss."""
        tokens, targets = self._batch
        loss = self._load.loss(self.engine(tokens), targets)
        self.engine.backward(loss)
        return loss.item()

    def step(self) -> float:
        """Run a whole step; return the loss."""
        loss = self.passes()
        self.engine.step()
        return loss


def child(way: str, options: argparse.Namespace) -> None:
    """Print the growth of the resident memory in the passes of a warm step, and what a budget expects, in bytes."""
    training = Training(way, options)
    for _ in range(3):
        training.step()
    gc.collect()
    trim()  # what earlier steps have freed is not there already
    before = _resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    training.passes()
    grown = _resident("VmHWM") - before
    training.engine.step()
    budget = None if training.engine.activations is None else training.engine.activations.budget
    modes = [] if budget is None else [each.recompute.value for choice in budget.choices for each in choice]
    expected = 0 if budget is None else budget.expected
    sys.stdout.write(json.dumps({"grown": grown, "expected": expected, "modes": modes}) + "\n")


def _resident(key: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key))
    return int(line.split()[1]) * 1024


def alone(way: str, options: argparse.Namespace) -> dict[str, Any] | None:
    """Return what `child` prints in a process of its own; None for a budget that full recompute exceeds."""
    command = [sys.executable, __file__, "--child", way, "--model", options.model, "--microbatch", str(options.microbatch),
               "--length", str(options.length), "--path", str(options.path)]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        if "with every block recomputed" in done.stderr:
            return None
        sys.exit(done.stderr)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    options = _options()
    torch.set_num_threads(1)
    if options.child:
        child(options.child, options)
        return
    ways = (KEEP, SELECTIVE, FULL, DISK)
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    losses: dict[str, list[float]] = {way: [] for way in ways}
    with progress() as tell:
        trainings = {way: Training(way, options) for way in ways}
        for number in range(options.rounds + 2):
            for way, training in trainings.items():
                tell(f"{way}: round {number} of {options.rounds + 1}")
                begun = time.perf_counter()
                losses[way].append(training.step())
                if number > 1:
                    seconds[way].append(time.perf_counter() - begun)
        for training in trainings.values():
            training.engine.destroy()
        tell("memory of each way")
        memory = {way: found for way in (*ways, UNLIMITED) if (found := alone(way, options)) is not None}
        tell("budgets")
        most = memory[UNLIMITED]["expected"]
        limits = [str(int(share * most)) for share in SHARES]
        budgets = {limit: found for limit in limits if (found := alone(limit, options)) is not None}
    ratios = {way: [own / kept for own, kept in zip(seconds[way], seconds[KEEP], strict=True)] for way in ways}
    rows: list[tuple[str, ...]] = []
    for way in ways:
        low, middle, high = quartiles(ratios[way])
        rows.append((way, f"{1e3 * statistics.median(seconds[way]):.0f}", f"{middle:.3f}", f"{low:.3f} to {high:.3f}",
                     f"{memory[way]['grown'] / MEBI:.0f}", str(losses[way] == losses[KEEP])))
    asked = tuple((f"{int(limit) / MEBI:.1f}", f"{found['expected'] / MEBI:.1f}", f"{found['grown'] / MEBI:.0f}",
                   ", ".join(f"{found['modes'].count(mode.value)} {mode.value}" for mode in RecomputeMode))
                  for limit, found in budgets.items())
    targets = [
        Target.over(ratios[SELECTIVE], what="selective recompute: time, x kept", high=1.05),
        Target.over(ratios[DISK], what="saved tensors on disk: time, x kept", high=1.10),
        *(Target(what=f"all losses of '{way}' are those of '{KEEP}', bitwise", measured=float(losses[way] == losses[KEEP]),
                 high=1, low=1) for way in ways[1:]),
        *(Target(what=f"a budget of {int(limit) / MEBI:.1f} MiB: expected peak, share of it",
                 measured=found["expected"] / int(limit), low=0.9, high=1.0) for limit, found in budgets.items())]
    columns = ("saved tensors", "median ms", "x kept", "quartiles", "growth MiB", "same losses")
    sheets = (Sheet(title="A step", columns=columns, rows=tuple(rows)),
              Sheet(title="Budgets", columns=("asked MiB", "expected peak MiB", "growth MiB", "blocks"), rows=asked))
    note = (f"GPT {options.model}, {options.microbatch} x {options.length} tokens, one rank, stage 0, fp32, one thread; "
            f"{options.rounds} rounds. Keeping everything takes {most / MEBI:.1f} MiB of saved tensors.")
    Outcome(benchmark="activations", command=" ".join(["python", *sys.argv]), note=note, sheets=sheets,
            targets=tuple(targets), raw={"seconds": seconds, "memory": memory, "budgets": budgets}).publish(options.out)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--path", type=Path, default=Path("out/benchmarks/disk"), help="folder of the file of saved tensors")
    parser.add_argument("--rounds", type=int, default=7, help="turns of each way that count (7)")
    parser.add_argument("--model", default="30m", help="a preset of examples/gpt (30m)")
    parser.add_argument("--microbatch", type=int, default=4, help="sequences (4)")
    parser.add_argument("--length", type=int, default=256, help="tokens of a sequence (256)")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help="where the JSON goes (out/benchmarks/activations.json)")
    options = parser.parse_args()
    options.path.mkdir(parents=True, exist_ok=True)
    return options


if __name__ == "__main__":
    main()
