"""The training example, end to end: two ranks, a few steps, then the last of them again from a checkpoint."""

import csv
import json
import sys
from argparse import Namespace
from dataclasses import dataclass
from pathlib import Path

import pytest

from shoal.testing import run_ranks

from .scripts import run_script

EXAMPLE = Path(__file__).parents[2] / "examples/gpt"


def train(folder: Path, *options: str, stage: int) -> str:
    """Run the example in `folder` on a corpus that is there already, and return what it printed."""
    return run_script(EXAMPLE / "train.py", 2, "--shoal-config", str(EXAMPLE / f"zero{stage}.json"), "--model", "tiny",
                      "--block", "32", *options, folder=folder)


@dataclass(frozen=True, slots=True, kw_only=True)
class Runs:
    """4 steps at stage 2; then its last two once more, at stage 3, from the checkpoint between."""

    out: Path
    said: str
    bits: dict[int, float]
    said_again: str
    bits_again: dict[int, float]


def curve(out: Path) -> dict[int, float]:
    rows = csv.DictReader((out / "curve.csv").read_text().splitlines())
    return {int(row["step"]): float(row["bits_per_byte"]) for row in rows}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    folder = tmp_path_factory.mktemp("run")
    out = folder / "out/gpt-tiny"
    said = train(folder, "--steps", "4", "--save-every", "2", stage=2)
    bits = curve(out)
    (out / "checkpoints/latest").write_text("global_step2")
    said_again = train(folder, "--steps", "4", "--resume", stage=3)
    return Runs(out=out, said=said, bits=bits, said_again=said_again, bits_again=curve(out))


def test_a_line_is_printed_for_every_step(runs: Runs) -> None:
    assert [f"step {step}/4" in runs.said for step in range(1, 5)] == [True] * 4


def test_the_curve_holds_every_step_once(runs: Runs) -> None:
    assert list(runs.bits) == list(runs.bits_again) == [1, 2, 3, 4]
    assert all(4 < bits < 9 for bits in runs.bits.values())


def test_a_resumed_run_repeats_what_the_first_one_did_at_another_stage_too(runs: Runs) -> None:
    assert "going on after step 2" in runs.said_again and "step 2/4" not in runs.said_again
    assert runs.bits_again == pytest.approx(runs.bits, abs=1e-5)


def test_the_report_compares_with_entropy_and_xz_and_the_formula(runs: Runs) -> None:
    for said in ("order-0 entropy", "xz -9", "GPT tiny", "Written by the model", "formula", "measured"):
        assert said in runs.said
    assert "1.000" in next(line for line in runs.said.splitlines() if "total" in line)


def test_the_curve_is_a_picture(runs: Runs) -> None:
    assert (runs.out / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_the_report_ends_with_the_command_that_trains_on(runs: Runs) -> None:
    command = runs.said.strip().splitlines()[-1].split()
    assert command[1:3] == ["run", "--ranks"] and {"--resume", "--steps", "8"} <= set(command)
    assert (runs.out / "checkpoints/latest").read_text().strip() == "global_step4"


def configured(steps: int | None) -> tuple[int, int, int]:
    """Return the steps of the warm-up, of the schedule, and in all."""
    sys.path.insert(0, str(EXAMPLE))
    from train import configuration  # in a rank: other examples have a module of this name too

    config, count = configuration(Namespace(shoal_config=EXAMPLE / "onebit.json", steps=steps))
    return config["optimizer"]["params"]["freeze_step"], config["scheduler"]["params"]["total_num_steps"], count


@pytest.mark.parametrize(("steps", "freeze", "total"), [(None, 20, 1000), (2000, 40, 2000), (4, 1, 4)])
def test_a_warm_up_is_stretched_with_the_schedule(steps: int | None, freeze: int, total: int) -> None:
    assert run_ranks(1, configured, steps) == [(freeze, total, total)]


def test_what_was_learned_is_left_for_programs(runs: Runs) -> None:
    quality = json.loads((runs.out / "quality.json").read_text())
    assert quality["step"] == 4 and 4 < quality["bits_per_byte"] < 9
