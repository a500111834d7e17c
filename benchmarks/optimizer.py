"""The native optimizer step beside torch's: time, and bytes per second against what plain arithmetic on arrays reaches.

    python benchmarks/optimizer.py [--elements 30000000] [--rounds 15] [--threads 1]

AdamW in fp32, and with bf16 gradients and weights around fp32 masters, where torch casts the gradient, steps, and copies
the rounded weight. Ways take turns; a row is the median of the rounds. The bytes of a row are those that must move.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from outcome import Outcome, Sheet, Target
from torch import Tensor

from shoal.native.step import Rule, step

CONSTANTS = [0.1, 0.95, 0.05, 1e-3, 1.0, 1e-8, 1e-4]
GIGA = 1e9


def main() -> None:
    options = _options()
    torch.set_num_threads(options.threads)
    ways = _ways(options.elements)
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(options.rounds + 1):
        for name, (way, _) in ways.items():
            start = time.perf_counter()
            way()
            if number:  # the first round finds cold pages
                seconds[name].append(time.perf_counter() - start)
    medians = {name: statistics.median(found) for name, found in seconds.items()}
    rates = {name: ways[name][1] * options.elements / medians[name] / GIGA for name in ways}
    stream = rates["copy-add of three arrays"]
    rows = tuple((name, f"{1e3 * medians[name]:.1f}", f"{ways[name][1]}", f"{rates[name]:.1f}",
                  f"{rates[name] / stream:.2f}") for name in ways)
    targets = (
        Target(what="fp32: bytes per second over those of the copy-add", measured=rates["native, fp32"] / stream, low=0.85,
               high=float("inf")),
        Target(what="fp32: times faster than torch's fused AdamW", measured=medians["torch fused, fp32"] /
               medians["native, fp32"], low=1.0, high=float("inf")),
        Target(what="bf16 in and out: times faster than casts around torch's", measured=medians["torch fused, bf16"] /
               medians["native, bf16"], low=1.3, high=float("inf")),
    )
    Outcome(benchmark="optimizer", command=" ".join(["python", *sys.argv]),
            note=f"{options.elements:,} elements, {options.threads} thread(s), {options.rounds} rounds.",
            sheets=(Sheet(title="An optimizer step", rows=rows,
                          columns=("way", "median ms", "bytes an element", "GB/s", "x copy-add")),),
            targets=targets, raw=seconds).publish(options.out)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--elements", type=int, default=30_000_000, help="length of the slice (30 million)")
    parser.add_argument("--rounds", type=int, default=15, help="turns of each way (15)")
    parser.add_argument("--threads", type=int, default=1, help="threads (1)")
    parser.add_argument("--out", type=Path, help="where the JSON goes (out/benchmarks/optimizer.json)")
    return parser.parse_args()


def _ways(elements: int) -> dict[str, tuple[Callable[[], None], int]]:
    """Return each way with the bytes an element that it must move."""
    a, b, c = (torch.randn(elements) for _ in range(3))
    return {
        "copy-add of three arrays": (lambda: _copy_add(a, b, c), 12),
        "torch fused, fp32": (_torch(elements, torch.float32), 28),
        "native, fp32": (_native(elements, torch.float32), 28),
        "torch fused, bf16": (_torch(elements, torch.bfloat16), 28),
        "native, bf16": (_native(elements, torch.bfloat16), 28),
    }


def _copy_add(a: Tensor, b: Tensor, c: Tensor) -> None:
    torch.add(a, b, out=c)


def _torch(elements: int, dtype: torch.dtype) -> Callable[[], None]:
    master = torch.nn.Parameter(torch.randn(elements))
    gradient, weight = torch.randn(elements).to(dtype), torch.empty(elements, dtype=dtype)
    optimizer = torch.optim.AdamW([master], lr=1e-3, fused=True)

    def way() -> None:
        master.grad = gradient.to(torch.float32)
        optimizer.step()
        if dtype != torch.float32:
            weight.copy_(master.detach())

    return way


def _native(elements: int, dtype: torch.dtype) -> Callable[[], None]:
    master, gradient = torch.randn(elements), torch.randn(elements).to(dtype)
    moments = [torch.zeros(elements), torch.zeros(elements)]
    weight = None if dtype == torch.float32 else torch.empty(elements, dtype=dtype)
    return lambda: step(Rule.ADAMW, master, moments, gradient, CONSTANTS, weight=weight)


if __name__ == "__main__":
    main()
