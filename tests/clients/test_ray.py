"""Ray Train runs the example, and starts it again from its last checkpoint; `make ray` installs Ray."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".venv-ray/bin/python"

pytestmark = pytest.mark.skipif(not (ROOT / ".venv-ray/.installed").exists(), reason="`make ray` builds .venv-ray")


def trained(*options: str) -> str:
    """Return the last line of the example."""
    done = subprocess.run([PYTHON, ROOT / "examples/cluster/ray_train.py", *options], capture_output=True, text=True,
                          env={**os.environ, "RAY_USAGE_STATS_ENABLED": "0", "OMP_NUM_THREADS": "1"}, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return next(line for line in reversed(done.stdout.splitlines()) if " ranks, " in line)


def test_workers_that_ray_starts_again_end_as_without_a_failure() -> None:
    alone, again = trained(), trained("--fail-at", "25")
    assert alone.startswith("2 ranks, 40 steps from step 0")
    assert again == alone.replace("40 steps from step 0", "20 steps from step 20")
