"""The reference page documents every key, and `shoal config` prints values with their origins."""

import json
import re
from pathlib import Path

import pytest

from shoal.config.reference import docstrings, render
from shoal.config.resolve import nested
from shoal.config.section import Section
from shoal.engine.schema import Config
from shoal.launch.cli import main

PAGE = Path(__file__).parents[2] / "docs" / "configuration.md"


def test_the_page_in_docs_equals_the_generated_page() -> None:
    assert PAGE.read_text(encoding="utf-8") == render(Config), "run: shoal config reference --output docs/configuration.md"


@pytest.mark.parametrize("section", [Config, *nested(Config).values()])
def test_every_field_has_a_docstring(section: type[Section]) -> None:
    assert all(meaning.endswith((".", ".)")) for meaning in docstrings(section).values())


def test_a_field_without_a_docstring_is_detected() -> None:
    class Mute(Section):
        message: int = 1
        """Something."""

        silent: int = 2

    with pytest.raises(KeyError, match="silent"):
        docstrings(Mute)


def test_every_row_of_the_page_has_five_cells() -> None:
    rows = [line for line in render(Config).splitlines() if line.startswith("|")]
    assert len(rows) > 200
    assert {len(re.findall(r"(?<!\\)\|", row)) for row in rows} == {6}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "config.json"
    path.write_text('{"train_batch_size": 8, "optimizer": {"type": "Adam", "params": {"lr": 1e-3}}} // small')
    return path


def test_show_prints_values_with_their_origins(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "show", str(file), "--ranks", "2"]) == 0
    printed = re.sub(r" +", " ", capsys.readouterr().out)
    assert "train_batch_size 8 given" in printed
    assert "gradient_accumulation_steps 1 derived" in printed
    assert "\n stage 0 default" in printed


def test_show_warns_of_a_name_that_the_script_has_to_register(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "config.json"
    path.write_text('{"optimizer": {"type": "Adamm"}, "scheduler": {"type": "WarmupLRs"}, "train_batch_size": 1}')
    assert main(["config", "show", str(path)]) == 0
    optimizer, schedule = capsys.readouterr().err.splitlines()
    assert "optimizer.type: got 'Adamm'; did you mean 'Adam'?" in optimizer and "shoal.register_optimizer" in optimizer
    assert "scheduler.type: got 'WarmupLRs'; did you mean 'WarmupLR'?" in schedule and "shoal.register_schedule" in schedule


def test_show_prints_one_json_object_with_json(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "show", str(file), "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["values"]["train_micro_batch_size_per_gpu"] == 8
    assert printed["origins"]["optimizer.params.lr"] == "given"


def test_a_show_error_names_the_source_of_the_rank_count(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "show", str(file), "--ranks", "3"]) == 2
    error = capsys.readouterr().err
    assert f"{file}: train_batch_size: got 8, not a multiple of 3 data ranks (data ranks: --ranks)" in error


@pytest.mark.parametrize("ranks", ["0", "two", "-1", "1.5"])
def test_an_invalid_number_of_ranks_is_rejected(file: Path, ranks: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["config", "show", str(file), f"--ranks={ranks}"])
    assert f"got '{ranks}'; give a whole number of at least 1" in capsys.readouterr().err


def test_reference_prints_or_writes_the_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "reference"]) == 0
    assert capsys.readouterr().out == render(Config)
    assert main(["config", "reference", "--output", str(tmp_path / "page.md")]) == 0
    assert (tmp_path / "page.md").read_text(encoding="utf-8") == render(Config)
