"""The campaigns for a machine with a GPU run small without one, row by row."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from gpu_campaign import Measured, Scale, missing

from shoal.testing import run_ranks

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def _row(benchmark: str, row: str, path: str) -> Measured:
    sys.path.insert(0, str(BENCHMARKS))
    return __import__(benchmark).ROWS[row].run(Scale(device=torch.device("cpu"), small=True, path=path))


@pytest.mark.parametrize(("benchmark", "row", "has"), [
    ("gpu_facts", "copies", "up, pinned GB/s"), ("gpu_facts", "pages", "GB/s"), ("gpu_facts", "stages", "all on disk"),
    ("gpu_steps", "stage-0", "ms x1"), ("gpu_steps", "first-of-8-stage-3", "mfu x1"),
    ("gpu_states", "host-all", "host GiB"), ("gpu_states", "save", "loaded s"),
])
def test_a_row_of_a_campaign_runs_small_on_the_cpu(benchmark: str, row: str, has: str, tmp_path: Path) -> None:
    assert has in run_ranks(1, _row, benchmark, row, str(tmp_path))[0]


def test_a_campaign_writes_what_its_rows_have_measured(tmp_path: Path) -> None:
    out = tmp_path / "found.json"
    command = [sys.executable, BENCHMARKS / "gpu_facts.py", "--small", "--rows", "matmul", "--out", out, "--path", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(out.read_text())["raw"]["matmul"]["TFLOP/s"] > 0


SLOW = """
import sys
sys.path.insert(0, {benchmarks!r})
from gpu_campaign import Row, campaign, tell

def broken(scale):
    tell({{"first": 1.0}})
    tell({{"first": 1.0, "second": 2.0}})
    raise ValueError("no third")

def working(scale):
    return {{"only": 3.0}}

campaign("broken", __file__, "", {{"broken": Row(run=broken), "working": Row(run=working)}})
"""


def test_a_row_that_fails_keeps_what_it_has_told(tmp_path: Path) -> None:
    script, out = tmp_path / "slow.py", tmp_path / "found.json"
    script.write_text(SLOW.format(benchmarks=str(BENCHMARKS)))
    command = [sys.executable, script, "--small", "--out", out, "--path", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    found = json.loads(out.read_text())["raw"]
    assert done.returncode == 1 and found["working"] == {"only": 3.0}
    assert found["broken"].pop("stderr")
    assert found["broken"] == {"first": 1.0, "second": 2.0, "failure": "ValueError: no third"}


def test_a_campaign_without_its_packages_ends_at_once(tmp_path: Path) -> None:
    code = (f"import sys; sys.path.insert(0, {str(BENCHMARKS)!r}); sys.argv = ['x', '--small']; import gpu_campaign as it; "
            f"it.CARRIED += ('no_such_package',); it.campaign('facts', '', '', {{}})")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 1
    assert "no no_such_package: carry the wheels" in done.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="here is a GPU")
def test_a_campaign_without_a_gpu_says_what_is_missing() -> None:
    assert any("no CUDA device" in line for line in missing())
