"""A large tensor is read and verified block by block, and only the blocks that a request needs are read."""

from pathlib import Path

import pytest
import torch
from checkpoint_cases import SHARDINGS, save
from test_checkpoint_damage import RANK_FILE, flip

from shoal.checkpoint import Piece, Writer, read
from shoal.checkpoint.folder import load_index
from shoal.checkpoint.tensor_file import BLOCK
from shoal.errors import CheckpointError

ROWS, COLUMNS = 1031, 2503  # not a power of two: 2.46 blocks of fp32
LARGE = torch.arange(ROWS * COLUMNS, dtype=torch.float32).reshape(ROWS, COLUMNS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("large")
    save(folder, "a", {"weight/large": LARGE})
    return folder


def interval(start: int, stop: int) -> Piece:
    return Piece(name="weight/large", shape=(ROWS, COLUMNS), start=start, stop=stop, data=torch.zeros(stop - start))


def test_a_large_tensor_has_a_checksum_for_each_block(folder: Path) -> None:
    (found,) = load_index(folder / "a").tensors["weight/large"].ranges
    assert len(found.checksums) == 3


@pytest.mark.parametrize("step", [BLOCK // 4 - 1, BLOCK // 4, BLOCK // 4 + 1])
def test_intervals_at_block_edges_are_filled_completely(folder: Path, step: int) -> None:
    with read(folder) as snapshot:
        for start, stop in ((step - 1, step), (step, step + 1), (step - 1, 2 * step + 1), (0, LARGE.numel())):
            piece = interval(start, stop)
            snapshot.fill([piece])
            assert torch.equal(piece.data, LARGE.reshape(-1)[start:stop])


def test_boxes_that_cross_blocks_are_filled_completely(folder: Path) -> None:
    with read(folder) as snapshot:
        for rank in range(3):
            (expected,) = SHARDINGS["columns"]({"weight/large": LARGE}, rank, 3)
            data = torch.zeros_like(expected.data)
            snapshot.fill([Piece(name=expected.name, shape=expected.shape, start=0, stop=expected.stop, data=data,
                                 offset=expected.offset, size=expected.size)])
            assert torch.equal(data, expected.data)


def test_a_tensor_saved_as_boxes_is_read_back_in_full(tmp_path: Path) -> None:
    pieces = [piece for rank in range(2) for piece in SHARDINGS["columns"]({"w": LARGE}, rank, 2)]
    Writer().write(tmp_path, "a", pieces).wait()
    with read(tmp_path) as snapshot:
        assert torch.equal(snapshot.tensor("w"), LARGE)


def test_damage_in_one_block_does_not_affect_other_blocks(tmp_path: Path) -> None:
    save(tmp_path, "a", {"weight/large": LARGE})
    (found,) = load_index(tmp_path / "a").tensors["weight/large"].ranges
    flip(tmp_path / "a" / RANK_FILE, found.at + BLOCK)
    step = BLOCK // 4
    with read(tmp_path) as snapshot:
        snapshot.fill([interval(0, step), interval(2 * step, LARGE.numel())])
        with pytest.raises(CheckpointError, match=rf"checksum of bytes \[{found.at + BLOCK}, {found.at + 2 * BLOCK}\)"):
            snapshot.fill([interval(2 * step - 1, 2 * step)])
