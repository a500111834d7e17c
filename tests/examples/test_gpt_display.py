"""Laws of the live line and of the pictures in text."""

import io
from pathlib import Path

import pytest
from rich.console import Console

from curve import History, Mark, apart, smooth, text_picture
from display import Display, clock, line, size
from meter import Reading


def reading(step: int = 7, **changes: object) -> Reading:
    values: dict[str, object] = dict(
        step=step, steps=640, loss=1.8125, gradient_norm=0.8312, learning_rate=2.1e-3, loss_scale=65536.0,
        tokens_per_second=12_345.6, utilisation=0.412, memory=412_300_000, seconds_left=92.4)
    return Reading(**(values | changes))  # type: ignore[arg-type]


def test_a_line_says_everything_about_a_step() -> None:
    assert line(reading()) == ("step   7/640  loss 1.812 (2.61 bits)  grad  0.83  lr 2.1e-03  scale 65536  "
                               "12,346 tok/s  MFU 41%  412 MB/rank  1:32 left")


def test_a_line_says_what_is_not_known() -> None:
    said = line(reading(gradient_norm=None, utilisation=None, seconds_left=float("inf")))
    assert "grad   n/a" in said and "MFU n/a" in said and "?:?? left" in said


def test_columns_keep_their_places_from_step_to_step() -> None:
    assert len(line(reading(7))) == len(line(reading(640)))


def test_without_a_terminal_the_first_every_tenth_and_last_step_are_lines() -> None:
    out = io.StringIO()
    with Display(Console(file=out, width=200), every=10) as display:
        for step in range(1, 26):
            display.show(reading(step, steps=25))
    assert [said.split()[1] for said in out.getvalue().splitlines()] == ["1/25", "10/25", "20/25", "25/25"]


def test_in_a_terminal_one_line_is_written_over_and_over() -> None:
    out = io.StringIO()
    with Display(Console(file=out, width=200, force_terminal=True), every=10) as display:
        for step in range(1, 26):
            display.show(reading(step, steps=25))
    assert out.getvalue().count("\n") == 1
    assert "25/25" in out.getvalue()


def test_a_quiet_console_shows_nothing() -> None:
    out = io.StringIO()
    with Display(Console(file=out, force_terminal=True, quiet=True), every=1) as display:
        display.show(reading())
    assert out.getvalue() == ""


@pytest.mark.parametrize(("count", "said"), [(0, "0 B"), (999, "999 B"), (1000, "1 kB"), (412_300_000, "412 MB"),
                                             (13_107_200, "13.1 MB"), (2.5e12, "2.5 TB")])
def test_sizes_have_three_digits(count: float, said: str) -> None:
    assert size(count) == said


@pytest.mark.parametrize(("seconds", "said"), [(0, "0:00"), (59.6, "1:00"), (725, "12:05"), (11220, "3:07:00")])
def test_durations_read_like_a_clock(seconds: float, said: str) -> None:
    assert clock(seconds) == said


def test_labels_are_moved_apart_and_keep_their_order() -> None:
    assert apart([2.0, 4.5, 1.95], 0.5) == pytest.approx([2.45, 4.5, 1.95])


def test_smoothing_keeps_a_straight_line_and_the_length() -> None:
    assert smooth([3.0] * 7, reach=3) == [3.0] * 7
    assert smooth([1.0, 2.0, 3.0, 4.0], reach=1) == [1.0, 2.0, 3.0, 3.5]


def test_the_text_picture_names_each_mark_once() -> None:
    said = text_picture({step: 6 / step for step in range(1, 200)},
                        [Mark(name="order 0", bits=4.5), Mark(name="xz", bits=1.9)]).plain
    assert said.count("order 0 4.50") == said.count("xz 1.90") == 1
    assert len(said.splitlines()) == 9


def test_a_resumed_history_forgets_the_steps_after_the_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "curve.csv"
    history = History(path, until=0)
    for step in range(1, 6):
        history.add(step, 8.0 / step)
    history.save()
    assert list(History(path, until=3).bits) == [1, 2, 3]
    assert History(path, until=0).bits == {}
