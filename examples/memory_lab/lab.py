"""Where the memory of training goes: the same model at ZeRO stages 0 to 3, formula and measurement side by side.

    python examples/memory_lab/lab.py --ranks 2

Each stage runs in processes of its own; `probe.py` is what their ranks do.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import torch
from rich.console import Console

sys.path.insert(0, str(Path(__file__).parents[1] / "gpt"))  # the model and its meter are those of examples/gpt

from chart import Row, picture, table, text_picture
from model import PRESETS
from probe import Case, Finding, probe
from shoal.testing import run_ranks
from shoal.zero.placement import STAGES, state_bytes

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def main() -> None:
    args = arguments()
    os.environ.setdefault("MALLOC_MMAP_THRESHOLD_", str(1 << 20))  # glibc: what is freed leaves the process at once
    console = Console()
    rows: list[Row] = []
    for stage in args.stages:
        case = Case(stage=stage, model=args.model, microbatch=args.microbatch, block=args.block, dtype=args.dtype,
                    steps=args.steps)
        with console.status(f"stage {stage}: {args.ranks} ranks"):
            rows.append(row(case, args.ranks, run_ranks(args.ranks, probe, case)))
    title = (f"GPT {args.model}, {args.dtype}, AdamW, {args.ranks} ranks, "
             f"microbatch {args.microbatch} x {args.block} bytes")
    args.out.mkdir(parents=True, exist_ok=True)
    picture(args.out / "memory.png", rows, title)
    for part in (table(rows, title), text_picture(rows)):
        console.print()
        console.print(part)
    console.print()
    console.print(f"The same as a picture: {args.out / 'memory.png'}", highlight=False, soft_wrap=True)


def row(case: Case, ranks: int, findings: list[Finding]) -> Row:
    """Lay the formula for `case` beside what was found on the rank that took most."""
    most = max(findings, key=lambda finding: finding.peak)
    compute = DTYPES[case.dtype]
    return Row(stage=case.stage, ranks=ranks, microbatch=case.microbatch, parameters=most.parameters, found=most,
               formula_at_first=state_bytes(case.stage, most.parameters, ranks, compute=compute, moments=0),
               formula=state_bytes(case.stage, most.parameters, ranks, compute=compute))


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stages", type=int, nargs="+", choices=range(len(STAGES)), default=range(len(STAGES)),
                        help="ZeRO stages (default: all)")
    parser.add_argument("--ranks", type=int, default=2, help="processes that share the model (default 2)")
    parser.add_argument("--model", choices=PRESETS, default="30m", help="size of the model (default 30m)")
    parser.add_argument("--microbatch", type=int, default=1, help="sequences of a rank at a time (default 1)")
    parser.add_argument("--block", type=int, default=128, help="bytes of a sequence (default 128)")
    parser.add_argument("--dtype", choices=DTYPES, default="bf16", help="dtype of weights and gradients (default bf16)")
    parser.add_argument("--steps", type=int, default=3, help="steps to train for the peak (default 3)")
    parser.add_argument("--out", type=Path, default=Path("out/memory_lab"), help="folder of the picture")
    return parser.parse_args()


if __name__ == "__main__":
    main()
