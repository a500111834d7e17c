"""Whole files as bytes: layouts that tell no later byte, names and their distances, and bits of every byte once."""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path

import pytest
import torch
from rich.console import Console

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "long_document"))

import structure
from compare import longest, size
from distances import Memory, Result, picture, table, text_picture
from documents import Recurrence, Samples, defining_blocks, names_of, read_library, recurrences
from reader import SHAPES, Reader, eager_bytes
from tally import Tally
from ways import Way, bits_of, pieces

BLOCK = structure.BLOCK
SHAPE = SHAPES["tiny"]
TEXT = b"import queue\n" + b"x = 1\n" * 20 + b"    pass\n" * 30 + b"def reading(queue):\n" + b"    print(queue)\n" * 40


def reader() -> Reader:
    torch.manual_seed(0)
    return Reader(SHAPE)


def padded(text: bytes, blocks: int) -> bytes:
    return text[:blocks * BLOCK].ljust(blocks * BLOCK, b"\0")


def test_a_line_that_defines_names_marks_its_blocks() -> None:
    text = b"#" * (BLOCK - 5) + b"\ndef finder(first, second):\n" + b"#" * (2 * BLOCK) + b"\n    self.value = 3\n"
    assert defining_blocks(text, BLOCK).tolist() == [True, True, False, True]


def test_a_row_of_blocks_does_not_depend_on_later_text() -> None:
    one, other = padded(TEXT, 10), padded(TEXT[:2 * BLOCK] + b"class Other: pass\n" * 40, 10)
    before, after = (structure.sparse(text, 4).layout for text in (one, other))
    assert not torch.equal(before, after)
    assert torch.equal(before[:, :3], after[:, :3])
    assert not before.triu(1).any() and before.diagonal(dim1=1, dim2=2).all()


def test_near_heads_see_a_window_and_far_heads_definitions_too() -> None:
    layout = structure.sparse(padded(TEXT, 16), 4).layout
    near, far = layout[0], layout[3]
    assert torch.equal(layout[1], near) and torch.equal(layout[2], far)
    assert near[15].nonzero().flatten().tolist() == [11, 12, 13, 14, 15]
    assert far[15].nonzero().flatten().tolist() == [0, 1, 2, 6, *range(11, 16)]


def test_the_layout_of_ones_reads_as_matrices_of_scores_do() -> None:
    model = reader()
    text = torch.frombuffer(bytearray(padded(TEXT, 4) + b"."), dtype=torch.uint8)[None]
    torch.testing.assert_close(model(text, structure.dense(4 * BLOCK)), model(text, None), rtol=1e-4, atol=1e-5)


def test_recurrences_are_of_names_that_the_training_has_not() -> None:
    text = b"reading = queue\nprint(reading, queue)\nreading()\n"
    assert list(recurrences(text, {b"print"})) == [
        Recurrence(22, 29, 22), Recurrence(31, 36, 21), Recurrence(38, 45, 16)]
    assert list(recurrences(text, names_of([text]))) == []


def test_samples_are_whole_files_in_turn_and_the_same_for_a_seed() -> None:
    files = [bytes([65 + n]) * 40 for n in range(5)]
    samples = Samples(files, 100, 4, seed=1)
    stream = bytes(torch.cat([samples[n][:-1] for n in range(4)]).tolist())
    assert sorted(stream.split(b"\0")[:5]) == files and len(samples) == 4 and len(samples[3]) == 101
    assert torch.equal(samples[2], Samples(files, 100, 4, seed=1)[2])
    assert bytes(samples[0][-1:].tolist()) == bytes(samples[1][:1].tolist())


def test_a_library_without_long_files_is_refused(tmp_path: Path) -> None:
    (tmp_path / "short.py").write_text("x = 1\n")
    with pytest.raises(FileNotFoundError, match="too few Python sources of 8,192 bytes"):
        read_library(tmp_path)


def test_both_ways_read_every_byte_of_a_sample_once() -> None:
    sample = torch.arange(4 * BLOCK + 1, dtype=torch.uint8)
    for way, count in (("sparse", 1), ("dense", 4)):
        parts = list(pieces(sample, Way(name=way, dense=BLOCK, times=4, heads=SHAPE.heads)))
        assert len(parts) == count and torch.equal(torch.cat([part[1:] for part in parts]), sample[1:])


@pytest.mark.parametrize("length", [40, 2 * BLOCK, 5 * BLOCK + 9])
def test_judging_gives_every_byte_the_bits_of_its_window(length: int) -> None:
    model, text = reader(), TEXT[:length]
    stream = torch.frombuffer(bytearray(b"\0" + text), dtype=torch.uint8)
    with torch.no_grad():
        bits = bits_of(model, text, Way(name="dense", dense=2 * BLOCK, times=4, heads=SHAPE.heads))
        last = length - 1
        start = max(0, -(-(length - 2 * BLOCK) // BLOCK) * BLOCK)
        alone = model(stream[None, start:length + 1], None)[0, -1] / math.log(2)
    assert bits.shape == (length,) and bits.isfinite().all()
    torch.testing.assert_close(bits[last], alone, rtol=1e-3, atol=1e-3)


def test_scores_are_means_by_position_and_by_distance() -> None:
    text = b"reading" + b" " * 293 + b"reading"
    tally = Tally(set(), near=300)
    tally.add(text, torch.arange(307.0))
    score = tally.score()
    assert [(each.name, each.bytes, each.bits) for each in score.parts] == [
        ("all", 307, 153.0), ("near", 300, 149.5), ("far", 7, 303.0)]
    assert [(each.name, each.bits) for each in score.names if each.bytes] == [("256 to 1,024", 303.0)]


def test_the_longest_dense_text_fits_the_memory() -> None:
    memory = size("64M")
    length = longest(memory, "tiny")
    assert length % BLOCK == 0 and eager_bytes(length, SHAPE) <= memory < eager_bytes(length + BLOCK, SHAPE)
    with pytest.raises(argparse.ArgumentTypeError, match="900M or 1G"):
        size("much")


def test_results_are_laid_side_by_side_and_drawn(tmp_path: Path) -> None:
    facts = {"seconds": 3.0, "parts": [{"name": name, "bytes": 9, "bits": 2.5} for name in ("all", "near", "far")],
             "names": [{"name": "0 to 256", "bytes": 9, "bits": 3.25},
                       {"name": "256 to 1,024", "bytes": 0, "bits": math.nan}]}
    results = [Result.of(way, length, Memory(bytes=1 << 20, seconds=1.0), facts)
               for way, length in (("dense", 64), ("sparse", 640))]
    picture([tmp_path / "distance.svg"], results)
    assert "<svg" in (tmp_path / "distance.svg").read_text()
    console = Console(record=True, width=100)
    console.print(table(results))
    console.print(text_picture(results))
    said = console.export_text()
    assert "640" in said and "2.500" in said and "3.25 sparse" in said and "256 to 1,024" not in said
