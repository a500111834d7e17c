"""Each client trains, saves and resumes under the published name; `make clients` runs all rows."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.clients.__main__ import ROOT, Row, run

PYTHON = ROOT / ".venv-clients/bin/python"

pytestmark = pytest.mark.skipif(not (ROOT / ".venv-clients/.installed").exists(),
                                reason="`make clients` builds .venv-clients, where the clients are installed")


@pytest.mark.parametrize("row", [
    Row("Accelerate", "accelerate_loop.py", ("--stage", "2")),
    Row("Trainer", "trainer.py", ("--stage", "3")),
    Row("PEFT", "peft_lora.py", ("--stage", "3", "--pretrained")),
    Row("ShoalAccelerator", "own_accelerator.py", ("--stage", "2")),
    Row("ShoalStrategy", "lightning_fit.py", ("--stage", "2", "--own")),
], ids=lambda row: row.client)
def test_a_client_trains_saves_and_resumes(row: Row, tmp_path: Path) -> None:
    found = run(row, PYTHON, tmp_path)
    assert "error" not in found, found.get("log")
    assert found["losses"][-1] < found["losses"][0]


@pytest.mark.parametrize("by", [(), ("--trainer",)], ids=["Accelerate", "Trainer"])
def test_ranks_with_parts_of_sequences_have_the_losses_of_one_rank(by: tuple[str, ...], tmp_path: Path) -> None:
    alone = run(Row("sequence", "sequence_loop.py", ("--ranks-of-a-sequence", "1", *by)), PYTHON, tmp_path)
    split = run(Row("sequence", "sequence_loop.py", by, 2), PYTHON, tmp_path)
    assert "error" not in split, split.get("log")
    assert split["losses"] == pytest.approx(alone["losses"], rel=1e-3)


@pytest.mark.parametrize(("stage", "ranks"), [(1, 2), (2, 1), (3, 1)])
def test_the_strategy_of_lightning_takes_the_steps_of_ddp(stage: int, ranks: int, tmp_path: Path) -> None:
    found = run(Row("ShoalStrategy", "own_strategy.py", ("--stage", str(stage), "--devices", str(ranks)), ranks), PYTHON,
                tmp_path)
    assert "error" not in found, found.get("log")
