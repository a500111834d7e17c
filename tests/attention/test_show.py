"""`shoal attention show` draws what the structure visits, in the terminal and as SVG, and prints costs by formulas."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch

from shoal.attention import Blocks, FixedSparsityConfig
from shoal.attention.cost import AttentionCost
from shoal.attention.drawing import Panel, svg, text
from shoal.launch.cli import main

DIFFERING = {"mode": "fixed", "different_layout_per_head": True, "num_different_global_patterns": 2}


def show(folder: Path, section: Any, *words: str) -> int:
    file = folder / "config.json"
    file.write_text(json.dumps(section))
    return main(["attention", "show", str(file), *words])


def test_a_cell_is_a_visited_block() -> None:
    layout = torch.tensor([[1, 0, 1], [1, 1, 0], [0, 0, 0]])
    assert text(layout) == "██··██\n████··\n······"


def test_a_large_layout_is_drawn_smaller_by_the_share_that_is_visited() -> None:
    layout = torch.zeros(9, 9)
    layout[0, 0] = layout[:3, 3:6] = layout[3:6, 6:8] = 1
    assert text(layout, width=6) == "░░██··\n····▓▓\n······"
    assert [len(line) for line in text(torch.ones(1000, 1000), width=80).splitlines()] == [80] * 40


@pytest.mark.parametrize("section", [{"sparse_attention": {"mode": "fixed"}}, {"mode": "fixed"}, {}])
def test_a_section_or_a_configuration_with_one_is_drawn(section: Any, tmp_path: Path,
                                                        capsys: pytest.CaptureFixture[str]) -> None:
    assert show(tmp_path, section, "--length", "120") == 0
    shown = capsys.readouterr().out
    assert text(FixedSparsityConfig(1).make_layout(128)[0]) in shown
    assert "FixedSparsityConfig, length 128, blocks of 16" in shown
    assert "density   62.50%: 40,960 of 65,536 pairs of query and key, 4 heads" in shown


def test_layouts_that_differ_are_drawn_by_head_in_the_terminal_and_as_svg(tmp_path: Path,
                                                                          capsys: pytest.CaptureFixture[str]) -> None:
    assert show(tmp_path, DIFFERING, "--length", "256", "--svg", str(tmp_path / "layout.svg")) == 0
    assert re.findall("^head.*", capsys.readouterr().out, re.MULTILINE) == ["heads 0, 2", "heads 1, 3"]
    drawn = ElementTree.parse(tmp_path / "layout.svg")
    assert len([each for each in drawn.iter() if each.get("class") == "empty"]) == 2


def test_a_terminal_without_a_size_gets_a_drawing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                  capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", "0")
    assert show(tmp_path, {"mode": "fixed"}, "--length", "128") == 0
    assert text(FixedSparsityConfig(1).make_layout(128)[0]) in capsys.readouterr().out


def test_the_squares_of_the_svg_are_the_visited_blocks() -> None:
    layout = FixedSparsityConfig(1, 16).make_layout(256)[0]
    drawn = ElementTree.fromstring(svg("fixed", [Panel("<all>", layout)]))
    seen = [(round(float(each.get("y", 0)) - 62) // 16, round(float(each.get("x", 0)) - 16) // 16)
            for each in drawn.iter() if each.get("class") == "seen"]
    assert seen == [tuple(place) for place in layout.nonzero().tolist()]


def test_neighbouring_cells_of_a_large_layout_are_one_rectangle() -> None:
    assert svg("dense", [Panel("dense", torch.ones(512, 512))]).count('class="seen"') == 128


def test_costs_are_the_formulas() -> None:
    dense = AttentionCost(blocks=Blocks.dense(64, 64, 16), heads=2, dim=8)
    assert (dense.pairs, dense.flops, dense.dense_flops) == (2 * 64**2, 14 * 8 * 2 * 64**2, 12 * 8 * 2 * 64**2)
    assert (dense.saved_bytes, dense.dense_bytes) == (4 * 2 * 64 * 9, 4 * 2 * 64**2)
    half = AttentionCost(blocks=Blocks.of(torch.tensor([[[1, 0], [0, 1]]]), 16), heads=3, dim=8)
    assert (half.pairs, half.flops * 2, half.index_bytes) == (3 * 512, 14 * 8 * 3 * 1024, 3 * 8 + 2 * 4)


@pytest.mark.parametrize(("section", "words", "message"), [
    ({"train_batch_size": 1}, ("--length", "64"), "has no section sparse_attention; add one"),
    ({"sparse_attention": 3}, ("--length", "64"), "sparse_attention: got 3; give a JSON object"),
    ({"mode": "x"}, ("--length", "64"), "sparse_attention: mode: got \"x\"; choose dense"),
    ({"mode": "bigbird"}, ("--length", "16"), "a row has only 1 blocks"),
    ({}, ("--length", "1000000"), "62,500 blocks of 16 in a row; at most 8,192"),
    ({}, ("--length", "64", "--svg", "/nowhere/x.svg"), "--svg: got '/nowhere/x.svg'"),
])  # fmt: skip
def test_wrong_arguments_are_refused_with_the_fix(section: Any, words: tuple[str, ...], message: str, tmp_path: Path,
                                                  capsys: pytest.CaptureFixture[str]) -> None:
    assert show(tmp_path, section, *words) == 2
    assert message in capsys.readouterr().err
