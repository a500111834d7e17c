"""Laws of sudden death: whatever ends a save, a whole checkpoint stands under `latest`, and the next save succeeds."""

import multiprocessing
import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from checkpoint_cases import assert_holds, flat, save, state, whole

from shoal.checkpoint import Ranks, Writer, read, verify, writer
from shoal.errors import CheckpointError
from shoal.testing import run_ranks

CALLS = ("open", "write", "fsync", "mkdir", "rename", "replace", "unlink", "rmdir")
"""The system calls through which a save changes the disk."""


def die_at(call: int) -> None:
    """Kill this process at its n-th system call that changes the disk; a write is done by half first."""
    made = 0

    def counted(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*args: Any, **options: Any) -> Any:
            nonlocal made
            made += 1
            if made == call:
                if name == "write":
                    real(args[0], memoryview(args[1])[: len(args[1]) // 2])
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*args, **options)
        return wrapper

    for name in CALLS:
        setattr(os, name, counted(name, getattr(os, name)))


def in_child(action: Callable[[], None]) -> int:
    """Run `action` in a fork of this process and return what ended it."""
    if (child := os.fork()) == 0:
        action()
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def held(folder: Path) -> int:
    """Return the seed of the state that the latest checkpoint holds, whole."""
    with read(folder) as snapshot:
        seed = snapshot.shared["seed"]
        assert isinstance(seed, int)
        assert_holds(snapshot, state(seed))
    assert verify(folder).faults == []
    return seed


def die_everywhere(root: str, first: str, second: str) -> list[int]:
    """Kill a save of `second`, with `first` before it, at each system call; return what stood under `latest` then."""
    found: list[int] = []
    while True:
        folder = Path(root) / str(len(found))
        save(folder, first, state(1), shared={"seed": 1}, step=1)

        def save_and_die(folder: Path = folder) -> None:
            die_at(len(found) + 1)
            save(folder, second, state(2), shared={"seed": 2}, step=2, keep_last=1)

        ended = in_child(save_and_die)
        found.append(held(folder))
        save(folder, second, state(3), shared={"seed": 3}, step=3, keep_last=1)
        assert held(folder) == 3
        assert sorted(path.name for path in folder.iterdir() if path.is_dir()) == [second]
        if ended == 0:
            return found
        assert ended == -signal.SIGKILL


@pytest.mark.parametrize(("first", "second"), [("a", "b"), ("a", "a")], ids=["a new tag", "the same tag"])
def test_a_process_killed_at_any_call_of_a_save_leaves_the_old_or_the_new_checkpoint(
        tmp_path: Path, first: str, second: str) -> None:
    (found,) = run_ranks(1, die_everywhere, str(tmp_path), first, second)
    assert len(found) > 20
    assert found == sorted(found)
    assert set(found) == {1, 2}


def lose_a_rank(folder: str) -> str:
    """Become two ranks, of which rank 1 is killed while it writes; return what rank 0 hears."""
    dist.destroy_process_group()
    child = os.fork()
    rank = int(child == 0)
    store = dist.FileStore(f"{folder}.store", 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    pending_writer = Writer(Ranks.join())
    pending_writer.write(folder, "a", flat(state(1), rank, 2), shared={"seed": 1}).wait()
    if rank == 1:
        die_at(2)
    try:
        pending_writer.write(folder, "b", flat(state(2), rank, 2), shared={"seed": 2}).wait()
    except CheckpointError as error:
        os.waitpid(child, 0)
        return str(error)
    return "rank 1 lived"


def test_ranks_that_lose_a_rank_during_a_save_are_told_and_the_previous_checkpoint_stands(tmp_path: Path) -> None:
    (said,) = run_ranks(1, lose_a_rank, str(tmp_path / "run"))
    assert said.startswith("rank 0 lost another rank during a checkpoint (")
    assert said.endswith("see the log of the rank that left first")
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["a", "latest"]
    assert held(tmp_path / "run") == 1


def save_as_the_main_thread_ends(folder: str, how: str) -> None:
    """Begin a save that writes nothing before the main thread has ended, then end it."""
    os.dup2(os.open(f"{folder}.stderr", os.O_WRONLY | os.O_CREAT), 2)
    write_rank_file = writer.write_rank_file

    def write_late(*args: Any, **options: Any) -> object:
        threading.main_thread().join()
        if how == "fail":
            raise OSError("the cable was pulled")
        return write_rank_file(*args, **options)

    writer.write_rank_file = write_late
    Writer().write(folder, "b", whole(state(2)), shared={"seed": 2})
    if how in ("SIGTERM", "SIGINT"):
        os.kill(os.getpid(), signal.Signals[how])
        signal.pause()


@pytest.mark.parametrize(("how", "exit_code", "stands"), [
    ("return", 0, 2), ("fail", 0, 1), ("SIGINT", 1, 2), ("SIGTERM", -signal.SIGTERM, 1)])
def test_a_process_that_ends_with_a_save_under_way(tmp_path: Path, how: str, exit_code: int, stands: int) -> None:
    folder = tmp_path / "run"
    save(folder, "a", state(1), shared={"seed": 1})
    process = multiprocessing.get_context("forkserver").Process(target=save_as_the_main_thread_ends, args=(str(folder), how))
    process.start()
    process.join()
    assert process.exitcode == exit_code
    assert held(folder) == stands
    said = Path(f"{folder}.stderr").read_text()
    assert ("CheckpointError: could not save" in said and "the cable was pulled" in said) == (how == "fail")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    folder.mkdir()
    if sys.platform != "linux" or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "shoal-test", folder],
                                                 capture_output=True, check=False).returncode != 0:
        pytest.skip("mounting a small disk is not permitted here")
    yield folder
    subprocess.run(["umount", folder], check=True)


def test_a_full_disk_fails_the_save_and_nothing_else(small_disk: Path) -> None:
    save(small_disk, "a", state(1), shared={"seed": 1})
    with pytest.raises(CheckpointError) as caught:
        save(small_disk, "b", {"weight/large": torch.ones(100_000)})
    assert str(caught.value).startswith(f"could not save {small_disk}/b: no space is left in {small_disk}: "
                                        "this rank needs 400,000 bytes, 0 are free there now")
    assert sorted(path.name for path in small_disk.iterdir()) == ["a", "latest"]
    assert held(small_disk) == 1
    save(small_disk, "b", state(2), shared={"seed": 2})
    assert held(small_disk) == 2


def save_beyond_the_limit(folder: str) -> str:
    save(folder, "a", state(1), shared={"seed": 1})
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
    try:
        save(folder, "b", {"weight/large": torch.ones(100_000)})
    except CheckpointError as error:
        return str(error)
    return ""


def test_a_limit_on_the_size_of_files_fails_the_save_and_nothing_else(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    (said,) = run_ranks(1, save_beyond_the_limit, str(folder))
    assert said.startswith(f"could not save {folder}/b: the limit of a file's size is reached in {folder}: this rank needs ")
    assert held(folder) == 1


def test_a_save_under_way_in_another_process_is_left_alone(tmp_path: Path) -> None:
    save(tmp_path, "a")
    os.mkdir(tmp_path / ".shoal-saving-b")
    with writer.folders.lock(tmp_path / ".shoal-saving-b", shared=False):
        with pytest.raises(CheckpointError, match=r": another process is saving 'b' there right now$"):
            save(tmp_path, "b")
        save(tmp_path, "c")
        assert (tmp_path / ".shoal-saving-b").exists()
    save(tmp_path, "b")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b", "c", "latest"]
