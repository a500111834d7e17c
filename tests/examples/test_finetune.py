"""The fine-tuning example learns, answers, and saves what transformers loads."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

from .scripts import run_script

EXAMPLE = Path(__file__).parents[2] / "examples/finetune"


@pytest.mark.parametrize(("stage", "options"), [(2, ()), (3, ("--adapters", "4"))])
def test_a_fine_tuned_model_learns_and_is_saved(stage: int, options: tuple[str, ...], tmp_path: Path) -> None:
    said = run_script(EXAMPLE / "finetune.py", 2, "--shoal-config", str(EXAMPLE / f"zero{stage}.json"), "--steps", "12",
                      "--out", str(tmp_path / "model"), *options, folder=tmp_path)
    losses = [float(line.split()[-1]) for line in said.splitlines() if line.startswith("step")]
    assert losses[-1] < losses[0] - 0.3
    assert said.count("before: 'The capital of ") == said.count("after:  'The capital of ") == 3
    model = LlamaForCausalLM.from_pretrained(tmp_path / "model")
    assert set(model.state_dict()) == set(LlamaForCausalLM(model.config).state_dict())
    assert all(torch.isfinite(value).all() for value in model.state_dict().values())
