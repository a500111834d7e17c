"""Several ranks save and load together; an error on one rank is raised on every rank."""

import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from checkpoint_cases import SHARDINGS, assert_equal_state, save, state, whole

from shoal.checkpoint import Piece, Ranks, Writer, read, snapshot, verify, writer
from shoal.checkpoint.rank_file import LinkedStaging, Staging
from shoal.checkpoint.ranks import SHORT
from shoal.errors import CheckpointError, RanksDisagree, UsageError
from shoal.testing import run_ranks


def save_sharded(folder: str, sharding: str) -> None:
    writer = Writer(Ranks.join())
    rank, ranks = dist.get_rank(), dist.get_world_size()
    pieces = list(SHARDINGS[sharding](state(), rank, ranks))
    writer.write(folder, "step7", pieces, step=7, shared={"from": rank},
                 private={"rank": rank, "rng": torch.full((3,), rank)}, file_bytes=256).wait()


def messages(sizes: list[list[int]]) -> list[tuple[list[int], list[int], bool]]:
    """Gather messages of these sizes by rank; return what arrived, by size, and whether the bytes are those of the rank."""
    ranks, found = Ranks.join(), []
    for by_rank in sizes:
        message = bytes([ranks.rank + 1]) * by_rank[ranks.rank]
        everywhere, on_first = ranks.all_gather(message), ranks.gather(message)
        right = all(each == bytes([rank + 1]) * len(each) for got in (everywhere, on_first) for rank, each in enumerate(got))
        found.append(([*map(len, everywhere)], [*map(len, on_first)], right))
    return found


def test_messages_of_any_length_arrive_whole() -> None:
    sizes = [[0, 0, 0], [SHORT, 1, 0], [0, SHORT + 1, SHORT], [3 * SHORT, SHORT - 1, 5000]]
    for rank, found in enumerate(run_ranks(3, messages, sizes)):
        assert found == [(by_rank, [] if rank else by_rank, True) for by_rank in sizes]


