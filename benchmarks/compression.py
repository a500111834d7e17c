"""Packing to one bit an element, and unpacking, beside one pass of torch's plain arithmetic over the same memory.

    python benchmarks/compression.py [--elements 30000000] [--rounds 15] [--threads 1]

Ways take turns; a row is the median of the rounds, and a target the median of the ratios within each round. The bytes of
a row are those that must move: what is read and written of vectors, packed bytes left out (an eighth of a byte an element).
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from progress import progress
from results import Outcome, Sheet, Target

from shoal.onebit import difference, pack, packed_bytes, reference, unpack

GIGA = 1e9
MULTIPLY, ADD = "x.mul_(1.0001), fp32", "x.add_(1.0), fp32"
PACK, UNPACK, UNPACK_ADD = "pack, fp32", "unpack, fp32", "unpack and add, fp32"
LIMIT = 1.3


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """Something that takes turns: a call, and the bytes an element that it must move."""

    call: Callable[[], object]
    bytes: int

    def seconds(self) -> float:
        """Let it take its turn, and return what that took."""
        start = time.perf_counter()
        self.call()
        return time.perf_counter() - start


def main() -> None:
    options = _options()
    torch.set_num_threads(options.threads)
    elements = options.elements - options.elements % 16
    ways = _ways(elements)
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    with progress() as tell:
        for number in range(options.rounds + 1):
            tell(f"round {number} of {options.rounds}")
            for name, way in ways.items():
                taken = way.seconds()
                if number:  # the first round finds cold pages, and builds
                    seconds[name].append(taken)
    medians = {name: statistics.median(found) for name, found in seconds.items()}
    rows = tuple((name, f"{1e3 * medians[name]:.1f}", f"{way.bytes}", f"{way.bytes * elements / medians[name] / GIGA:.1f}")
                 for name, way in ways.items())
    targets = tuple(
        Target.over([mine / other for mine, other in zip(seconds[ours], seconds[theirs], strict=True)], high=LIMIT,
                    what=f"{ours}: seconds over those of {theirs}")
        for ours, theirs in ((PACK, MULTIPLY), (UNPACK, ADD), (UNPACK_ADD, ADD)))
    Outcome(benchmark="compression", command=" ".join(["python", *sys.argv]),
            note=f"{elements:,} elements, {options.threads} thread(s), {options.rounds} rounds.",
            sheets=(Sheet(title="Packing and unpacking", rows=rows,
                          columns=("way", "median ms", "bytes an element", "GB/s")),),
            targets=targets, raw=seconds).publish(options.out)


def _ways(elements: int) -> dict[str, Way]:
    """Return the ways, in an order in which none finds in a cache what the one before it used."""
    vector, target, master = (torch.randn(elements) for _ in range(3))
    half, weight = torch.randn(elements).bfloat16(), master.bfloat16()
    packed = torch.empty(packed_bytes(elements), dtype=torch.uint8)
    return {
        MULTIPLY: Way(call=lambda: vector.mul_(1.0001), bytes=8),
        ADD: Way(call=lambda: target.add_(1.0), bytes=8),
        PACK: Way(call=lambda: pack(vector, packed), bytes=8),
        UNPACK: Way(call=lambda: unpack(packed, target), bytes=4),
        "x.mul_(1.0001), bf16": Way(call=lambda: half.mul_(1.0001), bytes=4),
        "pack the difference, bf16": Way(call=lambda: difference(master, weight, packed), bytes=6),
        UNPACK_ADD: Way(call=lambda: unpack(packed, target, accumulate=True), bytes=8),
        "pack, bf16": Way(call=lambda: pack(half, packed), bytes=4),
        "torch.sub(master, x, out=y), fp32": Way(call=lambda: torch.sub(master, vector, out=target), bytes=12),
        "unpack and add, bf16": Way(call=lambda: unpack(packed, half, accumulate=True), bytes=4),
        "pack the difference, fp32": Way(call=lambda: difference(master, vector, packed), bytes=8),
        "unpack, fp32, torch": Way(call=lambda: reference.unpack(packed, target, factor=1.0, accumulate=False), bytes=4),
        "pack, fp32, torch": Way(call=lambda: reference.pack(vector, packed), bytes=8),
    }


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--elements", type=int, default=30_000_000, help="length of the vector (30 million)")
    parser.add_argument("--rounds", type=int, default=15, help="turns of each way (15)")
    parser.add_argument("--threads", type=int, default=1, help="threads (1)")
    parser.add_argument("--out", type=Path, help="where the JSON goes (out/benchmarks/compression.json)")
    return parser.parse_args()


if __name__ == "__main__":
    main()
