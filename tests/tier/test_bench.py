"""`shoal disk bench` measures with the I/O threads of training, recommends settings, and leaves no file behind."""

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


def test_every_round_measures_every_setting_and_leaves_no_file(tmp_path: Path) -> None:
    rows: list[BenchRow] = []
    for measured in measure(tmp_path, (SMALL, LARGE), bytes=SMALLEST, seconds=0.1):
        assert list(tmp_path.iterdir()) == [], "its file is unlinked, so that it cannot outlive the process"
        rows.append(measured)
    assert [measured.setting for measured in rows] == [SMALL, LARGE] * ROUNDS
    assert all(measured.read > 0 and measured.write > 0 for measured in rows)


def test_rounds_are_merged_into_medians() -> None:
    rows = [row(SMALL, 1, 9), row(LARGE, 5, 5), row(SMALL, 2, 7), row(SMALL, 9, 8)]
    assert merged(rows) == [row(SMALL, 2, 8), row(LARGE, 5, 5)]


def test_the_best_setting_is_the_smallest_within_5_percent() -> None:
    assert best([row(SMALL, 96, 96), row(LARGE, 100, 100)]).setting == SMALL
    assert best([row(SMALL, 94, 94), row(LARGE, 100, 100)]).setting == LARGE
    assert best([row(SMALL, 1000, 10), row(LARGE, 100, 100)]).setting == LARGE


def test_a_failing_disk_ends_the_benchmark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: object) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "preadv", broken)
    with pytest.raises(TierError, match=r"the benchmark could not be read from .*: Input/output error"):
        list(measure(tmp_path, (SMALL,), bytes=SMALLEST, seconds=0.1))
    assert list(tmp_path.iterdir()) == []


# The command


def test_the_command_prints_settings_for_the_configuration(
        tmp_path: Path, quick: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["disk", "bench", str(tmp_path), "--size", "64M", "--seconds", "0.1"]) == 0
    shown = capsys.readouterr().out
    assert "a file of 64 MiB" in shown and "read GB/s" in shown
    aio = json.loads(shown.splitlines()[-1])["aio"]
    assert aio in [{"block_size": setting.block_bytes, "queue_depth": setting.requests, "intra_op_parallelism": 1}
                   for setting in (SMALL, LARGE)]


def test_the_command_prints_one_json_object_with_json(
        tmp_path: Path, quick: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["disk", "bench", str(tmp_path), "--size", "64MiB", "--seconds", "0.1", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["path"] == str(tmp_path) and found["file_bytes"] == SMALLEST
    assert [measured["requests"] for measured in found["rows"]] == [2, 8]
    assert set(found["aio"]) == {"block_size", "queue_depth", "intra_op_parallelism"}


def error_of(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """Return the error message of `shoal disk bench`, which must fail."""
    try:
        code = main(["disk", "bench", *words])
    except SystemExit as exit:  # argparse
        code = exit.code
    shown = capsys.readouterr()
    assert code == 2 and shown.out == ""
    return shown.err


@pytest.mark.parametrize(("words", "message"), [
    (("--size", "much"), "argument --size: got 'much'; give a size such as 512MiB, 64M or 12GB"),
    (("--size", "1M"), "--size: got 1 MiB; give at least 64 MiB"),
    (("--seconds", "0"), "argument --seconds: got '0'; give a number of seconds above 0"),
    (("--seconds", "inf"), "argument --seconds: got 'inf'; give a number of seconds above 0"),
    (("--seconds", "long"), "argument --seconds: got 'long'; give a number of seconds above 0"),
    (("--size", "8000T"), "are free; make room, or give a smaller --size"),
])  # fmt: skip
def test_bad_numbers_are_refused(words: tuple[str, ...], message: str, tmp_path: Path,
                                 capsys: pytest.CaptureFixture[str]) -> None:
    assert message in error_of(capsys, str(tmp_path), *words)
    assert list(tmp_path.iterdir()) == []


def test_a_missing_folder_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert f"shoal disk: {tmp_path}/none does not exist" in error_of(capsys, f"{tmp_path}/none")
