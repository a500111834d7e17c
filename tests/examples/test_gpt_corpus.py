"""Laws of the byte corpus."""

import lzma
import math
from pathlib import Path

import pytest
import torch

from corpus import END, Blocks, documents, is_validation, order0_entropy, prepare, xz_bits_per_byte


@pytest.fixture
def library(tmp_path: Path) -> Path:
    """A small standard library: 200 distinct modules, and files that must stay out."""
    root = tmp_path / "library"
    (root / "package" / "test").mkdir(parents=True)
    for index in range(200):
        (root / "package" / f"module{index:03}.py").write_text(f"value = {index}\n" * 20)
    (root / "copy.py").write_text("value = 7\n" * 20)  # the content of module007
    (root / "latin.py").write_bytes("# café\n".encode("latin-1"))
    (root / "nul.py").write_bytes(b"a\0b")
    (root / "empty.py").write_text("")
    (root / "_sysconfigdata_linux.py").write_text("build = {}\n")
    (root / "package" / "test" / "test_module.py").write_text("odd = 1\n")
    return root


def test_a_document_is_utf8_new_by_content_and_not_a_test(library: Path) -> None:
    found = list(documents(library))
    assert len(found) == len(set(found)) == 200
    assert all(content.startswith(b"value = ") for content in found)


def test_two_preparations_give_the_same_bytes(library: Path, tmp_path: Path) -> None:
    first, second = prepare(tmp_path / "a", library), prepare(tmp_path / "b", library)
    assert first.train.path.read_bytes() == second.train.path.read_bytes()
    assert first.validation.path.read_bytes() == second.validation.path.read_bytes()


def test_a_cached_corpus_is_not_written_again(library: Path, tmp_path: Path) -> None:
    before = prepare(tmp_path / "cache", library)
    (library / "late.py").write_text("late = True\n")
    assert prepare(tmp_path / "cache", library) == before


def test_every_document_is_in_exactly_one_split(library: Path, tmp_path: Path) -> None:
    corpus = prepare(tmp_path / "cache", library)
    train, validation = (split.path.read_bytes().split(END)[:-1] for split in (corpus.train, corpus.validation))
    assert sorted(train + validation) == sorted(documents(library))
    assert all(map(is_validation, validation)) and not any(map(is_validation, train))
    assert (len(train), len(validation)) == (corpus.train.documents, corpus.validation.documents)


def test_the_yardsticks_describe_the_validation_bytes(library: Path, tmp_path: Path) -> None:
    split = prepare(tmp_path / "cache", library).validation
    data = split.path.read_bytes()
    assert split.length == len(data)
    assert split.xz == 8 * len(lzma.compress(data, preset=9)) / len(data)
    assert split.order0 == order0_entropy(data)


def test_order_0_entropy_is_8_bits_for_all_bytes_alike_and_0_for_one() -> None:
    assert order0_entropy(bytes(range(256)) * 3) == pytest.approx(8)
    assert order0_entropy(b"aaaa") == 0
    assert order0_entropy(b"aab") == pytest.approx(-(2 / 3) * math.log2(2 / 3) - (1 / 3) * math.log2(1 / 3))


def test_repetition_costs_xz_next_to_nothing() -> None:
    assert xz_bits_per_byte(b"shoal " * 10_000) < 0.05


def test_blocks_predict_each_byte_but_the_first_once(tmp_path: Path) -> None:
    path = tmp_path / "bytes.bin"
    path.write_bytes(bytes(range(33)))
    blocks = Blocks(path, 8)
    assert len(blocks) == 4
    assert torch.cat([blocks[i][0] for i in range(4)]).tolist() == list(range(32))
    assert torch.cat([blocks[i][1] for i in range(4)]).tolist() == list(range(1, 33))


def test_overlapping_blocks_start_a_stride_apart_and_stay_whole(tmp_path: Path) -> None:
    path = tmp_path / "bytes.bin"
    path.write_bytes(bytes(range(20)))
    blocks = Blocks(path, 8, stride=4)
    assert [(x[0].item(), y[-1].item()) for x, y in (blocks[i] for i in range(len(blocks)))] == [(0, 8), (4, 12), (8, 16)]


def test_a_file_shorter_than_a_block_is_refused_with_both_sizes(tmp_path: Path) -> None:
    (tmp_path / "bytes.bin").write_bytes(b"short")
    with pytest.raises(ValueError, match=r"bytes.bin: got 5 bytes; a block of 8 needs at least 9"):
        Blocks(tmp_path / "bytes.bin", 8)


def test_a_library_without_sources_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no train documents: .*bare holds too few Python sources"):
        prepare(tmp_path / "cache", tmp_path / "bare")
