"""Run tests that were written for the CPU on the late device, once for each seed; exit with 1 if any failed.

    python -m tests.late --seed 7 --count 20          all of SUITES, 20 times
    python -m tests.late --count 2 --share 40         each 40th test, another one for each seed
    python -m tests.late tests/zero/test_parity.py    these tests

A failure prints the seed and the tests; the same seed draws the same order of tasks in every rank.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time

from tests.late.build import NoCompiler, build

SUITES = (
    "tests/zero/test_parity.py", "tests/zero/test_cost.py", "tests/zero/test_tiers.py", "tests/zero/test_saved_tensors.py",
    "tests/zero/test_replica_sums.py",
    "tests/tier", "tests/pipeline/test_training.py", "tests/pipeline/test_engine.py", "tests/engine/test_loop.py",
    "tests/engine/test_tiers.py", "tests/engine/test_moments.py", "tests/zero/test_step_in_backward.py",
    "tests/engine/test_step_in_backward.py", "tests/checkpoint/test_checkpoint_ranks.py",
    "tests/checkpoint/test_checkpoint_random.py", "tests/activation",
)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.late", description=__doc__.splitlines()[0])
    parser.add_argument("tests", nargs="*", default=SUITES)
    parser.add_argument("--seed", type=int, default=int(time.time()) % 1_000_000, help="the first seed (default: the clock)")
    parser.add_argument("--count", type=int, default=20)
    parser.add_argument("--share", type=int, default=1, help="run one test in so many")
    given = parser.parse_args()
    try:
        build()
    except NoCompiler as error:
        print(f"not run: {error}")
        return 1
    failed = 0
    for seed in range(given.seed, given.seed + given.count):
        environment = {**os.environ, "SHOAL_TEST_DEVICE": "late", "SHOAL_TEST_SEED": str(seed),
                       "SHOAL_TEST_SHARE": str(given.share)}
        begin = time.monotonic()
        command = [sys.executable, "-m", "pytest", "-q", "--tb=short", "-p", "no:cacheprovider", *given.tests]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        lines = done.stdout.strip().splitlines()
        print(f"seed {seed}: {lines[-1] if lines else done.stderr.strip()} ({time.monotonic() - begin:.0f} s)", flush=True)
        if done.returncode:
            failed += 1
            print("\n".join(lines[-60:]))
            share = f" SHARE={given.share}" if given.share > 1 else ""
            print(f"reproduce: make test-late SEED={seed} COUNT=1{share}", flush=True)
    print(f"{given.count - failed} of {given.count} seeds passed")
    return int(failed > 0)


if __name__ == "__main__":
    raise SystemExit(main())
