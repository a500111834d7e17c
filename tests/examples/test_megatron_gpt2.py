"""A script in Megatron's form: tensor ranks change neither its losses nor its checkpoints."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from .scripts import run_script

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "megatron_gpt2"


def train(folder: Path, ranks: int, model_ranks: int, iterations: int, *options: str) -> tuple[list[float], str]:
    """Run the example, and return the losses of training, then that of validation, and all that it printed."""
    said = run_script(EXAMPLE / "train.py", ranks, "--model-parallel-size", str(model_ranks), "--deepspeed_config",
                      str(EXAMPLE / "gpt2.json"), "--seq-length", "32", "--log-interval", "4", "--train-iters",
                      str(iterations), *options, folder=folder)
    return [float(loss) for loss in re.findall(r"lm loss ([\d.]+)", said)], said


def test_two_model_ranks_train_as_one_which_loads_their_checkpoint(tmp_path: Path) -> None:
    expected, whole = train(tmp_path, 2, 1, 8)
    losses, said = train(tmp_path, 4, 2, 8, "--save", "saved")
    assert losses == pytest.approx(expected, abs=2e-4) and losses[1] < losses[0]
    assert "2 data x 2 model ranks, ZeRO stage 1" in said
    parameters = [int(found.replace(",", "")) for found in re.findall(r"([\d,]+) parameters", whole + said)]
    assert max(parameters[2:]) < 0.6 * min(parameters[:2])
    again, _ = train(tmp_path, 2, 1, 8, "--load", "saved")
    assert again == pytest.approx(losses[-1:], abs=2e-4), "all steps were taken: what is left is validation"


def test_sizes_that_do_not_divide_are_refused(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-m", "shoal", "run", "--ranks", "2", str(EXAMPLE / "train.py"),
                           "--model-parallel-size", "3", "--deepspeed_config", str(EXAMPLE / "gpt2.json")], cwd=tmp_path,
                          capture_output=True, text=True)
    assert done.returncode and "--model-parallel-size: got 3; the 2 ranks do not divide by it" in done.stderr
