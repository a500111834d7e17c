"""Every changed byte of a checkpoint is detected, and one error lists everything that a request lacks."""

import json
import pickle
import shutil
import zlib
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from checkpoint_cases import assert_equal_state, save, state, whole
from safetensors.torch import load_file, save_file

from shoal.checkpoint import Piece, Writer, read, verify
from shoal.checkpoint.folder import load_index
from shoal.checkpoint.index import Range
from shoal.errors import CheckpointError

RANK_FILE = "rank00000-000.safetensors"


@pytest.fixture(scope="module")
def intact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("intact")
    save(folder, "old", step=1)
    save(folder, "new", step=2, shared={"t": torch.ones(2)}, private={"t": torch.ones(3)})
    return folder


@pytest.fixture
def folder(intact: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(intact, tmp_path / "run"))


def flip(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 0x10
    path.write_bytes(content)


def cube(folder: Path) -> Range:
    (found,) = load_index(folder / "new").tensors["weight/cube"].ranges
    return found


def load_all(folder: Path) -> None:
    with read(folder) as snapshot:
        snapshot.fill([Piece(name=name, shape=(shape := snapshot.shape(name)), start=0, stop=torch.Size(shape).numel(),
                             data=torch.zeros(torch.Size(shape).numel())) for name in snapshot.names()])
        _ = snapshot.shared, snapshot.private(0)


def test_every_flipped_byte_of_a_tensor_is_detected_when_read(folder: Path) -> None:
    path = folder / "new" / RANK_FILE
    start = 8 + int.from_bytes(path.read_bytes()[:8], "little")
    for at in range(start, path.stat().st_size, 7):
        flip(path, at)
        with pytest.raises(CheckpointError, match=f"damaged in {RANK_FILE} of rank 0: wrong checksum of bytes"):
            load_all(folder)
        flip(path, at)
    load_all(folder)


def test_a_damage_error_names_tensor_file_rank_and_alternative(folder: Path) -> None:
    found = cube(folder)
    flip(folder / "new" / RANK_FILE, found.at)
    with pytest.raises(CheckpointError) as caught:
        load_all(folder)
    assert str(caught.value) == (
        f"could not load {folder}/new: weight/cube: damaged in {RANK_FILE} of rank 0: wrong checksum of bytes "
        f"[{found.at}, {found.at + 840})"
        "; the newest intact checkpoint in the folder is 'old': load it with tag='old'")


def test_damaged_data_can_be_read_without_verify(folder: Path) -> None:
    found = cube(folder)
    flip(folder / "new" / RANK_FILE, found.at)
    with read(folder, verify=False) as snapshot:
        assert int((snapshot.tensor("weight/cube") != state()["weight/cube"]).sum()) == 1


def test_every_flipped_byte_of_a_file_is_found_by_verify(folder: Path) -> None:
    path = folder / "new" / RANK_FILE
    for at in range(0, path.stat().st_size, 5):
        flip(path, at)
        assert len(verify(folder).faults) == 1, at
        flip(path, at)
    assert verify(folder).faults == []


def test_every_flipped_byte_of_the_index_is_detected(folder: Path) -> None:
    path = folder / "new" / "index.json"
    for at in range(0, path.stat().st_size, 3):
        flip(path, at)
        with pytest.raises(CheckpointError, match=r"index.json: .*; the newest intact checkpoint in the folder is 'old'"):
            read(folder)
        flip(path, at)


def test_a_truncated_file_is_detected_when_the_checkpoint_is_opened(folder: Path) -> None:
    path = folder / "new" / RANK_FILE
    size = path.stat().st_size
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CheckpointError) as caught:
        read(folder)
    assert str(caught.value) == (
        f"could not load: {folder}/new: damaged\n  {path} (rank 0): truncated, got {size - 1} bytes, expected {size}; "
        "the newest intact checkpoint in the folder is 'old': load it with tag='old'")
    load_all_of_old(folder)


def load_all_of_old(folder: Path) -> None:
    with read(folder, "old") as snapshot:
        assert_equal_state(snapshot, state())


def test_a_file_truncated_while_open_is_detected(folder: Path) -> None:
    path = folder / "new" / RANK_FILE
    with read(folder) as snapshot:
        path.write_bytes(path.read_bytes()[:-1])
        with pytest.raises(CheckpointError, match=f"damaged in {RANK_FILE} of rank 0: ends at byte"):
            for name in snapshot.names():
                snapshot.tensor(name)
            snapshot.private(0)
            _ = snapshot.shared


@pytest.mark.parametrize(("name", "message"), [
    ("index.json", r"new: has no index.json, so it is not a checkpoint, or it is damaged"),
    (RANK_FILE, r"\(rank 0\): missing"),
])
def test_a_missing_file_is_named(folder: Path, name: str, message: str) -> None:
    (folder / "new" / name).unlink()
    with pytest.raises(CheckpointError, match=message):
        read(folder)


def test_the_error_says_when_no_other_checkpoint_is_intact(folder: Path) -> None:
    shutil.rmtree(folder / "old")
    (folder / "new" / "index.json").unlink()
    with pytest.raises(CheckpointError, match=r"; .*run has no other complete checkpoint$"):
        read(folder)


def test_a_longer_file_is_detected(folder: Path) -> None:
    with (folder / "new" / RANK_FILE).open("ab") as file:
        file.write(b"x")
    with pytest.raises(CheckpointError, match=r"too long, got"):
        read(folder)


