"""Checkpoints of the real DeepSpeed continue in Shoal with its own losses, and Shoal's continue in the real DeepSpeed."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import shoal
from shoal.compat.deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from shoal.interchange import open_checkpoint
from shoal.interchange.universal import write_universal
from shoal.interchange.writer import Target, write_folder
from shoal.testing import run_ranks
from tests.interchange.trained import (
    AFTER,
    BEFORE,
    CLIENT,
    DTYPES,
    Net,
    batch,
    config,
    groups,
    microbatches,
    pipeline_config,
    pipeline_layers,
)

PYTHON = Path(__file__).parents[2] / ".venv-peers" / "bin" / "python"
CASES = ("fp32-0", "fp32-2", "fp32-3", "bf16-0", "bf16-1", "bf16-3", "pipe-fp32-1", "pipe-bf16-0")
RANKS = 2

pytestmark = pytest.mark.skipif(not PYTHON.exists(), reason="needs the environment of the peers; run `make peers`")


def train_with_deepspeed(action: str, folder: Path, *cases: str) -> None:
    """Run `peer.py` on two ranks."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    shared = {**os.environ, "DS_ACCELERATOR": "cpu", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
              "WORLD_SIZE": str(RANKS), "LOCAL_SIZE": str(RANKS), "PATH": f"{PYTHON.parent}:{os.environ['PATH']}",
              "PYTHONPATH": ""}
    command = [str(PYTHON), str(Path(__file__).parent / "peer.py"), action, str(folder), *cases]
    ranks = [subprocess.Popen(command, env={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}, text=True,
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT) for rank in range(RANKS)]
    outputs = [rank.communicate(timeout=240)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0] * RANKS, outputs[0][-3000:] + outputs[1][-3000:]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of the checkpoints that DeepSpeed has saved, one for each case."""
    folder = tmp_path_factory.mktemp("deepspeed")
    train_with_deepspeed("save", folder, *CASES)
    return folder


def resume(folder: str, stage: int, dtype: str, save: str | None = None) -> tuple[list[float], dict[str, object], int]:
    """Load a checkpoint into a fresh engine; save it in Shoal's format where asked; train on."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    net = Net(seed=1)
    engine, *_ = shoal.initialize(model=net, model_parameters=groups(net),
                                  config={**config(stage, dtype), "train_micro_batch_size_per_gpu": 8 // ranks})
    path, client = engine.load_checkpoint(folder)
    assert path is not None and client is not None
    steps = engine.global_steps
    if save is not None:
        engine.save_checkpoint(save, client_state={key: client[key] for key in CLIENT})
    losses: list[float] = []
    for number in range(BEFORE, BEFORE + AFTER):
        loss = engine(*batch(number, rank, ranks, dtype))
        engine.backward(loss)
        engine.step()
        mean = loss.detach().float()
        dist.all_reduce(mean)
        losses.append(float(mean) / ranks)
    engine.destroy()
    return losses, client, steps


def resume_all(folder: str, cases: list[tuple[str, int]], save: bool) -> list[tuple[list[float], dict[str, object], int]]:
    return [resume(f"{folder}/{case}", stage, case.split("-")[0], f"{folder}/shoal/{case}" if save else None)
            for case, stage in cases]


def losses(folder: Path, case: str, name: str = "losses.json") -> list[float]:
    return json.loads((folder / case / name).read_text())


STAGE_HERE = {"fp32-0": 2, "fp32-2": 3, "fp32-3": 1, "bf16-0": 3, "bf16-1": 1, "bf16-3": 2}
"""The stage at which Shoal loads each case: another one, where that is possible."""


def test_training_continues_with_the_losses_of_deepspeed(saved: Path) -> None:
    found = run_ranks(RANKS, resume_all, str(saved), list(STAGE_HERE.items()), True)[0]
    for (case, _), (continued, client, steps) in zip(STAGE_HERE.items(), found, strict=True):
        assert continued == pytest.approx(losses(saved, case), rel=2e-6), case
        assert steps == BEFORE
        assert (client["epoch"], client["note"]) == (CLIENT["epoch"], CLIENT["note"])


def test_another_number_of_ranks_continues_alike(saved: Path) -> None:
    cases = [("fp32-3", 3), ("fp32-2", 0), ("fp32-3-universal", 2), ("fp32-2-universal", 1)]
    for (case, _), (continued, *_) in zip(cases, run_ranks(1, resume_all, str(saved), cases, False)[0], strict=True):
        assert continued == pytest.approx(losses(saved, case.removesuffix("-universal")), rel=2e-6), case


def test_deepspeed_continues_what_shoal_wrote(saved: Path) -> None:
    run_ranks(RANKS, resume_all, str(saved), [("fp32-2", 2), ("bf16-3", 3)], True)
    back = {"fp32-0": "fp32-2", "fp32-1": "fp32-2", "fp32-2": "fp32-2", "fp32-3": "fp32-2", "bf16-2": "bf16-3",
            "bf16-3": "bf16-3"}
    for case, source in back.items():
        dtype, stage = case.split("-")
        with open_checkpoint(saved / "shoal" / source) as snapshot:
            write_folder(snapshot, saved / "back" / case, "global_step3",
                         Target(stage=int(stage), ranks=RANKS, dtype=DTYPES[dtype]))
    train_with_deepspeed("load", saved / "back", *back)
    for case, source in back.items():
        assert losses(saved / "back", case, "back.json") == pytest.approx(losses(saved, source), rel=2e-6), case


def test_deepspeed_continues_our_universal_form_as_its_own(saved: Path) -> None:
    """It loads its own universal form at stages 1 and 2 without some of the state; so losses are compared with those."""
    run_ranks(RANKS, resume_all, str(saved), [("fp32-2", 2)], True)
    with open_checkpoint(saved / "shoal" / "fp32-2") as snapshot:
        write_universal(snapshot, saved / "universal" / "fp32-1-ours" / "global_step3_universal")
    shutil.copytree(saved / "fp32-2-universal", saved / "universal" / "fp32-1-theirs")
    train_with_deepspeed("load", saved / "universal", "fp32-1-ours", "fp32-1-theirs")
    ours, theirs = (losses(saved / "universal", f"fp32-1-{form}", "back.json") for form in ("ours", "theirs"))
    assert ours == pytest.approx(theirs, rel=2e-6)


def test_the_tool_of_deepspeed_reads_what_shoal_wrote(saved: Path) -> None:
    for stage in (2, 3):
        with open_checkpoint(saved / "fp32-3") as snapshot:
            write_folder(snapshot, saved / "weights" / str(stage), "global_step3", Target(stage=stage, ranks=3))
    train_with_deepspeed("weights", saved / "weights", "2", "3")
    expected = get_fp32_state_dict_from_zero_checkpoint(saved / "fp32-3")
    for stage in ("2", "3"):
        found = torch.load(saved / "weights" / stage / "weights.pt", weights_only=True)
        assert found.keys() == expected.keys()
        assert [name for name, value in expected.items() if not torch.equal(value, found[name])] == []


def continue_pipeline(cases: list[tuple[str, str, int]], stages: int) -> list[list[float]]:
    """Load pipelines of DeepSpeed into pipelines of `stages` stages, and train on."""
    found: list[list[float]] = []
    for folder, dtype, stage in cases:
        torch.manual_seed(1)
        net = shoal.PipelineModule(pipeline_layers(shoal.LayerSpec, shoal.TiedLayerSpec), num_stages=stages,
                                   loss_fn=torch.nn.MSELoss(), partition_method="uniform")
        engine, *_ = shoal.initialize(model=net, config=pipeline_config(stage, dtype))
        path, client = engine.load_checkpoint(folder)
        assert path is not None and client is not None and client["epoch"] == CLIENT["epoch"]
        batches = microbatches(BEFORE, dtype)
        found.append([float(engine.train_batch(batches)) for _ in range(AFTER)])
        engine.destroy()
    return found


def test_a_pipeline_of_deepspeed_continues_in_any_number_of_stages(saved: Path) -> None:
    cases = [(f"{saved}/pipe-fp32-1", "fp32", 3), (f"{saved}/pipe-bf16-0", "bf16", 2)]
    for stages in (1, 2):
        fp32, bf16 = run_ranks(stages, continue_pipeline, cases, stages)[0]
        assert fp32 == pytest.approx(losses(saved, "pipe-fp32-1"), rel=2e-6)
        assert bf16 == pytest.approx(losses(saved, "pipe-bf16-0"), rel=1e-2)  # DeepSpeed adds the losses up in bf16


def test_weights_are_the_masters_that_deepspeed_saved(saved: Path) -> None:
    with open_checkpoint(saved / "bf16-3") as snapshot:
        assert snapshot.dtype("weight/first.weight") == torch.float32
        assert snapshot.dtype("weight/frozen.weight") == torch.bfloat16
        assert snapshot.shared["tied"] == {"tied.weight": "mid.weight"}
