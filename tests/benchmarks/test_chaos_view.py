"""The view of a training under chaos: what it reads, counts and draws."""

from __future__ import annotations

import io
import os
from pathlib import Path

from chaos_view import Losses, View
from rich.console import Console

from shoal.recording.page import Reading, TrainingPhase, page, read


def noted(path: Path, lines: list[tuple[float, int, float]]) -> Losses:
    """Return the losses of a file of these lines."""
    path.write_text("".join(f"{moment} {step} {loss}\n" for moment, step, loss in lines))
    losses = Losses(path)
    losses.read()
    return losses


def reading(tmp_path: Path) -> Reading:
    """Return the page of a rank that evaluates."""
    mine = type(page)()
    mine.attach(str(tmp_path), 0)
    mine.enter(TrainingPhase.EVALUATE, 7)
    found = read(str(tmp_path / "rank0"))
    assert found is not None
    return found


def test_a_step_taken_again_counts_once_and_half_a_line_waits(tmp_path: Path) -> None:
    losses = noted(tmp_path / "losses", [(10.0, 1, 4.0), (11.0, 2, 3.5), (12.0, 3, 3.0), (14.0, 2, 3.5), (15.0, 3, 3.0)])
    with losses.path.open("a") as file:
        file.write("16.0 4 2.")
    losses.read()
    assert losses.by_step == {1: 4.0, 2: 3.5, 3: 3.0}
    with losses.path.open("a") as file:
        file.write("5\n")
    losses.read()
    assert losses.by_step[4] == 2.5
    assert losses.step_seconds == 2.0


def test_goodput_is_the_time_of_steps_that_count_over_all_time(tmp_path: Path) -> None:
    plain = noted(tmp_path / "plain", [(float(step), step, 1.0) for step in range(1, 12)])
    losses = noted(tmp_path / "losses", [(100.0, 1, 1.0), (101.0, 2, 1.0), (106.0, 2, 1.0), (110.0, 6, 1.0)])
    assert View("title", plain, losses).goodput == 0.5


def test_it_draws_ranks_faults_and_curves_on_a_terminal_and_as_svg(tmp_path: Path) -> None:
    plain = noted(tmp_path / "plain", [(float(step), step, 4.0 / step) for step in range(1, 50)])
    losses = noted(tmp_path / "losses", [(float(step), step, 4.0 / step) for step in range(1, 20)])
    shown = io.StringIO()
    with View("stage 2", plain, losses, console=Console(file=shown, force_terminal=True, width=100)) as view:
        view.fault("stage 2: 1 kill at step 9", 9)
        view.update([reading(tmp_path), None])
    for words in ("stage 2", "evaluate", str(os.getpid()), "starts", "1 kill at step 9", "goodput 100%", "undisturbed", "█"):
        assert words in shown.getvalue()
    view.picture(tmp_path / "curves.svg")
    assert "<svg" in (tmp_path / "curves.svg").read_text()


def test_elsewhere_each_fault_is_a_line(tmp_path: Path, capsys) -> None:
    with View("stage 2", Losses(tmp_path / "none"), Losses(tmp_path / "none")) as view:
        view.fault("1 kill", 9)
        view.update([None])
    assert capsys.readouterr().out == "1 kill\n"
