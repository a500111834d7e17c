"""The GPT in three dimensions is the GPT of `examples/gpt`: the same losses, and one kind of checkpoint."""

import csv
import shutil
import sys
from pathlib import Path

import pytest
import torch

import shoal
from shoal.testing import run_ranks

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "gpt3d"))

from layers import begin, layers, plan
from model import VOCABULARY, Shape
from shoal.tensor_parallel import parallelize

from .scripts import run_script

ROOT = Path(__file__).parents[2]

SHAPE = Shape(layers=2, dim=16, heads=2, ngrams=2, rows=64)


def run(folder: Path, ranks: int, script: str, config: str, *options: str) -> str:
    """Run an example in `folder`, on the smallest model, and return what it printed."""
    return run_script(ROOT / "examples" / script, ranks, "--shoal-config", str(ROOT / "examples" / config),
                      "--model", "tiny", "--block", "32", *options, folder=folder)


def curve(out: Path) -> dict[int, float]:
    rows = csv.DictReader((out / "curve.csv").read_text().splitlines())
    return {int(row["step"]): float(row["bits_per_byte"]) for row in rows}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder where the plain model was trained for 4 steps, with a checkpoint after 2."""
    folder = tmp_path_factory.mktemp("run")
    run(folder, 2, "gpt/train.py", "gpt/zero2.json", "--steps", "4", "--save-every", "2", "--out", "plain")
    return folder


def test_eight_ranks_train_as_the_plain_model_which_goes_on_from_there(folder: Path) -> None:
    said = run(folder, 8, "gpt3d/train.py", "gpt3d/3d.json", "--steps", "2", "--out", "cube")
    plain = curve(folder / "plain")
    assert curve(folder / "cube") == pytest.approx({step: plain[step] for step in (1, 2)}, abs=1e-5)
    assert "2 pipeline x 2 data x 2 tensor ranks, ZeRO stage 1" in said and "schedule 1f1b" in said
    assert said.count(" kB") == 8 * 4 and "bits per byte of held-out text" in said
    run(folder, 1, "gpt/train.py", "gpt/zero0.json", "--steps", "4", "--resume", "--out", "cube")
    assert curve(folder / "cube") == pytest.approx(plain, abs=1e-5)


def test_four_ranks_go_on_from_the_plain_model(folder: Path) -> None:
    shutil.copytree(folder / "plain", folder / "taken")
    (folder / "taken/checkpoints/latest").write_text("global_step2")
    said = run(folder, 4, "gpt3d/train.py", "gpt3d/3d-zero3.json", "--steps", "4", "--resume", "--out", "taken")
    assert "going on after step 2" in said and "step 2/4" not in said
    assert curve(folder / "taken") == pytest.approx(curve(folder / "plain"), abs=1e-5)


@pytest.mark.parametrize("config", ["pipeline", "zbv", "tensor"])
def test_two_ranks_train_as_the_plain_model(config: str, folder: Path) -> None:
    said = run(folder, 2, "gpt3d/train.py", f"gpt3d/{config}.json", "--steps", "4", "--out", config)
    assert curve(folder / config) == pytest.approx(curve(folder / "plain"), abs=1e-5)
    assert ("rank 1      1F0 2F0" in said) == (config == "zbv") and ("time    0" in said) == (config != "tensor")


def logits(x: torch.Tensor, tensor: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Build the layers, return the weights with which they begin, and what the model says of `x` once they are cut."""
    model = shoal.PipelineModule(layers(SHAPE), num_stages=1)
    begin(model, SHAPE, seed=3)
    weights = {name: weight.clone() for name, weight in model.state_dict().items()}
    parallelize(model, shoal.Mesh(tensor=tensor).group("tensor"), plan(SHAPE))
    return weights, model(x).detach()


@pytest.mark.parametrize("ranks", [1, 2])
def test_layers_begin_and_compute_as_the_plain_model(ranks: int) -> None:
    torch.manual_seed(3)
    plain = SHAPE.build()
    x = torch.randint(VOCABULARY, (2, 9))
    for weights, found in run_ranks(ranks, logits, x, ranks):
        torch.testing.assert_close(weights, dict(plain.state_dict()), rtol=0, atol=0)
        torch.testing.assert_close(found, plain(x), rtol=1e-5, atol=1e-5)
