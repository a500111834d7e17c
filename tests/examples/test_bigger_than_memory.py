"""The example that trains under a cap: its parts, and one small run as a whole."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from model import PRESETS, Shape
from shoal.testing import run_ranks
from shoal.tier import Event

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "bigger_than_memory"))

from cap import WATCH, CapMethod, best_method, parse, run_capped
from cgroup import V1, V2, ControlGroup, FileNames
from plot import fitting_label, plot, unit_intervals
from proof import Comparison, Run, prove
from timeline import LANES, Timeline, difference, intersection, length, row, union
from training import STATE, shape_of
from usage import Usage
from view import StepRecord, bars, chart, line

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "bigger_than_memory"
HUNGRY = "data = b'x' * 300_000_000; print('it fits')"
"""A program that takes 300 MB."""


# The cap


@pytest.mark.parametrize(("text", "size"), [("512M", 512_000_000), ("1.5G", 1_500_000_000), ("512MiB", 1 << 29),
                                            ("64kb", 64_000), ("10", 10), (" 2 Gi ", 2 << 30)])
def test_a_size_is_decimal_unless_its_unit_is_binary(text: str, size: int) -> None:
    assert parse(text) == size


@pytest.mark.parametrize("text", ["", "M", "12Q", "-1G", "0", "0.0G", "1e9", "I", "5I", "1,5G"])
def test_an_invalid_size_is_refused_with_examples(text: str) -> None:
    with pytest.raises(ValueError, match=r"got .*; give a size above 0, such as 512M"):
        parse(text)


def methods() -> list[CapMethod]:
    """Return the watch, and the method that this machine prefers, if it is another one."""
    best = best_method(150_000_000)
    return [CapMethod(name=WATCH)] if best.name == WATCH else [CapMethod(name=WATCH), best]


def test_a_process_that_exceeds_the_cap_is_killed_with_a_message(capfd: pytest.CaptureFixture[str]) -> None:
    for method in methods():
        assert run_capped(150_000_000, [sys.executable, "-c", HUNGRY], method) == 1
        out, err = capfd.readouterr()
        assert "it fits" not in out and "the cap of 150 MB was exceeded" in err, method.name
        assert method.group is None or not method.group.folder.exists()


def test_under_the_cap_the_exit_code_is_that_of_the_command(capfd: pytest.CaptureFixture[str]) -> None:
    command = [sys.executable, "-c", "import sys; print(sys.argv[-1]); sys.exit(7)"]
    for method in methods():
        assert run_capped(150_000_000, command, method) == 7
        assert capfd.readouterr().out.strip() == method.name


@pytest.mark.parametrize(("names", "files", "swap"), [
    (V1, {"memory.usage_in_bytes": "7", "memory.max_usage_in_bytes": "9", "memory.stat": "cache 2\ntotal_rss 5\n",
          "memory.oom_control": "oom_kill_disable 0\noom_kill 1\n"}, "100"),
    (V2, {"memory.current": "7", "memory.peak": "9", "memory.stat": "file 2\nanon 5\n",
          "memory.events": "max 3\noom_kill 1\n"}, "0"),
], ids=["v1", "v2"])
def test_both_cgroup_versions_report_the_same(names: FileNames, files: dict[str, str], swap: str, tmp_path: Path) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    group = ControlGroup(folder=tmp_path, names=names)
    assert (group.current, group.peak, group.anonymous, group.killed) == (7, 9, 5, 1)
    group.limit(100)
    assert ((tmp_path / names.limit).read_text(), (tmp_path / names.swap).read_text()) == ("100", swap)
    (tmp_path / names.peak).unlink()
    assert group.peak == 0


# Time

Times = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)).map(lambda pair: (float(min(pair)), float(max(pair)))))


def moments(times: list[tuple[float, float]]) -> set[int]:
    """Return the unit intervals that integer times cover."""
    return {moment for start, stop in times for moment in range(int(start), int(stop))}


@given(Times, Times)
def test_interval_operations_are_those_of_sets(some: list[tuple[float, float]],
                                               others: list[tuple[float, float]]) -> None:
    a, b = union(some), union(others)
    assert moments(a) == moments(some) and length(a) == len(moments(some))
    assert moments(intersection(a, b)) == moments(some) & moments(others)
    assert moments(difference(a, b)) == moments(some) - moments(others)
    assert union(a) == a and union([*intersection(a, b), *difference(a, b)]) == a


def test_intervals_closer_than_the_gap_are_merged() -> None:
    assert union([(0, 1), (1.5, 2), (4, 5)], gap=0.5) == [(0, 2), (4, 5)]


def test_a_row_is_as_high_as_the_covered_fraction() -> None:
    assert row([(0, 2), (3, 3.5), (5, 9)], 0, 8, 8) == "██ ▄ ███"
    assert row([(0.999, 1.001)], 0, 2, 2) == "▁▁"
    assert row([], 0, 1, 5) == "     "


def event(lane: str, start: float, stop: float, bytes: int = 0, unit: str = "0") -> Event:
    return Event(lane=lane, name=f"weights of unit 'blocks.{unit}'", start=start, stop=stop, bytes=bytes)


EVENTS = [event("forward", 0, 4), event("wait", 1, 2), event("read", 0, 3, 100), event("read", 2, 3, 100, "12"),
          event("write", 3, 6, 50), event("step", 5, 6), event("write", 9, 12, 50)]


def timeline() -> Timeline:
    return Timeline.of(EVENTS, 0, 10)


def test_compute_excludes_waits() -> None:
    assert timeline().lanes["forward"] == [(0, 1), (2, 4)]
    assert length(timeline().compute) == 4 and timeline().share("forward", "backward", "step") == 0.4


def test_a_concurrent_step_takes_no_time_from_forward() -> None:
    found = Timeline.of([event("forward", 0, 10), event("wait", 2, 5), event("step", 1, 4), event("fetch", 4, 9)], 0, 10)
    assert (found.lanes["forward"], found.lanes["step"]) == ([(0, 2), (5, 10)], [(1, 4)])
    assert length(found.compute) == 9


def test_overlap_is_disk_time_during_compute() -> None:
    found = timeline()
    assert length(found.disk) == 7  # time after the step does not count
    assert found.overlap == pytest.approx(0.4) and found.hidden == pytest.approx(4 / 7)
    assert (found.read, found.written) == (200, 100)


# The view


def test_a_line_shows_the_bytes_of_a_step() -> None:
    usage = Usage(device=None, host=400_000_000, disk=2_000_000_000)
    shown = line(StepRecord(step=3, steps=10, loss=2.5, usage=usage, timeline=timeline()), 512_000_000)
    assert shown == ("step  3/10  loss 2.500  10.00 s  read 200 B (20 B/s)  wrote 100 B (10 B/s)  overlap 40%  "
                    "host 400 MB of 512 MB  disk 2 GB")


def test_bars_share_one_scale_and_show_the_cap() -> None:
    shown = bars(Usage(device=250, host=250, disk=1000), 500).plain.splitlines()
    assert shown == [f"device   {'█' * 12} 250 B", f"host     {'█' * 12}{'░' * 12} 250 B of 500 B",
                    f"disk     {'█' * 48} 1 kB"]
    assert len(bars(Usage(device=None, host=250, disk=1000), 500).plain.splitlines()) == 2


def test_a_chart_has_a_row_for_every_lane_and_a_scale() -> None:
    rows = chart(timeline(), 20).plain.splitlines()
    assert [text.split()[0] for text in rows[:-1]] == list(LANES)
    assert rows[-1].split() == ["0", "10.00", "s"] and {len(text) for text in rows[:-1]} == {34}


def test_the_intervals_of_units_do_not_overlap() -> None:
    assert list(unit_intervals(timeline(), EVENTS, "read")) == [("blocks.0", [(0, 3)])]
    found = [event("read", 0, 2), event("read", 1, 3, unit="1"), event("read", 4, 5)]
    assert list(unit_intervals(Timeline.of(found, 0, 5), found, "read")) == [
        ("blocks.0", [(0, 2)]), ("blocks.1", [(2, 3)]), ("blocks.0", [(4, 5)])]


def test_a_label_is_shortened_to_fit() -> None:
    assert [fitting_label("blocks.12", share) for share in (0.1, 0.03, 0.001)] == ["blocks.12", "12", ""]


def test_the_lanes_are_plotted(tmp_path: Path) -> None:
    plot(tmp_path / "step.png", timeline(), EVENTS, "a step")
    assert (tmp_path / "step.png").read_bytes().startswith(b"\x89PNG")


# The model and the proof


@pytest.mark.parametrize("state", [10**7, 1_800_000_000, 2_048_000_000, 4 * 10**9, 4 * 10**10])
def test_the_model_has_the_requested_size(state: int) -> None:
    shape = shape_of(state)
    with torch.device("meta"):
        parameters = sum(parameter.numel() for parameter in shape.build().parameters())
    assert state <= STATE * parameters < 1.1 * state + 16 * 12 * shape.dim ** 2


def proven(path: Path) -> list[Comparison]:
    return list(prove(path, Shape(layers=2, dim=64, heads=1), steps=2))


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_disk_changes_neither_losses_nor_weights(ranks: int, tmp_path: Path) -> None:
    for found in run_ranks(ranks, proven, tmp_path):
        assert [(each.dtype, each.equal) for each in found] == [("fp32", True), ("bf16", True)], list(map(str, found))
    assert list(tmp_path.iterdir()) == []


def test_a_difference_is_named_with_its_step() -> None:
    plain = Run(losses=(2.0, 1.5), weights="a")
    assert str(Comparison(dtype="fp32", with_tiers=Run(losses=(2.0, 1.25), weights="a"), without=plain)) == (
        "fp32: the losses differ from step 2 on: 1.25 with the disk, 1.5 without")
    assert "the weights after the last step are not" in str(
        Comparison(dtype="fp32", with_tiers=Run(losses=(2.0, 1.5), weights="b"), without=plain))


# The whole


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder in the repository; a temporary folder may be in memory."""
    (ROOT / "out").mkdir(exist_ok=True)
    with TemporaryDirectory(dir=ROOT / "out", prefix="test-bigger-than-memory-") as name:
        yield Path(name)


