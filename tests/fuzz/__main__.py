"""Train random compositions and compare them with plain PyTorch: `make fuzz SEED=s COUNT=n`."""

from __future__ import annotations

import argparse
import sys
import time
import traceback
import warnings
from collections.abc import Sequence

from .draw import draw
from .run import differences

SHOWN = 12
"""Differences of one composition that are printed."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return how many compositions differ, 1 at most."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--seed", type=int, default=None, help="the first seed (default: drawn from the clock)")
    parser.add_argument("--count", type=int, default=12, help="how many seeds from there on")
    given = parser.parse_args(arguments)
    first = time.time_ns() // 1_000_000 % 1_000_000_000 if given.seed is None else given.seed
    print(f"fuzz: {given.count} compositions, the seeds {first} to {first + given.count - 1}", flush=True)
    failed = [seed for seed in range(first, first + given.count) if not _agrees(seed, seed - first + 1, given.count)]
    print(f"fuzz: {given.count - len(failed)} of {given.count} compositions train as plain PyTorch does"
          + (f"; the seeds {', '.join(map(str, failed))} do not" if failed else ""))
    return int(bool(failed))


def _agrees(seed: int, number: int, count: int) -> bool:
    """Run one composition and say how it went."""
    began = time.monotonic()
    composition = draw(seed)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = differences(composition)
    except Exception:
        found = [traceback.format_exc()]
    seconds = time.monotonic() - began
    print(f"{number}/{count} seed {seed}: {'DIFFERS' if found else 'ok'} ({seconds:.1f} s) {composition}", flush=True)
    for line in found[:SHOWN]:
        print(f"    {line}")
    if found:
        print(f"    {len(found)} differences; reproduce: make fuzz SEED={seed} COUNT=1", flush=True)
    return not found


if __name__ == "__main__":
    sys.exit(main())
