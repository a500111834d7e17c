"""`shoal pipeline show` prints a grid with its numbers, compares schedules, draws SVG, and refuses in one line."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from shoal.launch.cli import main
from shoal.pipeline.check import simulate
from shoal.pipeline.schedules import SCHEDULES, make_schedule
from shoal.pipeline.text_grid import grid

DOCS = Path(__file__).parents[2] / "docs"
SIZE = ("--ranks", "4", "--microbatches", "8")


@pytest.fixture(autouse=True)
def terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")


def show(*words: str) -> int:
    return main(["pipeline", "show", *words])


def refusal(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """Return the last line of its error."""
    try:
        code = show(*words)
    except SystemExit as exit:
        code = exit.code
    assert code == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    return shown.err.splitlines()[-1]


def test_a_schedule_is_shown_with_bubble_and_memory_beside_1f1b(capsys: pytest.CaptureFixture[str]) -> None:
    assert show("--schedule", "zb-h1", *SIZE) == 0
    drawn = grid(simulate(make_schedule("zb-h1", ranks=4, microbatches=8)), width=100)
    assert capsys.readouterr().out == f"""\
zb-h1 (1F1B, backward split into I and W): 4 ranks, 8 microbatches

{drawn}

makespan     27
bubble       11.1%: each rank waits 3
             1F1B without travel: 27.3%, (p-1)/(m+p-1): each waits (p-1)(F+I+W) = 9
activations  at most 4, of microbatches at all layers of a rank; by rank: 4 4 4 4
"""


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_is_shown_with_its_least_stages_per_rank(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert show("--schedule", name, *SIZE) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"{name} (")
    assert max(map(len, lines)) <= 100


def test_durations_are_for_all_layers_of_a_rank(capsys: pytest.CaptureFixture[str]) -> None:
    times = ("--forward", "2", "--input", "3", "--weight", "1", "--travel", "0")
    for stages in ("2", "4"):
        assert show("--schedule", "interleaved", *SIZE, "--stages-per-rank", stages, *times) == 0
        shown = capsys.readouterr().out
        assert f"each rank waits {18 / int(stages):g}\n" in shown and "(p-1)(F+I+W) = 18\n" in shown


def test_one_rank_can_be_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert show("--schedule", "1f1b", "--ranks", "1", "--microbatches", "1") == 0
    shown = capsys.readouterr().out
    assert shown.startswith("1f1b (one forward, one backward): 1 rank, 1 microbatch\n") and "bubble       0.0%" in shown
    assert show("--all", "--ranks", "1", "--microbatches", "1") == 0


def test_travel_lengthens_the_makespan(capsys: pytest.CaptureFixture[str]) -> None:
    assert show("--schedule", "gpipe", *SIZE, "--travel", "0.5") == 0
    assert "makespan     36\n" in capsys.readouterr().out


def test_a_grid_that_is_almost_all_idle_is_not_drawn(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for travel in ("1e5", "1e9"):
        assert show("--schedule", "1f1b", *SIZE, "--travel", travel) == 0
        shown = capsys.readouterr().out
        assert "(not drawn: ranks wait for travel nearly all of the time" in shown and "makespan" in shown
        assert len(shown) < 2000
    assert show("--schedule", "1f1b", *SIZE, "--travel", "1e9", "--svg", str(tmp_path / "x.svg")) == 2


def test_the_table_of_all_schedules_is_the_one_in_the_docs(capsys: pytest.CaptureFixture[str]) -> None:
    assert show("--all", *SIZE) == 0
    assert f"```\n{capsys.readouterr().out}```\n" in (DOCS / "pipeline.md").read_text()


def test_stages_per_rank_apply_to_the_schedules_that_allow_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert show("--all", *SIZE, "--stages-per-rank", "3") == 0
    rows = re.findall(r"│ ([\w-]+) +│ +(\d+) │", capsys.readouterr().out)
    assert rows == [("gpipe", "1"), ("1f1b", "1"), ("interleaved", "3"), ("zb-h1", "1"), ("zb-h2", "1"), ("zbv", "2")]


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_images_in_the_docs_are_what_the_command_draws(name: str, tmp_path: Path) -> None:
    assert show("--schedule", name, *SIZE, "--svg", str(tmp_path / "drawn.svg")) == 0
    assert (tmp_path / "drawn.svg").read_text() == (DOCS / "images" / f"pipeline-{name}.svg").read_text()


@pytest.mark.parametrize(("words", "message"), [
    (["--schedule", "zbb", *SIZE], "shoal pipeline: pipeline schedule: got 'zbb'; did you mean 'zbv'? It is one of gpipe, "),
    (["--schedule", "zbv", *SIZE, "--stages-per-rank", "3"],
     "shoal pipeline: pipeline schedule zbv: stages_per_rank: got 3; zbv takes 2; with 3 choose interleaved"),
    (["--schedule", "1f1b", "--ranks", "0", "--microbatches", "8"],
     "argument --ranks/--stages: got '0'; give a whole number, 1 or more"),
    (["--schedule", "1f1b", "--ranks", "4", "--microbatches", "x"],
     "argument --microbatches: got 'x'; give a whole number, 1 or more"),
    (["--schedule", "1f1b", *SIZE, "--forward", "0"], "argument --forward: got '0'; give a number above 0"),
    (["--schedule", "1f1b", *SIZE, "--weight", "one"], "argument --weight: got 'one'; give a number above 0"),
    (["--schedule", "1f1b", *SIZE, "--travel=-1"], "argument --travel: got '-1'; give 0 or more"),
    (["--schedule", "1f1b", *SIZE, "--input", "inf"], "argument --input: got 'inf'; give a number above 0"),
    (SIZE, "one of the arguments --schedule --all is required"),
    (["--all", "--schedule", "1f1b", *SIZE], "argument --schedule: not allowed with argument --all"),
    (["--all", *SIZE, "--svg", "x.svg"], "shoal pipeline: --svg: a table is not drawn; name one schedule with --schedule"),
    (["--schedule", "1f1b", "--ranks", "100", "--microbatches", "100000"],
     "shoal pipeline: --ranks 100 --microbatches 100000: up to 60,000,000 instructions; at most 1,000,000 are simulated"),
])  # fmt: skip
def test_invalid_arguments_are_refused_in_one_line(capsys: pytest.CaptureFixture[str], words: list[str],
                                                    message: str) -> None:
    assert message in refusal(capsys, *words)


def test_an_svg_file_that_cannot_be_written_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert show("--schedule", "1f1b", *SIZE, "--svg", str(tmp_path / "none" / "x.svg")) == 2
    assert capsys.readouterr().err.endswith(": No such file or directory; name a file in a folder that exists\n")


def test_the_command_does_not_import_torch() -> None:
    code = ("import sys; from shoal.launch.cli import main;"
            "main(['pipeline', 'show', '--all', '--stages', '2', '--microbatches', '2']); sys.exit('torch' in sys.modules)")
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode == 0
