"""Memory at rest: model state per rank against the formula at every stage and dtype, and its growth over many steps.

    python benchmarks/memory.py [--ranks 2 4] [--steps 1000] [--model 3m]
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import memory_rank
import torch
from progress import progress
from results import Outcome, Sheet, Target

from shoal.testing import run_ranks
from shoal.zero.placement import state_bytes

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
KINDS = ("weight", "gradient", "master", "moments")
STAGES = (0, 1, 2, 3)
EVERY = 10  # steps between two samples of resident memory
SETTLED = 100  # the step after which memory must not grow
MEBI = 1 << 20

Tell = Callable[[str], None]


def main() -> None:
    options = _options()
    os.environ.setdefault("SHOAL_TEST_TIMEOUT", "1800")
    with progress() as tell:
        states = list(_states(options.model, options.ranks, tell))
        tiny = list(_states("tiny", options.ranks, tell))
        growths = list(_growths(options.steps, tell))
    columns = ("ranks, dtype, stage", *(f"{kind} MiB" for kind in KINDS), "total MiB", "formula MiB", "measured / formula",
               "other tensors MiB", "allocator grew MiB", "resident grew MiB")
    flat = ("stage", f"MiB at step {SETTLED}", f"MiB at step {options.steps}", "growth MiB", "slope, bytes a step")
    sheets = (Sheet(title="Model state at rest, the rank that holds most", columns=columns,
                    rows=tuple(state.row for state in states)),
              Sheet(title="The same of the preset tiny", columns=columns, rows=tuple(state.row for state in tiny)),
              Sheet(title="Resident memory over steps, 2 ranks", columns=flat, rows=tuple(row for row, _ in growths)))
    note = (f"Preset {options.model} of examples/gpt, AdamW; measured is the engine's own count of what rests on a rank; "
            f"other tensors are what all tensors of the process have in memory beside it, weights gathered ahead and "
            f"buffers of collectives. The process itself: by how much the bytes that its allocator gave out, without "
            f"pages that the library maps itself, and its resident memory grew over those of a process that has trained "
            f"a tiny model. "
            f"Resident memory: preset tiny.")
    worst = max((state.total / state.formula for state in states), key=lambda ratio: abs(ratio - 1))
    sharded = [state for state in (*states, *tiny) if state.stage == 3]
    targets = (Target(what="model state over the formula, the worst of all", measured=worst, low=0.99, high=1.01),
               Target(what="stage 3: other tensors at rest over the largest unit's buffer, the worst of all", high=2.0,
                      measured=max(state.others / state.largest for state in sharded)),
               Target(what="stage 3, preset tiny: other tensors at rest over the state, the worst of all", high=0.5,
                      measured=max(state.others / state.total for state in tiny if state.stage == 3)),
               Target(what=f"resident memory at step {options.steps} over step {SETTLED}, the worst stage", high=1.01,
                      measured=max(ratio for _, ratio in growths)))
    Outcome(benchmark="memory", command=" ".join(["python", *sys.argv]), note=note, sheets=sheets, targets=targets,
            raw={}).publish(options.out)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=(2, 4), help="numbers of ranks (2 4)")
    parser.add_argument("--steps", type=int, default=1000, help="steps over which resident memory must be flat (1000)")
    parser.add_argument("--model", default="3m", help="preset whose state is counted (3m)")
    parser.add_argument("--out", type=Path, help="where the JSON goes (out/benchmarks/memory.json)")
    options = parser.parse_args()
    if options.steps < 2 * SETTLED:
        parser.error(f"--steps: got {options.steps}; memory settles in {SETTLED}, give at least {2 * SETTLED}")
    return options


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """The bytes that the rank with the most model state holds at rest, and a row about it."""

    stage: int
    total: int
    formula: int
    others: int
    largest: int
    """The buffer of the largest unit, in fp32."""
    row: tuple[str, ...]


def _states(model: str, every: list[int], tell: Tell) -> Iterator[State]:
    """Yield the state for each number of ranks, dtype and stage."""
    for ranks in every:
        for name, dtype in DTYPES.items():
            for stage in STAGES:
                tell(f"model state: {model}, {ranks} ranks, {name}, stage {stage}")
                found = run_ranks(ranks, memory_rank.state, model, stage, name, 2)
                most = max(found, key=lambda facts: sum(facts[kind] for kind in KINDS))
                total = sum(most[kind] for kind in KINDS)
                formula = state_bytes(stage, most["parameters"], ranks, compute=dtype).total
                parts = [*(most[kind] for kind in KINDS), total, formula]
                rest = [most["held"] - total, most["allocated"], most["resident"]]
                yield State(stage=stage, total=total, formula=formula, others=most["held"] - total, largest=most["largest"],
                            row=(f"{ranks}, {name}, {stage}", *(f"{part / MEBI:.2f}" for part in parts),
                                 f"{total / formula:.4f}", *(f"{part / MEBI:.2f}" for part in rest)))


def _growths(steps: int, tell: Tell) -> Iterator[tuple[tuple[str, ...], float]]:
    """Yield a row and final / settled resident memory for each stage."""
    for stage in STAGES:
        tell(f"resident memory over {steps} steps: stage {stage}")
        samples = run_ranks(2, memory_rank.resident, "tiny", stage, steps, EVERY)[0]
        settled = samples[SETTLED // EVERY - 1:]
        x = torch.arange(len(settled), dtype=torch.float64) * EVERY
        y = torch.tensor(settled, dtype=torch.float64)
        slope = float(((x - x.mean()) * (y - y.mean())).sum() / ((x - x.mean()) ** 2).sum())
        growth = settled[-1] - settled[0]
        yield ((str(stage), f"{settled[0] / MEBI:.1f}", f"{settled[-1] / MEBI:.1f}", f"{growth / MEBI:.2f}",
                f"{slope:.0f}"), settled[-1] / settled[0])


if __name__ == "__main__":
    main()
