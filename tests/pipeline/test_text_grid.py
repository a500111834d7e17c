"""The text grid and the SVG show every instruction once; lines fit the terminal; an arrow marks a fault."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from dataclasses import replace

from hypothesis import example, given
from hypothesis import strategies as st
from rich.console import Console

from shoal.pipeline import text_grid
from shoal.pipeline.check import simulate
from shoal.pipeline.instruction import Op
from shoal.pipeline.schedules import SCHEDULES, forward_only, make_schedule
from shoal.pipeline.simulation import Durations, Simulation
from shoal.pipeline.svg_grid import svg
from shoal.pipeline.text_grid import NOT_DRAWN, fault, grid, mostly_idle, painted

times = st.floats(0.01, 100)


@st.composite
def simulations(build: st.DrawFn) -> Simulation:
    schedule = make_schedule(build(st.sampled_from(sorted(SCHEDULES))), ranks=build(st.integers(1, 12)),
                             microbatches=build(st.integers(1, 12)))
    if build(st.booleans()):
        return simulate(schedule)
    return simulate(schedule, Durations(forward=build(times), input=build(times), weight=build(times),
                                        travel=build(st.floats(0, 10))))


def test_the_grid_in_the_docstring_is_what_is_drawn() -> None:
    drawn = grid(simulate(make_schedule("1f1b", ranks=2, microbatches=2)))
    assert "\n".join(f"    {line}" for line in drawn.splitlines()) in str(text_grid.__doc__)


def test_the_grid_of_zb_h1() -> None:
    assert grid(simulate(make_schedule("zb-h1", ranks=3, microbatches=4))).splitlines() == [
        "time    0     2     4     6     8     10    12",
        "rank 0  F0 F1 F2       I0 W0 F3 I1 W1 I2 W2 I3 W3",
        "rank 1     F0 F1    I0 F2 I1 W0 F3 I2 W1 I3 W2 W3",
        "rank 2        F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3"]


def test_cells_show_the_stage_where_a_rank_owns_several() -> None:
    assert grid(simulate(make_schedule("zbv", ranks=2, microbatches=2))).splitlines()[1].startswith("rank 0  0F0 0F1 ")


@given(simulations(), st.integers(40, 200))
@example(simulate(make_schedule("1f1b", ranks=5, microbatches=1),
                  Durations(forward=0.5, input=0.5, weight=0.5, travel=9.0)), 40)  # almost all idle: not drawn
def test_no_line_is_wider_than_the_terminal(simulation: Simulation, width: int) -> None:
    assert max(map(len, grid(simulation, width=width).splitlines())) <= width


@given(st.sampled_from(sorted(SCHEDULES)), st.integers(1, 12), st.integers(1, 12), st.integers(40, 200))
def test_every_instruction_is_drawn_once_and_in_order(name: str, ranks: int, microbatches: int, width: int) -> None:
    simulation = simulate(make_schedule(name, ranks=ranks, microbatches=microbatches))
    drawn: dict[str, list[str]] = {}
    for line in grid(simulation, width=width).splitlines():
        if line.startswith("rank"):
            _, rank, *cells = line.split()
            drawn.setdefault(rank, []).extend(cell.rstrip("-") for cell in cells)
    several = simulation.schedule.stages > ranks
    for rank, row in enumerate(simulation.schedule.rows):
        labels = [str(each) if several else str(each).removeprefix(str(each.stage)) for each in row]
        assert [cell for cell in drawn[str(rank)] if cell] == labels


@given(simulations(), st.integers(1, 200))
def test_blocks_of_any_width_contain_only_grid_characters(simulation: Simulation, width: int) -> None:
    lines = grid(simulation, width=width).splitlines()
    if mostly_idle(simulation.rows):
        assert "".join("".join(lines).split()) == "".join(NOT_DRAWN.split())
        return
    for line in lines:
        assert re.fullmatch(r"time[ 0-9.e+-]*|rank +\d+[ 0-9FBIW-]*|", line)


def test_blocks_have_equal_width() -> None:
    lines = grid(simulate(make_schedule("gpipe", ranks=2, microbatches=20)), width=80).splitlines()
    blocks = [lines[start:start + 3] for start in range(0, len(lines), 4)]
    assert len(blocks) == 4
    widths = [max(map(len, block)) for block in blocks]
    assert max(widths) - min(widths) <= 5


def test_very_different_durations_still_fit_few_columns() -> None:
    simulation = simulate(make_schedule("zb-h1", ranks=2, microbatches=2), Durations(forward=1e6, input=1, weight=1e-3))
    assert max(map(len, grid(simulation, width=1000).splitlines())) < 200


def test_a_terminal_gets_colours_and_a_file_gets_plain_text() -> None:
    simulation = simulate(make_schedule("zb-h1", ranks=3, microbatches=4))
    plain = Console(width=80, file=None, force_terminal=False, color_system=None)
    with plain.capture() as caught:
        plain.print(painted(simulation, width=80), soft_wrap=True)
    assert caught.get() == grid(simulation, width=80) + "\n"
    colourful = Console(width=80, force_terminal=True, color_system="standard", no_color=False)
    with colourful.capture() as caught:
        colourful.print(painted(simulation, width=80), soft_wrap=True)
    assert len(set(re.findall(r"\x1b\[([\d;]+)mF0", caught.get()))) == 1
    assert len({re.search(rf"\x1b\[([\d;]+)m{kind}0", caught.get())[1] for kind in "FIW"}) == 3  # type: ignore[index]


# Faults


def test_an_arrow_marks_the_fault() -> None:
    assert fault(make_schedule("1f1b", ranks=2, microbatches=2), 1, 2).splitlines() == [
        "time    0     2     4     6     8",
        "rank 0  F0 F1       B0---    B1---",
        "rank 1     F0 B0--- F1 B1---",
        "                    ^ 1F1"]


@given(st.sampled_from(sorted(SCHEDULES)), st.integers(1, 12), st.integers(1, 40), st.data())
def test_the_arrow_points_at_any_instruction(name: str, ranks: int, microbatches: int,
                                             data: st.DataObject) -> None:
    schedule = make_schedule(name, ranks=ranks, microbatches=microbatches)
    rank = data.draw(st.integers(0, ranks - 1))
    position = data.draw(st.integers(0, len(schedule.rows[rank]) - 1))
    lines = fault(schedule, rank, position).splitlines()
    assert len(lines) == ranks + 2 and max(map(len, lines)) < 125
    instruction = schedule.rows[rank][position]
    label = str(instruction) if schedule.stages > ranks else f"{instruction.kind}{instruction.microbatch}"
    arrow, words = lines[rank + 2].split()
    column = lines[rank + 2].index(arrow)
    assert (arrow, words) == ("^", str(instruction))
    assert re.match(rf"{label}(-| |$)", lines[rank + 1][column:])


def test_a_fault_after_a_deadlock_is_marked_at_the_end() -> None:
    schedule = make_schedule("1f1b", ranks=2, microbatches=2)
    stopped = replace(schedule, rows=(schedule.rows[0][1:], schedule.rows[1]))
    assert fault(stopped, 1, 0).splitlines()[2:] == ["rank 1", "        ^ 1F0"]


# Pictures


@given(simulations())
def test_the_svg_is_well_formed_and_names_every_instruction(simulation: Simulation) -> None:
    root = ElementTree.fromstring(svg(simulation))
    named = [title.text for title in root.iter("{http://www.w3.org/2000/svg}title")]
    assert named == [f"{cell.instruction}: {cell.start:g} to {cell.end:g}" for row in simulation.rows for cell in row]
    width, height = float(root.attrib["width"]), float(root.attrib["height"])
    for box in root.iter("{http://www.w3.org/2000/svg}rect"):
        left, top = float(box.get("x", 0)), float(box.get("y", 0))
        assert left >= 0 and left + float(box.attrib["width"]) <= width * 1.0001
        assert top >= 0 and top + float(box.attrib["height"]) <= height


def test_the_svg_has_a_colour_per_kind_and_a_dark_theme() -> None:
    drawn = svg(simulate(make_schedule("zbv", ranks=2, microbatches=3)))
    assert "prefers-color-scheme: dark" in drawn
    assert len(set(re.findall(r'fill="(#\w+)"', drawn))) == 6  # three kinds at two stages
    assert "bubble 5.3% of 19; a rank holds the activations of at most 2 microbatches" in drawn


def test_an_evaluation_can_be_drawn() -> None:
    simulation = simulate(forward_only(ranks=2, microbatches=2, owner=(0, 1)))
    assert grid(simulation).splitlines() == ["time    0     2", "rank 0  F0 F1", "rank 1     F0 F1"]
    assert str(Op.BACKWARD) not in grid(simulation) and "backward" not in svg(simulation)
