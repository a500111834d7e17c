"""After a crash at any point of a save, `latest` names a complete checkpoint and the next save succeeds."""

import fcntl
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
from checkpoint_cases import assert_equal_state, flat, save, state, whole

from shoal.checkpoint import Ranks, Writer, read, verify, writer
from shoal.errors import CheckpointError
from shoal.testing import run_ranks

CALLS = ("open", "write", "fsync", "mkdir", "rename", "replace", "unlink", "rmdir")
"""The system calls by which a save modifies the disk."""


def die_at(call: int) -> None:
    """Kill this process at its n-th system call that modifies the disk; half of a write is done before the kill."""
    count = 0

    def counted(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*args: Any, **options: Any) -> Any:
            nonlocal count
            count += 1
            if count == call:
                if name == "write":
                    real(args[0], memoryview(args[1])[: len(args[1]) // 2])
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*args, **options)
        return wrapper

    for name in CALLS:
        setattr(os, name, counted(name, getattr(os, name)))


def in_child(action: Callable[[], None]) -> int:
    """Run `action` in a fork of this process and return its exit code."""
    if (child := os.fork()) == 0:
        action()
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def latest_seed(folder: Path) -> int:
    """Verify the latest checkpoint and return the seed of its state."""
    with read(folder) as snapshot:
        seed = snapshot.shared["seed"]
        assert isinstance(seed, int)
        assert_equal_state(snapshot, state(seed))
    assert verify(folder).faults == []
    return seed


def die_at_every_call(root: str, first: str, second: str) -> list[int]:
    """Save `first`, then kill a save of `second` at each system call; return the seeds under `latest` after each kill."""
    seeds: list[int] = []
    while True:
        folder = Path(root) / str(len(seeds))
        save(folder, first, state(1), shared={"seed": 1}, step=1)

        def save_and_die(folder: Path = folder) -> None:
            die_at(len(seeds) + 1)
            save(folder, second, state(2), shared={"seed": 2}, step=2, keep_last=1)

        exit_code = in_child(save_and_die)
        seeds.append(latest_seed(folder))
        save(folder, second, state(3), shared={"seed": 3}, step=3, keep_last=1)
        assert latest_seed(folder) == 3
        assert sorted(path.name for path in folder.iterdir() if path.is_dir()) == [second]
        if exit_code == 0:
            return seeds
        assert exit_code == -signal.SIGKILL


@pytest.mark.parametrize(("first", "second"), [("a", "b"), ("a", "a")], ids=["a new tag", "the same tag"])
def test_a_kill_at_any_system_call_leaves_the_old_or_the_new_checkpoint(
        tmp_path: Path, first: str, second: str) -> None:
    (seeds,) = run_ranks(1, die_at_every_call, str(tmp_path), first, second)
    assert len(seeds) > 20
    assert seeds == sorted(seeds)
    assert set(seeds) == {1, 2}


def lose_a_rank(folder: str) -> str:
    """Fork into two ranks, kill rank 1 while it writes, and return the error of rank 0."""
    dist.destroy_process_group()
    child = os.fork()
    rank = int(child == 0)
    store = dist.FileStore(f"{folder}.store", 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    writer_of_rank = Writer(Ranks.join())
    writer_of_rank.write(folder, "a", flat(state(1), rank, 2), shared={"seed": 1}).wait()
    if rank == 1:
        die_at(2)
    try:
        writer_of_rank.write(folder, "b", flat(state(2), rank, 2), shared={"seed": 2}).wait()
    except CheckpointError as error:
        os.waitpid(child, 0)
        return str(error)
    return "rank 1 was not killed"


def test_losing_a_rank_during_a_save_raises_and_keeps_the_last_checkpoint(tmp_path: Path) -> None:
    (message,) = run_ranks(1, lose_a_rank, str(tmp_path / "run"))
    assert message.startswith("rank 0 lost its connection to another rank during a checkpoint (")
    assert message.endswith("see the log of the rank that failed first")
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["a", "latest"]
    assert latest_seed(tmp_path / "run") == 1


def save_as_the_main_thread_ends(folder: str, how: str) -> None:
    """Begin a save that writes nothing before the main thread has ended, then end the main thread."""
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


@pytest.mark.parametrize(("how", "exit_code", "seed"), [
    ("return", 0, 2), ("fail", 0, 1), ("SIGINT", 1, 2), ("SIGTERM", -signal.SIGTERM, 1)])
def test_a_process_exit_waits_for_a_running_save(tmp_path: Path, how: str, exit_code: int, seed: int) -> None:
    folder = tmp_path / "run"
    save(folder, "a", state(1), shared={"seed": 1})
    process = multiprocessing.get_context("forkserver").Process(target=save_as_the_main_thread_ends, args=(str(folder), how))
    process.start()
    process.join()
    assert process.exitcode == exit_code
    assert latest_seed(folder) == seed
    message = Path(f"{folder}.stderr").read_text()
    assert ("was not saved: could not save" in message and "the cable was pulled" in message) == (how == "fail")


EXITS = """
import os, sys, time
import torch, shoal, torch.distributed as dist
import shoal.engine.build
torch.set_num_threads(1)

def train_and_save(rank, folder, how):
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", LOCAL_RANK=str(rank))
    dist.init_process_group("gloo", store=dist.FileStore(folder + "/store", 2), rank=rank, world_size=2)
    model = torch.nn.Sequential(*[torch.nn.Linear(100, 100) for _ in range(4)])
    engine = shoal.initialize(model=model, config={"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 3},
                                                   "optimizer": {"type": "Adam"}, "timeout": 20})[0]
    engine.backward(engine(torch.randn(2, 100)).sum())
    engine.step()
    time.sleep(0.6 * rank)  # rank 0 looks at the failure board while it waits
    engine.consolidated_state_dict()
    engine.save_checkpoint(folder)
    if how == "destroyed":
        dist.destroy_process_group()

for how in ("left", "destroyed"):
    folder = f"{sys.argv[1]}/{how}"
    os.mkdir(folder)
    ranks = []
    for rank in range(2):
        if not (pid := os.fork()):
            train_and_save(rank, folder, how)
            sys.exit()
        ranks.append(pid)
    print(how, [os.waitpid(pid, 0)[1] for pid in ranks], os.path.exists(folder + "/latest"), flush=True)
"""


def test_ranks_that_end_during_a_save_finish_it_and_exit_cleanly(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", EXITS, str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.stdout.splitlines() == ["left [0, 0] True", "destroyed [0, 0] True"], done.stderr
    assert "terminate" not in done.stderr


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    folder.mkdir()
    if sys.platform != "linux" or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "shoal-test", folder],
                                                 capture_output=True, check=False).returncode != 0:
        pytest.skip("mounting a small disk is not permitted here")
    yield folder
    subprocess.run(["umount", folder], check=True)


def test_a_full_disk_fails_only_the_save(small_disk: Path) -> None:
    save(small_disk, "a", state(1), shared={"seed": 1})
    with pytest.raises(CheckpointError) as caught:
        save(small_disk, "b", {"weight/large": torch.ones(100_000)})
    assert str(caught.value).startswith(f"could not save {small_disk}/b: no space is left in {small_disk}: "
                                        "this rank needs 400,000 bytes, 0 are free there now")
    assert sorted(path.name for path in small_disk.iterdir()) == ["a", "latest"]
    assert latest_seed(small_disk) == 1
    save(small_disk, "b", state(2), shared={"seed": 2})
    assert latest_seed(small_disk) == 2


def save_beyond_the_limit(folder: str) -> str:
    save(folder, "a", state(1), shared={"seed": 1})
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
    try:
        save(folder, "b", {"weight/large": torch.ones(100_000)})
    except CheckpointError as error:
        return str(error)
    return ""


def test_a_file_size_limit_fails_only_the_save(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    (message,) = run_ranks(1, save_beyond_the_limit, str(folder))
    assert message.startswith(f"could not save {folder}/b: the file size limit is exceeded in {folder}: this rank needs ")
    assert latest_seed(folder) == 1


def test_a_running_save_of_another_process_is_not_removed(tmp_path: Path) -> None:
    save(tmp_path, "a")
    os.mkdir(tmp_path / ".shoal-saving-b")
    with writer.folders.lock(tmp_path / ".shoal-saving-b", shared=False):
        with pytest.raises(CheckpointError, match=r": another process is saving 'b' in this folder$"):
            save(tmp_path, "b")
        save(tmp_path, "c")
        assert (tmp_path / ".shoal-saving-b").exists()
    save(tmp_path, "b")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b", "c", "latest"]


def test_a_running_save_is_not_removed_where_files_cannot_be_locked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_locks(*_: object) -> None:
        raise OSError("no locks")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    for tag, age in (("running", 0), ("old", 2 * writer.folders.WRITTEN_WITHIN), ("own", 0)):
        os.mkdir(folder := tmp_path / f".shoal-saving-{tag}")
        os.utime(folder, (folder.stat().st_mtime - age,) * 2)
    save(tmp_path, "own")
    assert sorted(path.name for path in tmp_path.iterdir()) == [".shoal-saving-running", "latest", "own"]