def save_linked(folder: str, sharding: str, sizes: list[int]) -> int:
    """Save once for each of `sizes`, the bytes of a file, in files of a pool; return how many this rank had in all."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    pool = Path(folder, f"pool{rank}")
    writer, inodes = Writer(Ranks.join(), staging=LinkedStaging(pool, rank)), set[int]()
    for number, size in enumerate(sizes):
        pieces = list(SHARDINGS[sharding](state(), rank, ranks))
        writer.write(folder, f"step{number}", pieces, step=number, private={"rank": rank}, file_bytes=size, keep_last=2,
                     read_back=False).wait()
        dist.barrier()
        inodes |= {path.stat().st_ino for path in pool.iterdir()}
    return len(inodes)


def test_linked_files_of_one_save_are_apart_and_serve_later_saves(tmp_path: Path) -> None:
    for name, sizes in (("same", [64] * 8), ("changing", [64, 256, 1 << 20, 64])):
        folder = tmp_path / name
        folder.mkdir()
        found = run_ranks(2, save_linked, str(folder), "flat", sizes)
        tag = folder / f"step{len(sizes) - 1}"
        assert verify(folder, tag.name).faults == []
        for same, _ in run_ranks(3, load_sharded, str(folder), "columns"):
            assert all(same)
        for rank, count in enumerate(found):
            files = len(list(tag.glob(f"rank{rank:05d}-*")))
            assert files > 1
            if name == "same":
                assert count == 3 * files


def test_linked_files_of_one_size_are_not_taken_twice_by_one_save(tmp_path: Path) -> None:
    writer = Writer(staging=LinkedStaging(tmp_path / "pool", 0))
    for step in range(6):
        pieces = [Piece(name=f"weight/{i}", shape=(16,), start=0, stop=16, data=torch.full((16,), 10.0 * step + i))
                  for i in range(4)]
        writer.write(tmp_path / "saved", f"step{step}", pieces, step=step, file_bytes=64, keep_last=2).wait()
        with read(tmp_path / "saved") as saved:
            assert [saved.tensor(piece.name)[0].item() for piece in pieces] == [10 * step + i for i in range(4)]
    files = list((tmp_path / "pool").iterdir())
    assert len(files) == 3 * 4 and len({file.stat().st_size for file in files}) < 4


def blank(piece: Piece, dtype: torch.dtype | None = None) -> Piece:
    data = torch.zeros(piece.data.shape, dtype=dtype or piece.data.dtype)
    return Piece(name=piece.name, shape=piece.shape, start=piece.start, stop=piece.stop, data=data, offset=piece.offset,
                 size=piece.size)


def load_sharded(folder: str, sharding: str) -> tuple[list[bool], object]:
    ranks = Ranks.join()
    wanted = list(SHARDINGS[sharding](state(), ranks.rank, ranks.count))
    found = [blank(piece) for piece in wanted]
    with read(folder, ranks=ranks) as saved:
        saved.fill(found)
        values = saved.shared, [saved.private(rank)["rank"] for rank in range(saved.ranks)]
    return [torch.equal(a.data, b.data) for a, b in zip(wanted, found, strict=True)], values


@pytest.mark.parametrize(("writers", "saved_as", "readers", "loaded_as"), [
    (1, "flat", 3, "columns"), (3, "flat", 2, "flat"), (4, "columns", 2, "flat"), (2, "columns", 3, "columns"),
    (3, "columns", 1, "flat")])
def test_m_ranks_load_what_n_ranks_saved_in_another_sharding(
        tmp_path: Path, writers: int, saved_as: str, readers: int, loaded_as: str) -> None:
    run_ranks(writers, save_sharded, str(tmp_path), saved_as)
    for equal, values in run_ranks(readers, load_sharded, str(tmp_path), loaded_as):
        assert all(equal)
        assert values == ({"from": 0}, list(range(writers)))
    assert_equal_state(read(tmp_path), state())


def test_fill_casts_to_the_dtype_of_the_piece(tmp_path: Path) -> None:
    save(tmp_path, "a")
    found = [blank(piece, torch.float32) for piece in whole(state())]
    read(tmp_path).fill(found)
    for piece, tensor in zip(found, state().values(), strict=True):
        assert torch.equal(piece.data, tensor.reshape(-1).float())


def test_a_streamed_save_writes_the_same_bytes_without_a_copy(tmp_path: Path) -> None:
    pieces = list(whole(state()))
    for name, streamed in (("copied", False), ("streamed", True)):
        Writer().write(tmp_path / name, "a", pieces, file_bytes=256, streamed=streamed).wait()
    files = sorted(path.name for path in (tmp_path / "copied" / "a").iterdir())
    assert files == sorted(path.name for path in (tmp_path / "streamed" / "a").iterdir())
    for name in files:
        assert (tmp_path / "copied/a" / name).read_bytes() == (tmp_path / "streamed/a" / name).read_bytes(), name
    staged = Staging().copy(pieces, 256, streamed=True)
    shared = {torch.frombuffer(data, dtype=torch.uint8).data_ptr() for file in staged.files for data in file.data}
    assert shared == {piece.data.data_ptr() for piece in pieces if piece.start < piece.stop}



def hold_files(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Block every file write until the returned event is set."""
    import shoal.checkpoint.writer as module

    opened = threading.Event()
    write_file = module.write_rank_file

    def wait_and_write(*args: object, **options: object) -> object:
        assert opened.wait(300)
        return write_file(*args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(module, "write_rank_file", wait_and_write)
    return opened


def test_training_continues_while_a_checkpoint_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = hold_files(monkeypatch)
    tensors = state()
    pending = Writer().write(tmp_path, "a", whole(tensors))
    assert not pending.done
    for tensor in tensors.values():
        tensor.zero_()
    opened.set()
    assert pending.wait() == tmp_path / "a"
    assert pending.done
    assert_equal_state(read(tmp_path), state())


def all_reduce_while_saving(folder: str) -> bool:
    with pytest.MonkeyPatch.context() as patch:
        opened = hold_files(patch)
        pending = Writer(Ranks.join()).write(folder, "a", SHARDINGS["flat"](state(), dist.get_rank(), 2))
        for _ in range(20):
            dist.all_reduce(torch.ones(1000))
        busy = not pending.done
        opened.set()
        dist.all_reduce(torch.ones(1000))
        pending.wait()
    return busy


def test_a_save_does_not_affect_collectives_of_training(tmp_path: Path) -> None:
    assert run_ranks(2, all_reduce_while_saving, str(tmp_path)) == [True, True]
    assert_equal_state(read(tmp_path), state())


def destroy_while_saving(folder: str) -> str:
    with pytest.MonkeyPatch.context() as patch:
        opened = hold_files(patch)
        pending = Writer(Ranks.join()).write(folder, "a", SHARDINGS["flat"](state(), dist.get_rank(), 2))
        dist.destroy_process_group()
        opened.set()
        return pending.wait().name


def test_a_save_outlives_the_default_process_group(tmp_path: Path) -> None:
    assert run_ranks(2, destroy_while_saving, str(tmp_path)) == ["a", "a"]
    assert_equal_state(read(tmp_path), state())


def fail_on_rank_1(folder: str) -> list[str]:
    """Save, save with a full file system on rank 1, save again; return the error and the visible names."""
    import shoal.checkpoint.rank_file as module

    ours, rank = Writer(Ranks.join()), dist.get_rank()
    ours.write(folder, "good", SHARDINGS["flat"](state(), rank, 2), step=1).wait()
    write_all = module.write_all

    def run_out(descriptor: int, data: memoryview) -> None:
        if rank == 1:
            raise OSError(28, "No space left on device")
        write_all(descriptor, data)

    messages: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "write_all", run_out)
        ours.write(folder, "bad", SHARDINGS["flat"](state(), rank, 2), step=2)
        try:
            ours.wait()
        except CheckpointError as error:
            messages.append(str(error))
    dist.barrier()
    messages.append(" ".join(sorted(path.name for path in Path(folder).iterdir())))
    dist.barrier()
    ours.write(folder, "next", SHARDINGS["flat"](state(), rank, 2), step=3).wait()
    return messages


