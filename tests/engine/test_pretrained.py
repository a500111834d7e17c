"""Models of Hugging Face go from an engine, or from its checkpoint, to a folder that `from_pretrained` reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shoal
from shoal.errors import UsageError
from shoal.launch import cli
from shoal.testing import run_ranks

transformers = pytest.importorskip("transformers", reason="needs Hugging Face transformers")


def config(stage: int, **more: Any) -> dict[str, Any]:
    return {"train_micro_batch_size_per_gpu": 1, "timeout": 20, "zero_optimization": {"stage": stage},
            "optimizer": {"type": "SGD", "params": {"lr": 0.1}}, **more}


def saved_and_exported(folder: str, stage: int) -> None:
    torch.manual_seed(0)
    whole = transformers.GPT2LMHeadModel(transformers.GPT2Config(
        vocab_size=17, n_positions=8, n_embd=8, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0))
    engine = shoal.initialize(model=whole, config=config(stage, bf16={"enabled": True}))[0]
    tokens = torch.arange(8).view(1, 8)
    engine.backward(engine(tokens, labels=tokens).loss)
    engine.step()
    engine.save_pretrained(f"{folder}/saved")
    engine.save_pretrained(f"{folder}/wide", dtype=torch.float32)
    engine.save_checkpoint(f"{folder}/run")
    engine.wait_for_checkpoint()
    if engine.global_rank == 0:
        assert cli.main(["checkpoint", "export", f"{folder}/run", f"{folder}/out", "--model", f"{folder}/saved", "--dtype",
                         "float32"]) == 0
        states: list[dict[str, Tensor]] = []
        for name in ("saved", "wide", "out"):
            loaded = transformers.GPT2LMHeadModel.from_pretrained(f"{folder}/{name}")
            assert loaded.lm_head.weight is loaded.transformer.wte.weight
            assert (loaded.dtype == torch.bfloat16) == (name == "saved")
            states.append(loaded.state_dict())
            assert all(torch.equal(value.bfloat16(), states[0][key].bfloat16()) for key, value in states[-1].items())
            assert len(loaded.generate(tokens[:, :2], max_new_tokens=3)[0]) == 5
    with pytest.raises(UsageError, match="the Sequential has no save_pretrained of its own"):
        shoal.initialize(model=nn.Sequential(nn.Linear(2, 2)), config=config(stage))[0].save_pretrained(folder)


def at_stages_0_and_3(folder: str) -> None:
    for stage in (0, 3):
        saved_and_exported(f"{folder}/{stage}", stage)


def test_from_pretrained_reads_what_is_saved_and_exported(tmp_path: Path) -> None:
    run_ranks(2, at_stages_0_and_3, str(tmp_path))


def test_export_refuses_a_model_without_a_configuration(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["checkpoint", "export", str(tmp_path), str(tmp_path / "out"), "--model", str(tmp_path)]) == 2
    assert "the folder has no config.json; give the folder of a Hugging Face model" in capsys.readouterr().err