def train(*options: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(EXAMPLE / "train.py"), *map(str, options)], capture_output=True, text=True,
                          env=os.environ | {"CUDA_VISIBLE_DEVICES": ""}, check=False)


@pytest.mark.skipif(sys.platform != "linux", reason="memory can be capped, and state can rest on a disk, under Linux only")
def test_a_model_of_four_times_the_cap_is_trained_under_it(folder: Path) -> None:
    finished = train("--tiny", "--path", folder, "--out", folder / "out")
    assert finished.returncode == 0, finished.stdout + finished.stderr
    for dtype in ("fp32", "bf16"):
        assert f"{dtype}: 3 losses and all weights are equal to the last bit with and without the disk" in finished.stdout
    figures = dict(re.findall(r"^  (\S.*?)  +(\S.*?) *$", finished.stdout, re.MULTILINE))
    assert float(figures["state / cap"]) >= 4
    assert float(figures["peak of memory"].split()[0]) <= 448
    assert "step 2/2" in finished.stdout and "overlap" in finished.stdout
    assert [path.name for path in folder.iterdir()] == ["out"], "the state is still on the disk"
    assert (folder / "out/step.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(("options", "message"), [
    (["--cap", "12Q"], "argument --cap: got '12Q'; give a size above 0, such as 512M"),
    (["--steps", "0"], "argument --steps: got 0; give a number above 0"),
    (["--tiny", "--path", "/nowhere/at/all"], "/nowhere/at/all does not exist; make it, or give a folder"),
    (["--model", "huge"], f"choose from {', '.join(map(repr, PRESETS))}"),
])
def test_bad_input_is_named_and_exits_with_2(options: list[str], message: str) -> None:
    finished = train(*options)
    assert finished.returncode == 2 and message in finished.stderr, finished.stderr
    assert "Traceback" not in finished.stderr