def test_every_rank_names_the_rank_that_failed_and_latest_stays(tmp_path: Path) -> None:
    for message, names in run_ranks(2, fail_on_rank_1, str(tmp_path)):
        assert message.startswith(f"could not save {tmp_path / 'bad'}: rank 1: no space is left in {tmp_path}: "
                                  "this rank needs 748 bytes, ")
        assert "free there now" in message
        assert names == "good latest"
    with read(tmp_path) as found:
        assert found.tag == "next"


def error_of_next_save(folder: str) -> list[str]:
    ours, rank = Writer(Ranks.join()), dist.get_rank()
    pieces = [piece for piece in SHARDINGS["flat"](state(), rank, 2) if (rank, piece.name) != (1, "weight/cube")]
    ours.write(folder, "bad", pieces)
    messages: list[str] = []
    for _ in range(2):
        try:
            ours.write(folder, "next", SHARDINGS["flat"](state(), rank, 2)).wait()
        except CheckpointError as error:
            messages.append(str(error))
    return messages


def test_an_unreported_failure_is_raised_once_by_the_next_save(tmp_path: Path) -> None:
    for message in run_ranks(2, error_of_next_save, str(tmp_path)):
        assert message == [f"could not save {tmp_path / 'bad'}: rank 0: the pieces do not cover every tensor exactly once:\n"
                           "  weight/cube: 52 of 105 elements are in no piece, the first are [53, 105)"]
    assert_equal_state(read(tmp_path, "next"), state())


def unsupported_value_on_rank_1(folder: str) -> tuple[str, str]:
    rank = dist.get_rank()
    private = {"state": {"hook": print}} if rank == 1 else {}
    try:
        Writer(Ranks.join()).write(folder, "a", [], private=private).wait()
    except (UsageError, CheckpointError) as error:
        return type(error).__name__, str(error)
    return "", ""


def test_a_value_that_one_rank_cannot_save_fails_all_ranks(tmp_path: Path) -> None:
    (other, heard), (own, message) = run_ranks(2, unsupported_value_on_rank_1, str(tmp_path))
    assert (other, own) == ("CheckpointError", "UsageError")
    assert message.startswith("state.hook: got builtins.builtin_function_or_method, which cannot be saved without pickle")
    assert heard == f"could not save {tmp_path / 'a'}: rank 1: {message}"


def save_under_rank_tag(folder: str) -> str:
    try:
        Writer(Ranks.join()).write(folder, f"tag{dist.get_rank()}", []).wait()
    except RanksDisagree as error:
        return str(error)
    return ""


def test_ranks_that_save_under_different_tags_raise(tmp_path: Path) -> None:
    message = (f"ranks save to different folders, rank 0 to {tmp_path}/tag0, rank 1 to {tmp_path}/tag1; "
               "give every rank the same folder and tag")
    assert run_ranks(2, save_under_rank_tag, str(tmp_path)) == [message, message]


def overlap_pieces(folder: str, sharding: str) -> str:
    rank = dist.get_rank()
    data = torch.arange(12.0)

    def one(name: str, start: int, stop: int, **box: object) -> Piece:
        return Piece(name=name, shape=(3, 4), start=start, stop=stop, data=data[start:stop], **box)  # type: ignore[arg-type]

    cases: dict[str, list[Piece]] = {
        "flat": [one("weight/x", 0, 8), one("weight/x", 6, 12)],
        "boxes": [one("weight/x", 0, 12), one("weight/x", 0, 4, offset=(1, 0), size=(1, 4))],
        "dtype": [one("weight/x", 0, 6), Piece(name="weight/x", shape=(3, 4), start=6, stop=12, data=data[6:].double())],
    }
    try:
        Writer(Ranks.join()).write(folder, "a", [cases[sharding][rank]]).wait()
    except CheckpointError as error:
        return str(error).splitlines()[-1].strip()
    return ""


