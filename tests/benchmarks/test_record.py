"""The page says how a part was made, keeps parts that were not made anew, and marks those older than their code."""

from __future__ import annotations

import json
from pathlib import Path

import choice
import pytest
import render_page
from catalogue import SYSTEMS
from results import Target, interval, quartiles, spread_ratio
from sections import SECTIONS
from tuning import Best

import zero

ROOT = Path(__file__).parents[2]
PAGE = "a\n<!-- disk -->\n`disk.py` on 2026-01-01, commit 0123456.\n\nold\n\n<!-- /disk -->\nb\n"


def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: int | None) -> Path:
    file = tmp_path / "page.md"
    file.write_text(PAGE)
    monkeypatch.setattr(render_page, "PAGE", file)
    monkeypatch.setattr(render_page, "changes_since", lambda commit, paths: changes)
    return file


def test_a_part_without_a_file_stays_and_is_marked_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = page(tmp_path, monkeypatch, 3)
    for _ in range(2):
        render_page.fill_page(tmp_path)
        assert file.read_text().count(
            "*Older than the code: 3 commits have changed `benchmarks/disk.py`, `src/shoal/tier` since.*") == 1
    monkeypatch.setattr(render_page, "changes_since", lambda commit, paths: 0)
    render_page.fill_page(tmp_path)
    assert "Older" not in file.read_text() and "\nold\n" in file.read_text() and file.read_text().endswith("\nb\n")


def test_a_commit_that_is_not_there_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = page(tmp_path, monkeypatch, None)
    render_page.fill_page(tmp_path)
    assert "commit 0123456 is not in this history" in file.read_text()


def test_the_page_has_a_place_for_every_section() -> None:
    text = (ROOT / "docs" / "measurements.md").read_text()
    assert [name for name in SECTIONS if f"<!-- {name} -->" not in text or f"<!-- /{name} -->" not in text] == []
    assert all((ROOT / "benchmarks" / section.command.split()[0]).exists() for section in SECTIONS.values())
    assert all((ROOT / path).exists() for section in SECTIONS.values() for path in section.watched)


def test_a_ratio_shows_its_quartiles() -> None:
    assert quartiles([1.0, 2.0, 3.0, 4.0, 5.0]) == (2.0, 3.0, 4.0) and spread_ratio([1.0, 2.0, 3.0]) == "2.00 (1.50 to 2.50)"
    assert Target(what="x", measured=0.9, high=1.0, spread=(0.85, 0.95)).row()[2] == "0.9 (0.85 to 0.95)"


def test_a_target_is_met_where_its_whole_spread_is() -> None:
    beside = {spread: Target(what="x", measured=0.9, high=1.0, spread=spread) for spread in ((0.8, 0.95), (0.8, 1.1))}
    assert [target.verdict for target in beside.values()] == ["met", "**not resolved**"]
    assert [target.met for target in beside.values()] == [True, False]
    missed = Target(what="x", measured=1.4987, low=1.5, high=float("inf"), spread=(1.4, 1.6))
    assert missed.row()[2:] == ("1.499 (1.4 to 1.6)", "**missed**"), "1.5 would be met"


def test_an_interval_of_a_mean_is_students() -> None:
    low, high = interval([1.0, 2.0, 3.0, 4.0, 5.0])
    assert (low, high) == (pytest.approx(3 - 1.963, abs=1e-3), pytest.approx(3 + 1.963, abs=1e-3))
    assert interval([1.0]) == (float("-inf"), float("inf"))


def test_the_best_settings_stand_for_a_peer(tmp_path: Path) -> None:
    file = tmp_path / "tuning-2.json"
    assert Best.load(file).of("ddp") == "ddp"
    file.write_text(json.dumps({"benchmark": "tuning-2", "machine": {"date": "2026-01-01"}, "raw": {"best": {
        "ddp": "ddp-bucket-5"}}}))
    best = Best.load(file)
    assert best.of("ddp") == "ddp-bucket-5" and best.of("shoal-1") == "shoal-1" and "2026-01-01" in best.words


def test_systems_that_are_compared_are_alive_at_once() -> None:
    names, best = zero.CHOICES, Best(names={"ddp": "ddp-bucket-5"})
    for most, sizes in ((16, [16]), (9, [8, 9]), (7, [5, 4, 7, 3])):
        groups = zero.grouped(names, best, most)
        assert [len(group) for group in groups] == sizes and {group[0] for group in groups} == {"ddp-bucket-5"}
        assert all(any({*row} <= {*group} for group in groups) for row in zero.COMPARED)
    cut = zero.grouped(names, best, 4)
    assert max(map(len, cut)) == 4 and {name for group in cut for name in group} == {"ddp-bucket-5", *names}


def test_the_choice_compares_only_what_learns_as_well() -> None:
    found = {"ddp-bf16": [2.0, 2.0], "ddp-powersgd-1": [9.0, 9.0], "ddp-powersgd-1-late": [2.5, 2.5],
             "onebit-adam-1": [3.0, 3.2]}
    speed = {"benchmark": "communication", "machine": {"date": "d", "commit": "c"},
             "raw": {"training times": {name: {"200mbit": times} for name, times in found.items()}}}
    above = {"DDP, AdamW, hook none": [], "DDP, AdamW, hook bf16": [0.0, 0.1, 0.0], "OneBitAdam (onebit)": [0.1, 0.2, 0.1],
             "DDP, AdamW, hook powersgd-1": [2.0, 3.0, 2.0], "DDP, AdamW, hook powersgd-1-late": [0.4, 0.5, 0.4],
             "DDP, AdamW, hook powersgd-1-nadam": [0.0, 0.1, 0.0], "AdamW (zero1)": []}
    quality = {"benchmark": "convergence", "machine": {"date": "d", "commit": "c"},
               "raw": {name: {"above": each, "steps": choice.TRAINING_STEPS, "model": "3m"} for name, each in above.items()}}
    choices = choice.collected(speed["raw"], quality["raw"], "200mbit")  # type: ignore[arg-type]
    laid = choice.outcome(choices, speed, quality, "200mbit")
    (target,) = laid.targets
    assert SYSTEMS["ddp-powersgd-1"].title + ", NAdam over" not in target.what and "OneBitAdam" in target.what
    assert "over DDP, PowerSGD of rank 1, NAdam" in target.what and target.measured == pytest.approx(3.1 / 9)
    verdicts = {row[0]: row[3] for row in laid.sheets[0].rows}
    assert [title for title, learns in verdicts.items() if learns == "yes"] == [
        "DDP, PowerSGD of rank 1, NAdam", SYSTEMS["onebit-adam-1"].title, SYSTEMS["ddp-bf16"].title, "DDP"]
