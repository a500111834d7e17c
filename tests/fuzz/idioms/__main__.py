"""Run random programs of idioms and compare them with plain PyTorch: `make fuzz-idioms SEED=s COUNT=n`."""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence

from .program import draw
from .run import Outcome, run_many

TOGETHER = 20
"""Programs that one process runs, one after the other."""
SHOWN = 40
"""Lines of a failure that are printed."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return whether a program failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.idioms", description=__doc__)
    parser.add_argument("--seed", type=int, default=None, help="the first seed (default: drawn from the clock)")
    parser.add_argument("--count", type=int, default=100, help="how many seeds from there on")
    parser.add_argument("--verbose", action="store_true", help="print every program, and why one was refused")
    given = parser.parse_args(arguments)
    first = time.time_ns() // 1_000_000 % 1_000_000_000 if given.seed is None else given.seed
    print(f"fuzz-idioms: {given.count} programs, the seeds {first} to {first + given.count - 1}", flush=True)
    kinds = Counter[str]()
    for outcome in _outcomes([*range(first, first + given.count)]):
        kinds[outcome.kind] += 1
        if given.verbose or outcome.kind == "FAILS":
            print(f"seed {outcome.seed}: {outcome.kind}; {draw(outcome.seed)}", flush=True)
            for line in outcome.text.splitlines()[-SHOWN:]:
                print(f"    {line}", flush=True)
        if outcome.kind == "FAILS":
            print(f"    reproduce: make fuzz-idioms SEED={outcome.seed} COUNT=1", flush=True)
    print(f"fuzz-idioms: {kinds['equal']} programs do what plain PyTorch does, {kinds['refused']} end in a ShoalError, "
          f"{kinds['invalid']} in an error of plain PyTorch too; {kinds['FAILS']} fail")
    return int(kinds["FAILS"] > 0)


def _outcomes(seeds: list[int]) -> Iterator[Outcome]:
    """Run the programs, those of one number of ranks together."""
    by_ranks: dict[int, list[int]] = {}
    for seed in seeds:
        by_ranks.setdefault(draw(seed).ranks, []).append(seed)
    for ranks, alike in sorted(by_ranks.items()):
        for start in range(0, len(alike), TOGETHER):
            yield from run_many(alike[start:start + TOGETHER], ranks)


if __name__ == "__main__":
    sys.exit(main())