@pytest.mark.parametrize(("sharding", "message"), [
    ("flat", "weight/x: elements [6, 8) of the box at [0, 0] of size [3, 4] are saved twice"),
    ("boxes", "weight/x: the box at [0, 0] of size [3, 4] and the box at [1, 0] of size [1, 4] overlap, so some elements "
     "are saved twice"),
    ("dtype", "weight/x: rank 1 has F64 (3, 4), an earlier rank has F32 (3, 4)"),
])
def test_overlapping_and_missing_pieces_are_named(tmp_path: Path, sharding: str, message: str) -> None:
    assert run_ranks(2, overlap_pieces, str(tmp_path), sharding) == [message, message]


def load_damaged(folder: str) -> str:
    ranks = Ranks.join()
    pieces = [blank(piece) for piece in SHARDINGS["flat"](state(), ranks.rank, 2)]
    try:
        read(folder, ranks=ranks).fill(pieces)
    except CheckpointError as error:
        return str(error)
    return ""


def test_damage_that_one_rank_finds_is_an_error_on_all_ranks(tmp_path: Path) -> None:
    run_ranks(2, save_sharded, str(tmp_path), "flat")
    last = max((tmp_path / "step7").glob("rank00001*"))
    content = bytearray(last.read_bytes())
    content[-1] ^= 1
    last.write_bytes(content)
    one, other = run_ranks(2, load_damaged, str(tmp_path))
    assert one == other
    assert one.startswith(f"could not load {tmp_path / 'step7'}: rank 1: buffer/mask: damaged in {last.name} of rank 1")


def save_in_pairs(root: str) -> None:
    pair = dist.get_rank() // 2
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    ranks = Ranks.join(groups[pair])
    for seed in range(2 + pair):  # the pairs save independently
        Writer(ranks).write(f"{root}/{pair}", "a", SHARDINGS["flat"](state(seed), ranks.rank, ranks.count)).wait()


def test_groups_of_ranks_save_independently(tmp_path: Path) -> None:
    run_ranks(4, save_in_pairs, str(tmp_path))
    assert_equal_state(read(tmp_path / "0"), state(1))
    assert_equal_state(read(tmp_path / "1"), state(2))


def save_without_sharing(folder: str, elsewhere: str) -> str:
    ranks = Ranks.join()
    with pytest.MonkeyPatch.context() as patch:
        if ranks.rank == 1:
            patch.setattr(writer.folders, "saving_path", lambda folder, tag: Path(elsewhere))
        try:
            Writer(ranks).write(folder, "a", SHARDINGS["flat"](state(), ranks.rank, ranks.count)).wait()
        except CheckpointError as error:
            return str(error)
    return ""


def test_a_rank_that_does_not_see_the_folder_of_rank_0_is_named(tmp_path: Path) -> None:
    for message in run_ranks(2, save_without_sharing, str(tmp_path / "run"), str(tmp_path / "other")):
        assert message == (f"could not save {tmp_path}/run/a: rank 1: {tmp_path}/run: rank 0 created other there, this rank "
                           "does not see it; a checkpoint needs a folder that all ranks share")


def test_files_that_rank_0_does_not_see_are_named(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    for message in run_ranks(2, save_without_sharing, str(tmp_path / "run"), str(tmp_path / "other")):
        assert message == (f"could not save {tmp_path}/run/a: rank 0: this rank does not see the files of other ranks; a "
                           "checkpoint needs a folder that all ranks share:\n"
                           f"  {tmp_path}/run/.shoal-saving-a/rank00001-000.safetensors (rank 1): missing")


def load_without_sharing(folder: str) -> str:
    ranks = Ranks.join()
    with pytest.MonkeyPatch.context() as patch:
        if ranks.rank == 1:
            patch.setattr(snapshot.folders, "locate", lambda folder, tag: None)
        try:
            read(folder, ranks=ranks)
        except CheckpointError as error:
            return str(error)
    return ""


def test_a_rank_that_does_not_see_the_checkpoint_is_named(tmp_path: Path) -> None:
    save(tmp_path, "a")
    for message in run_ranks(2, load_without_sharing, str(tmp_path)):
        assert message == (f"could not load: rank 1: {tmp_path}: rank 0 sees the checkpoint 'a', this rank does not; "
                           "a checkpoint needs a folder that all ranks share")


def test_without_a_process_group_one_rank_saves_and_loads(tmp_path: Path) -> None:
    ranks = Ranks.join()
    Writer(ranks).write(tmp_path, "a", whole(state())).wait()
    assert_equal_state(read(tmp_path, ranks=ranks), state())
