"""`shoal disk bench` measures with the engine of training, recommends what is fast and small, and leaves nothing behind."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest

from shoal.errors import TierError
from shoal.launch.cli import main
from shoal.tier import bench
from shoal.tier.bench import ROUNDS, SMALLEST, BenchRow, Setting, best, measure, merged

SMALL = Setting(block_bytes=1 << 20, requests=2)
LARGE = Setting(block_bytes=4 << 20, requests=8)


def row(setting: Setting, read: float, write: float) -> BenchRow:
    return BenchRow(setting=setting, read=read, write=write)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "SETTINGS", (SMALL, LARGE))


def test_every_setting_has_its_turn_in_every_round_and_nothing_is_left(tmp_path: Path) -> None:
    rows: list[BenchRow] = []
    for found in measure(tmp_path, (SMALL, LARGE), bytes=SMALLEST, seconds=0.1):
        assert list(tmp_path.iterdir()) == [], "its file has no name, so that it cannot outlive the process"
        rows.append(found)
    assert [found.setting for found in rows] == [SMALL, LARGE] * ROUNDS
    assert all(found.read > 0 and found.write > 0 for found in rows)


def test_rounds_are_merged_into_medians() -> None:
    rows = [row(SMALL, 1, 9), row(LARGE, 5, 5), row(SMALL, 2, 7), row(SMALL, 9, 8)]
    assert merged(rows) == [row(SMALL, 2, 8), row(LARGE, 5, 5)]


def test_the_best_is_the_smallest_of_those_that_are_as_fast_as_any() -> None:
    assert best([row(SMALL, 96, 96), row(LARGE, 100, 100)]).setting == SMALL
    assert best([row(SMALL, 94, 94), row(LARGE, 100, 100)]).setting == LARGE
    assert best([row(SMALL, 1000, 10), row(LARGE, 100, 100)]).setting == LARGE


def test_a_failing_disk_ends_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: object) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "preadv", broken)
    with pytest.raises(TierError, match=r"the benchmark could not be read from .*: Input/output error"):
        list(measure(tmp_path, (SMALL,), bytes=SMALLEST, seconds=0.1))
    assert list(tmp_path.iterdir()) == []


# The command


def test_the_command_ends_with_settings_that_a_configuration_takes(
        tmp_path: Path, quick: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["disk", "bench", str(tmp_path), "--size", "64M", "--seconds", "0.1"]) == 0
    shown = capsys.readouterr().out
    assert "a file of 64M" in shown and "read GB/s" in shown
    aio = json.loads(shown.splitlines()[-1])["aio"]
    assert aio in [{"block_size": setting.block_bytes, "queue_depth": setting.requests, "intra_op_parallelism": 1}
                   for setting in (SMALL, LARGE)]


def test_the_command_prints_one_json_object_when_asked(
        tmp_path: Path, quick: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["disk", "bench", str(tmp_path), "--size", "64MiB", "--seconds", "0.1", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["path"] == str(tmp_path) and found["file_bytes"] == SMALLEST
    assert [measured["requests"] for measured in found["rows"]] == [2, 8]
    assert set(found["aio"]) == {"block_size", "queue_depth", "intra_op_parallelism"}


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """Return what `shoal disk bench` says when it refuses."""
    try:
        code = main(["disk", "bench", *words])
    except SystemExit as ended:  # argparse
        code = ended.code
    shown = capsys.readouterr()
    assert code == 2 and shown.out == ""
    return shown.err


@pytest.mark.parametrize(("words", "message"), [
    (("--size", "much"), "argument --size: got 'much'; give a size such as 512M, 1G or 4GiB"),
    (("--size", "1M"), "--size: got 1M; give at least 64M"),
    (("--seconds", "0"), "argument --seconds: got '0'; give a number of seconds above 0"),
    (("--seconds", "inf"), "argument --seconds: got 'inf'; give a number of seconds above 0"),
    (("--seconds", "long"), "argument --seconds: got 'long'; give a number of seconds above 0"),
    (("--size", "8000T"), "are free; make room, or give a smaller --size"),
])  # fmt: skip
def test_bad_numbers_are_refused(words: tuple[str, ...], message: str, tmp_path: Path,
                                 capsys: pytest.CaptureFixture[str]) -> None:
    assert message in refused(capsys, str(tmp_path), *words)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_not_there_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert f"shoal disk: {tmp_path}/none does not exist" in refused(capsys, f"{tmp_path}/none")
