"""The training example, end to end: two ranks, a few steps, then more of them from the checkpoint at another stage."""

import csv
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def train(folder: Path, *options: str, stage: int) -> str:
    """Run the example in `folder` on a corpus that is there already, and return what it printed."""
    command = [sys.executable, "-m", "shoal", "run", "--ranks", "2", str(ROOT / "examples/gpt/train.py"),
               "--shoal-config", str(ROOT / f"examples/gpt/zero{stage}.json"), "--model", "tiny", "--block", "32",
               *options]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, str]:
    """The folder of two runs, and what each printed: 4 steps at stage 2, then on to 6 at stage 3."""
    folder = tmp_path_factory.mktemp("run")
    return folder, train(folder, "--steps", "4", stage=2), train(folder, "--steps", "6", "--resume", stage=3)


def test_a_line_is_printed_for_every_step(runs: tuple[Path, str, str]) -> None:
    assert [f"step {step}/4" in runs[1] for step in range(1, 5)] == [True] * 4


def test_a_resumed_run_goes_on_with_the_next_step(runs: tuple[Path, str, str]) -> None:
    assert "going on after step 4" in runs[2]
    assert "step 4/6" not in runs[2] and "step 5/6" in runs[2] and "step 6/6" in runs[2]


def test_the_curve_holds_every_step_of_both_runs_once(runs: tuple[Path, str, str]) -> None:
    rows = list(csv.DictReader((runs[0] / "out/gpt/curve.csv").read_text().splitlines()))
    assert [row["step"] for row in rows] == ["1", "2", "3", "4", "5", "6"]
    assert all(4 < float(row["bits_per_byte"]) < 9 for row in rows)


def test_the_report_compares_with_entropy_and_xz_and_the_formula(runs: tuple[Path, str, str]) -> None:
    for said in ("order-0 entropy", "xz -9", "GPT tiny", "Written by the model", "formula", "measured"):
        assert said in runs[1]
    assert "1.000" in next(line for line in runs[1].splitlines() if "total" in line)


def test_the_curve_is_a_picture(runs: tuple[Path, str, str]) -> None:
    assert (runs[0] / "out/gpt/loss.png").read_bytes().startswith(b"\x89PNG")


def test_the_report_ends_with_the_command_that_trains_on(runs: tuple[Path, str, str]) -> None:
    command = runs[1].strip().splitlines()[-1].split()
    assert command[1:3] == ["run", "--ranks"] and {"--resume", "--steps", "8"} <= set(command)
    assert (runs[0] / "out/gpt/checkpoints/latest").read_text().strip() == "global_step6"
