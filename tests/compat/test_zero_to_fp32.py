"""`zero_to_fp32`, `ds_to_universal` and `shoal checkpoint convert` read and write folders of either library."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from shoal.compat.deepspeed.checkpoint import ds_to_universal
from shoal.compat.deepspeed.utils import zero_to_fp32
from shoal.interchange import open_checkpoint
from shoal.launch import cli
from shoal.testing import run_ranks
from tests.interchange.test_deepspeed_layout import FROZEN, WEIGHTS, A, B, native, published

STATE = {**WEIGHTS, "buffer": torch.ones(1), "alias": A}


@pytest.fixture(params=["shoal", "deepspeed 2", "deepspeed 3"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A folder with one checkpoint, in Shoal's format or in DeepSpeed's."""
    kind, _, stage = request.param.partition(" ")
    if kind == "shoal":
        native(tmp_path / "saved")
        (tmp_path / "saved" / "latest").write_text("step5")
    else:
        published(tmp_path / "saved", int(stage))
    return tmp_path / "saved"


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []


def test_the_state_dict_has_masters_buffers_and_shared_names(folder: Path) -> None:
    assert_same(zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(folder), STATE)
    trained = zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(folder, exclude_frozen_parameters=True)
    assert_same(trained, {name: value for name, value in STATE.items() if name != "frozen"})
    lazy = zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(folder, tag="step5", lazy_mode=True)
    assert lazy["b"].shape == (2, 2) and torch.equal(lazy["b"].contiguous(), B)


@pytest.mark.parametrize("safe", [False, True])
def test_a_state_dict_is_written_in_files_of_a_limited_size(folder: Path, tmp_path: Path, safe: bool) -> None:
    zero_to_fp32.convert_zero_checkpoint_to_fp32_state_dict(folder, tmp_path / "out", max_shard_size="28B",
                                                            safe_serialization=safe)
    stem = "model.safetensors" if safe else "pytorch_model.bin"
    index = json.loads((tmp_path / "out" / f"{stem}.index.json").read_text())
    found: dict[str, torch.Tensor] = {}
    for file in sorted(set(index["weight_map"].values())):
        path = tmp_path / "out" / file
        found |= load_file(path) if safe else torch.load(path, weights_only=True)
    assert_same(found, STATE)
    assert len(set(index["weight_map"].values())) == 2


def test_weights_load_into_a_model(folder: Path) -> None:
    model = nn.Module()
    model.a, model.b = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(2, 2))
    model.frozen, model.alias = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(3))
    model.register_buffer("buffer", torch.zeros(1))
    assert zero_to_fp32.load_state_dict_from_zero_checkpoint(model, folder) is model
    assert torch.equal(model.frozen, FROZEN) and torch.equal(model.b, B)


def test_a_missing_checkpoint_raises_the_published_errors(folder: Path) -> None:
    with pytest.raises(FileNotFoundError, match="step6"):
        zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(folder, tag="step6")
    (folder / "latest").unlink()
    with pytest.raises(ValueError, match="Unable to find 'latest' file"):
        zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(folder)


def test_the_script_beside_checkpoints_runs(folder: Path, tmp_path: Path) -> None:
    script = zero_to_fp32.write_script(folder)
    command = [sys.executable, str(script), str(folder), str(tmp_path / "out"), "--safe_serialization"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert_same(load_file(tmp_path / "out" / "model.safetensors"), STATE)


def test_the_universal_form_holds_whole_tensors(folder: Path, tmp_path: Path) -> None:
    ds_to_universal.main(ds_to_universal.parse_arguments(
        ["--input_folder", f"{folder}/step5", "--output_folder", f"{tmp_path}/out/step5_universal"]))
    assert (tmp_path / "out" / "latest_universal").read_text() == "step5_universal"
    with open_checkpoint(tmp_path / "out") as snapshot:
        assert torch.equal(snapshot.tensor("weight/b"), B) and torch.equal(snapshot.tensor("exp_avg/b"), B + 10)
        assert snapshot.tensor("scalar.step/a").item() == 5 and snapshot.step == 5
        client, (group,) = snapshot.shared["client_state"], snapshot.shared["groups"]
        assert (client["epoch"], group["lr"], group["betas"]) == (3, 0.25, (0.5, 0.75))
    assert_same(zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(tmp_path / "out"), STATE)


@pytest.mark.parametrize("form", ["deepspeed", "universal"])
def test_a_checkpoint_is_converted_on_the_command_line(folder: Path, tmp_path: Path, form: str,
                                                       capsys: pytest.CaptureFixture[str]) -> None:
    words = ["checkpoint", "convert", str(folder), f"{tmp_path}/out", "--to", form, "--stage", "3", "--ranks", "3"]
    assert cli.main(words) == 0
    assert capsys.readouterr().out.strip() == f"{tmp_path}/out/step5"
    with open_checkpoint(tmp_path / "out") as snapshot:
        assert torch.equal(snapshot.tensor("exp_avg/b"), B + 10)


def test_a_checkpoint_of_deepspeed_is_exported(tmp_path: Path) -> None:
    published(tmp_path / "saved", 3)
    assert cli.main(["checkpoint", "export", f"{tmp_path}/saved", f"{tmp_path}/out"]) == 0
    assert_same(load_file(tmp_path / "out" / "model.safetensors"), STATE)


def train(folder: str) -> None:
    """Train under the published name, save, and read the weights from the folder."""
    import shoal.compat.deepspeed as deepspeed

    model = nn.Linear(3, 2)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config={
        "train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 2},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.1}}})
    loss = engine(torch.ones(1, 3)).sum()
    engine.backward(loss)
    engine.step()
    engine.save_checkpoint(folder)
    weights = {name: value.detach().clone() for name, value in model.named_parameters()}
    assert_same(zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(folder), weights)
    assert (Path(folder) / "zero_to_fp32.py").is_file()


def test_the_published_engine_saves_the_script_beside_its_checkpoints(tmp_path: Path) -> None:
    run_ranks(1, train, str(tmp_path))
