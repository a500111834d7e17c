"""Laws of the memory lab, on the smallest model."""

from pathlib import Path

import pytest
from rich.console import Console

from chart import parts, picture, table, text_picture
from lab import row
from probe import Case, probe
from shoal.testing import run_ranks


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_measured_state_is_the_formula_within_a_hundredth(stage: int, dtype: str) -> None:
    case = Case(stage=stage, model="tiny", microbatch=1, block=16, dtype=dtype, steps=1)
    found = row(case, 2, run_ranks(2, probe, case))
    assert found.found.state_at_first.total == pytest.approx(found.formula_at_first.total, rel=0.01)
    assert parts(found.found.state) == pytest.approx(parts(found.formula), rel=0.01)


def test_rows_become_a_table_bars_and_a_picture(tmp_path: Path) -> None:
    case = Case(stage=2, model="tiny", microbatch=3, block=16, dtype="fp32", steps=1)
    rows = [row(case, 1, run_ranks(1, probe, case))]
    console = Console(width=80, record=True, file=(tmp_path / "terminal.txt").open("w"))
    console.print(table(rows, "tiny"))
    console.print(text_picture(rows))
    said = console.export_text()
    console.file.close()
    assert "…" not in said, "a column does not fit in 80"
    assert "0.1 M" in said and "stage 2  █" in said
    picture(tmp_path / "memory.png", rows, "tiny")
    assert (tmp_path / "memory.png").read_bytes().startswith(b"\x89PNG")