def rewrite(folder: Path, **facts: object) -> None:
    """Change fields of the index and keep its checksum valid."""
    path = folder / "new" / "index.json"
    whole_text = json.loads(path.read_bytes())
    body = json.dumps({**whole_text["index"], **{k: v for k, v in facts.items() if k in whole_text["index"]}})
    head = {**{k: whole_text[k] for k in ("format", "version")}, "checksum": zlib.crc32(body.encode())}
    head |= {k: v for k, v in facts.items() if k in head}
    path.write_text(json.dumps(head).removesuffix("}") + ', "index": ' + body + "}\n")


@pytest.mark.parametrize(("facts", "message"), [
    ({"version": 2}, r"got format version 2, this version of Shoal reads 1; use the version of Shoal that wrote it"),
    ({"format": "zip"}, r"got the format 'zip', expected 'shoal checkpoint'"),
    ({"step": "x"}, r"this version of Shoal cannot read the index: 1 validation error"),
    ({"files": [{"name": "../../secret", "rank": 0, "size": 1, "header": 0, "checksum": 0}]},
     r"names the file '../../secret', which is outside the checkpoint"),
])
def test_a_foreign_index_is_rejected(folder: Path, facts: dict[str, object], message: str) -> None:
    rewrite(folder, **facts)
    with pytest.raises(CheckpointError, match=message):
        read(folder)


def request(name: str, *shape: int) -> Piece:
    size = torch.Size(shape).numel()
    return Piece(name=name, shape=shape, start=0, stop=size, data=torch.full((size,), 7.0))


def test_one_message_lists_all_mismatches_and_nothing_is_filled(folder: Path) -> None:
    fits = request("weight/cube", 3, 5, 7)
    with pytest.raises(CheckpointError) as caught, read(folder) as snapshot:
        snapshot.fill([fits, request("weight/embedd", 13, 8), request("weight/embed", 8, 13), request("moment", 1),
                       Piece(name="weight/scalar", shape=(), start=0, stop=1, data=torch.zeros(2)),
                       Piece(name="buffer/count", shape=(5,), start=0, stop=5, data=torch.zeros(10)[::2])])
    assert str(caught.value) == (
        f"could not load {folder}/new: the checkpoint does not match the request:\n"
        "  weight/embedd: not in the checkpoint; did you mean weight/embed?\n"
        "  weight/embed: saved with shape (13, 8), requested with (8, 13)\n"
        "  moment: not in the checkpoint\n"
        "  weight/scalar: [0, 1) needs data of shape (1,), got (2,)\n"
        "  buffer/count: the data to fill is not contiguous")
    assert fits.data.unique().tolist() == [7.0]


def test_elements_that_were_not_saved_are_counted(folder: Path) -> None:
    index = json.loads((folder / "new" / "index.json").read_bytes())["index"]
    index["tensors"]["weight/cube"]["ranges"][0]["start"] = 5  # which no writer produces
    rewrite(folder, tensors=index["tensors"])
    with pytest.raises(CheckpointError, match=r"weight/cube: 5 of elements \[0, 105\) were not saved"):
        load_all(folder)
    assert verify(folder).faults[0] == "weight/cube: 5 of 105 elements are in no piece, the first are [0, 5)"


def test_the_shape_of_an_unknown_tensor_is_an_error(folder: Path) -> None:
    with pytest.raises(CheckpointError, match=r"new: has no tensor 'weight/nothing'$"):
        read(folder).shape("weight/nothing")


@pytest.mark.parametrize(("piece", "message"), [
    (Piece(name="weight/x", shape=(2,), start=0, stop=3, data=torch.zeros(3)),
     "weight/x: [0, 3) is not an interval of a box of 2 elements"),
    (Piece(name="weight/x", shape=(2,), start=0, stop=2, data=torch.zeros(2, dtype=torch.complex128)),
     "weight/x: got torch.complex128, allowed are float64, float32, "),
])
def test_pieces_that_cannot_be_saved_are_named(tmp_path: Path, piece: Piece, message: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        Writer().write(tmp_path, "a", [piece])
    assert str(caught.value).startswith(f"these pieces cannot be saved:\n  {message}")


def test_a_read_back_mismatch_fails_the_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import shoal.checkpoint.rank_file as module

    checksums = module.checksums
    monkeypatch.setattr(module, "checksums", lambda data: [checksum ^ 1 for checksum in checksums(data)])
    with pytest.raises(CheckpointError, match=r"the disk contains other bytes than were written; check the disk$"):
        save(tmp_path, "a")
    assert list(tmp_path.iterdir()) == []


@dataclass
class Bomb:
    path: str

    def __reduce__(self) -> tuple[object, tuple[str, str]]:
        return open, (self.path, "w")


def test_a_pickle_in_place_of_a_tensor_file_is_never_executed(folder: Path) -> None:
    (folder / "new" / RANK_FILE).write_bytes(pickle.dumps(Bomb(str(folder / "boom"))))
    with pytest.raises(CheckpointError):
        read(folder)
    assert not (folder / "boom").exists()


def test_the_safetensors_library_reads_every_file(folder: Path) -> None:
    saved = load_file(folder / "new" / RANK_FILE)
    for piece in whole(state()):
        if piece.start < piece.stop:
            assert torch.equal(saved[f"{piece.name}[0:{piece.stop}]"], piece.data)


@dataclass(frozen=True)
class Layout:
    start: int
    entries: dict[str, object]


def layout(path: Path) -> Layout:
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    return Layout(start=8 + size, entries=json.loads(data[8: 8 + size]))


def test_files_are_aligned_and_no_larger_than_safetensors_files(folder: Path, tmp_path: Path) -> None:
    path = folder / "new" / RANK_FILE
    save_file(load_file(path), tmp_path / "theirs")
    ours, theirs = layout(path), layout(tmp_path / "theirs")
    assert ours.start % 64 == 0
    assert path.stat().st_size - ours.start == (tmp_path / "theirs").stat().st_size - theirs.start
