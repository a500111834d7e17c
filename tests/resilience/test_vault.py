"""Copies in memory: what a restart loads, at any number of ranks, and what damage costs."""

from __future__ import annotations

import errno
import json
import logging
import os
import re
import shutil
import socket
import threading
from collections import namedtuple
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shoal
from shoal.checkpoint import tags, verify
from shoal.checkpoint.folder import incomplete, load_index
from shoal.checkpoint.memory_file import FilePool
from shoal.engine.schema import Config
from shoal.errors import CheckpointError, ConfigError, VaultTooLarge
from shoal.recording.page import PAGES
from shoal.resilience import vault
from shoal.resilience.vault import Vault
from shoal.testing import RankFailed, run_ranks

BATCH = 12
NEEDED = f"{3 * 90 * 12 / 1024:.4g} KiB"
"""Two generations and the next, of 90 weights and their two averages in fp32."""
LINE = f"resilience.vault: {NEEDED} on a node (2 generations, and the next)"


class Rows(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    def __len__(self) -> int:
        return 60 * BATCH

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        row = torch.randn(8, generator=torch.Generator().manual_seed(index))
        return row, row.sum()


def train(memory: str, disk: str, stop: int, stage: int, save_at: int = 0) -> dict[str, Any]:
    """Begin a process of an attempt: load what there is, train to step `stop`; return the first step, and the weights."""
    os.environ[PAGES] = memory
    os.makedirs(memory, exist_ok=True)
    torch.manual_seed(0)
    config = {"train_batch_size": BATCH, "optimizer": {"type": "Adam", "params": {"lr": 0.01}},
              "zero_optimization": {"stage": stage}, "resilience": {"vault": {"every": 2}}}
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.1), nn.Linear(8, 1))
    engine, _, loader, _ = shoal.initialize(model=model, training_data=Rows(), config=config)
    warnings: list[str] = []
    logging.getLogger("shoal").addHandler(handler := logging.Handler())
    handler.emit = lambda record: warnings.append(record.getMessage())
    path, client_state = engine.load_checkpoint(disk)
    first = engine.global_steps
    assert loader is not None
    for rows, targets in loader:
        if engine.global_steps == stop:
            break
        engine.backward((engine(rows).squeeze(1) - targets).square().mean())
        engine.step()
        if engine.global_steps == save_at:
            engine.save_checkpoint(disk, client_state={"saved": save_at})
            engine.wait_for_checkpoint()
    engine.copy_due()
    engine.checkpointer.wait_for_copy()
    with shoal.gathered(engine.module):
        weights = [p.detach().flatten().tolist() for p in engine.module.parameters()]
    return {"first": first, "path": path, "client_state": client_state, "weights": weights, "warnings": warnings}


@pytest.mark.parametrize("stage", [0, 3])
def test_a_restart_goes_on_from_the_newest_copy_with_the_same_bits(tmp_path: Path, stage: int) -> None:
    memory, disk = str(tmp_path / "memory"), str(tmp_path / "disk")
    run_ranks(2, train, memory, disk, 7, stage)
    again = run_ranks(2, train, memory, disk, 10, stage)
    undisturbed = run_ranks(2, train, str(tmp_path / "other"), disk, 10, stage)
    assert [each["first"] for each in again] == [6, 6]
    assert [each["first"] for each in undisturbed] == [0, 0]
    assert again[0]["weights"] == undisturbed[0]["weights"]


def test_a_client_state_of_another_step_than_the_copys_is_told(tmp_path: Path) -> None:
    told = "load_checkpoint: the client state of the copy of step {} in memory {}; take the position of the script from"
    memory, disk = str(tmp_path / "memory"), str(tmp_path / "disk")
    run_ranks(2, train, memory, disk, 5, 1)
    (text,) = of_client_state(run_ranks(2, train, memory, disk, 7, 1, 5)[0])
    assert text.startswith(told.format(4, "is empty, for the script has saved none"))
    for stop in (7, 9):  # the second one loads a copy of a process that loaded one
        (text,) = of_client_state(run_ranks(2, train, memory, disk, stop, 1)[0])
        assert text.startswith(told.format(6, "is that of step 5, which was saved last"))


def save_no_client_state(memory: str) -> tuple[str, list[str]]:
    """Load what there is, save after one step without a client state, and copy the second; return the load, and the log."""
    engine = build(memory, every=2)
    with logged() as lines:
        path, _ = engine.load_checkpoint(f"{memory}/disk")
    for step in range(2 - engine.global_steps):
        engine.backward(engine(torch.ones(1, 8)).sum())
        engine.step()
        if step == 0:
            engine.save_checkpoint(f"{memory}/disk")
    engine.copy_due()
    engine.checkpointer.end_copies()
    engine.wait_for_checkpoint()
    return Path(path or "").name, of_client_state({"warnings": lines})


def test_a_script_without_client_state_is_told_nothing_of_it(tmp_path: Path) -> None:
    run_ranks(2, save_no_client_state, str(tmp_path))
    assert run_ranks(2, save_no_client_state, str(tmp_path)) == [("step2", [])] * 2


def of_client_state(found: dict[str, Any]) -> list[str]:
    """Return the warnings about the client state."""
    return [text for text in found["warnings"] if "the client state of the copy" in text]


def test_another_number_of_ranks_loads_a_copy(tmp_path: Path) -> None:
    memory, disk = str(tmp_path / "memory"), str(tmp_path / "disk")
    run_ranks(2, train, memory, disk, 6, 2)
    for ranks in (3, 1):
        assert [each["first"] for each in run_ranks(ranks, train, memory, disk, 6, 2)] == [6] * ranks


def damage(memory: str, step: int) -> None:
    """Flip one bit in the tensors of the copy of `step`."""
    path = max(Path(memory, "vault0", f"step{step}").glob("*.safetensors"), key=lambda file: file.stat().st_size)
    data = bytearray(path.read_bytes())
    data[-5] ^= 16
    path.write_bytes(data)


def test_a_damaged_copy_is_removed_and_the_older_one_or_the_disk_is_loaded(tmp_path: Path) -> None:
    memory, disk = str(tmp_path / "memory"), str(tmp_path / "disk")
    run_ranks(2, train, memory, disk, 7, 2, 3)
    assert sorted(path.name for path in Path(memory, "vault0").glob("step*")) == ["step4", "step6"]
    damage(memory, 6)
    again = run_ranks(2, train, memory, disk, 4, 2)
    assert [each["first"] for each in again] == [4, 4]
    assert any("copy of step 6 in memory cannot be used" in text for text in again[0]["warnings"])
    assert again[0]["client_state"] == {"saved": 3}
    damage(memory, 4)
    again = run_ranks(2, train, memory, disk, 3, 2)
    assert [(each["first"], each["path"]) for each in again] == [(3, f"{disk}/global_step3")] * 2
    assert list(Path(memory, "vault0").glob("step*")) == []


@pytest.mark.parametrize("fault", ["short", "missing", "index"])
def test_a_copy_that_is_not_whole_is_named_and_removed(tmp_path: Path, fault: str) -> None:
    memory, disk = str(tmp_path / "memory"), str(tmp_path / "disk")
    run_ranks(2, train, memory, disk, 7, 2)
    path = next(Path(memory, "vault0", "step6").glob("index.json" if fault == "index" else "rank00001-*.safetensors"))
    if fault == "missing":
        path.unlink()
    else:
        whole = path.read_bytes()
        path.unlink()  # it has another name, under which the next copies would use it
        path.write_bytes(whole[:-20])
    again = run_ranks(2, train, memory, disk, 4, 2)
    assert [each["first"] for each in again] == [4, 4]
    (text,) = [text for text in again[0]["warnings"] if "a copy in memory is damaged, and is removed" in text]
    assert str(path) in text
    assert not any("damaged" in text for text in again[1]["warnings"])
    assert [path.name for path in Path(memory, "vault0").glob("step*")] == ["step4"]


def test_a_copy_that_cannot_be_read_at_present_is_not_damaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "step2").mkdir()
    assert "has no index.json" in incomplete(tmp_path)[tmp_path / "step2"]

    def without_descriptors(_: Path) -> bytes:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(Path, "read_bytes", without_descriptors)
    assert incomplete(tmp_path) == {}


def damage_checkpoint(disk: str, step: int, tensor: str = "") -> None:
    """Flip one bit of a checkpoint on disk: the last of its largest file, or the first of `tensor`, a prefix."""
    path = max(Path(disk, f"global_step{step}").glob("*.safetensors"), key=lambda file: file.stat().st_size)
    at = path.stat().st_size - 1
    if tensor:
        index = load_index(path.parent)
        first = next(stored for name, stored in index.tensors.items() if name.startswith(tensor)).ranges[0]
        path, at = path.with_name(first.file), first.at
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def of_damage(found: dict[str, Any]) -> list[str]:
    """Return the warnings that a copy took the place of a checkpoint on disk."""
    return [text for text in found["warnings"] if "the newest checkpoint is damaged" in text]


@pytest.mark.parametrize(("save_at", "tensor"), [(6, ""), (7, ""), (7, "scalar")])
def test_a_copy_stands_in_for_a_damaged_checkpoint_of_more_steps(tmp_path: Path, save_at: int, tensor: str) -> None:
    memory, disk = str(tmp_path / "memory"), str(tmp_path / "disk")
    run_ranks(2, train, memory, disk, 3, 3, 3)
    run_ranks(2, train, memory, disk, 7, 3, save_at)
    damage_checkpoint(disk, save_at, tensor)
    again = run_ranks(2, train, memory, disk, 10, 3)
    undisturbed = run_ranks(2, train, str(tmp_path / "other"), str(tmp_path / "none"), 10, 3)
    assert [each["first"] for each in again] == [6, 6]
    assert again[0]["weights"] == undisturbed[0]["weights"]
    (text,) = of_damage(again[0])
    assert "the copy of step 6 in memory took its place: could not load " in text
    assert f"global_step{save_at}" in text


@pytest.mark.parametrize("fault", ["short", "missing", "index"])
def test_a_checkpoint_that_is_not_whole_is_named_where_a_copy_is_loaded(tmp_path: Path, fault: str) -> None:
    memory, disk = str(tmp_path / "memory"), str(tmp_path / "disk")
    run_ranks(2, train, memory, disk, 7, 1, 7)
    path = Path(disk, "global_step7", "index.json" if fault == "index" else "rank00001-000.safetensors")
    if fault == "missing":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:-20])
    again = run_ranks(2, train, memory, disk, 7, 1)
    assert [each["first"] for each in again] == [6, 6]
    (text,) = of_damage(again[0])
    assert str(path) in text


def test_no_copy_stands_in_where_the_folder_has_a_newer_checkpoint(tmp_path: Path) -> None:
    memory, disk = str(tmp_path / "memory"), str(tmp_path / "disk")
    run_ranks(2, train, memory, disk, 7, 1, 7)
    run_ranks(2, train, memory, disk, 9, 1, 9)
    damage_checkpoint(disk, 9)
    shutil.rmtree(Path(memory, "vault0", "step8"))
    with pytest.raises(RankFailed, match=r"global_step9: .*wrong checksum .*load it with tag='global_step7'"):
        run_ranks(2, train, memory, disk, 9, 1)
    assert [path.name for path in Path(memory, "vault0").glob("step*")] == ["step6"]


def test_the_older_copy_stands_in_where_the_newer_one_is_damaged_too(tmp_path: Path) -> None:
    memory, disk = str(tmp_path / "memory"), str(tmp_path / "disk")
    run_ranks(2, train, memory, disk, 7, 1, 7)
    damage_checkpoint(disk, 7)
    damage(memory, 6)
    again = run_ranks(2, train, memory, disk, 4, 1)
    assert [each["first"] for each in again] == [4, 4]
    assert "the copy of step 4 in memory took its place" in "".join(of_damage(again[0]))


def load_misfit(memory: str, disk: str) -> str:
    """Return the error of a load into a model that the newest checkpoint does not fit."""
    engine = build(memory, every=2)
    with pytest.raises(CheckpointError) as raised:
        engine.load_checkpoint(disk)
    return type(raised.value).__name__


def test_no_copy_stands_in_for_a_checkpoint_that_does_not_fit(tmp_path: Path) -> None:
    memory, disk = str(tmp_path / "memory"), str(tmp_path / "disk")
    run_ranks(2, train, memory, disk, 7, 1, 7)
    assert run_ranks(2, load_misfit, memory, disk) == ["CheckpointError"] * 2
    assert len(list(Path(memory, "vault0").glob("step*"))) == 2


def test_a_process_that_may_hold_parts_of_a_damaged_copy_does_not_train(tmp_path: Path) -> None:
    memory, disk = str(tmp_path / "memory"), str(tmp_path / "disk")
    run_ranks(2, train, memory, disk, 3, 1)
    path = next(Path(memory, "vault0", "step2").glob("rank00000*"))
    data = bytearray(path.read_bytes())
    at = 8 + int.from_bytes(data[:8], "little")
    for index in range(at, len(data)):  # every tensor of rank 0: some of rank 1 are loaded
        data[index] ^= 1
    path.write_bytes(data)
    with pytest.raises(RankFailed, match="the copies in memory are damaged and removed"):
        run_ranks(2, train, memory, disk, 4, 1)
    anew = run_ranks(2, train, memory, disk, 4, 1)
    undisturbed = run_ranks(2, train, str(tmp_path / "other"), disk, 4, 1)
    assert anew[0]["first"] == 0
    assert anew[0]["weights"] == undisturbed[0]["weights"]


def train_and_go_back(memory: str, disk: str, tag: str | None) -> tuple[int, list[int]]:
    """Train to step 7 with a checkpoint at step 3, load it, and take a step; return the step loaded, and those of copies."""
    os.environ[PAGES] = memory
    os.makedirs(memory, exist_ok=True)
    config = {"train_batch_size": BATCH, "optimizer": {"type": "Adam"}, "resilience": {"vault": {"every": 2}}}
    engine, _, loader, _ = shoal.initialize(model=nn.Linear(8, 1), training_data=Rows(), config=config)
    assert loader is not None
    loaded = -1
    for rows, targets in loader:
        if engine.global_steps == 7:
            engine.load_checkpoint(disk, tag=tag)
            loaded = engine.global_steps
        engine.backward((engine(rows).squeeze(1) - targets).square().mean())
        engine.step()
        if loaded >= 0:
            break
        if engine.global_steps == 3:
            engine.save_checkpoint(disk)
    engine.copy_due()
    engine.checkpointer.wait_for_copy()
    torch.distributed.barrier()
    return loaded, [each.step for each in tags(Path(memory, "vault0"))]


@pytest.mark.parametrize("tag", [None, "global_step3"])
def test_a_script_that_goes_back_leaves_the_later_copies_behind(tmp_path: Path, tag: str | None) -> None:
    assert run_ranks(2, train_and_go_back, str(tmp_path / "memory"), str(tmp_path / "disk"), tag) == [(3, [4])] * 2


def train_two(memory: str, stop: int, every: tuple[int, int], last: bool) -> dict[str, Any]:
    """Train two engines to `stop`, the second one without its last step unless `last`; return the steps loaded, and more."""
    os.environ[PAGES] = memory
    os.makedirs(memory, exist_ok=True)
    torch.manual_seed(0)
    warnings: list[str] = []
    logging.getLogger("shoal").addHandler(handler := logging.Handler())
    handler.emit = lambda record: warnings.append(record.getMessage())
    first, second = (shoal.initialize(model=nn.Linear(8, 8), config={
        "train_batch_size": 2, "optimizer": {"type": "Adam"}, "resilience": {"vault": {"every": each}}})[0]
        for each in every)
    for engine in (first, second):
        engine.load_checkpoint("/nonexistent")
    loaded = (first.global_steps, second.global_steps)
    for step in range(first.global_steps + 1, stop + 1):
        for engine in (first, second) if last or step < stop else (first,):
            engine.backward(engine(torch.full((1, 8), 1.0 / step)).square().mean())
            engine.step()
    for engine in (first, second):
        engine.copy_due()
        engine.checkpointer.wait_for_copy()
    torch.distributed.barrier()
    return {"loaded": loaded, "warnings": warnings, "weights": [p.tolist() for each in (first, second)
                                                                for p in each.module.parameters()]}


def test_two_engines_go_on_from_copies_of_one_step(tmp_path: Path) -> None:
    undisturbed = run_ranks(2, train_two, str(tmp_path / "other"), 9, (2, 2), True)
    for every, stop, loaded in (((2, 2), 6, (4, 4)), ((1, 2), 5, (4, 4)), ((2, 2), 2, (0, 0))):
        memory = str(tmp_path / f"memory{every}{stop}")
        run_ranks(2, train_two, memory, stop, every, False)
        again = run_ranks(2, train_two, memory, 9, every, True)
        assert [each["loaded"] for each in again] == [loaded] * 2
        assert again[0]["weights"] == undisturbed[0]["weights"]


def test_engines_without_copies_of_one_step_say_so(tmp_path: Path) -> None:
    before = run_ranks(2, train_two, str(tmp_path), 9, (2, 5), True)[0]
    assert any(text.startswith("resilience.vault.every: got 5, and 2 for another engine; ") for text in before["warnings"])
    again = run_ranks(2, train_two, str(tmp_path), 10, (2, 5), True)[0]
    assert again["loaded"] == (8, 5)
    assert any("loaded the copy of step 8 in memory, and another engine has copies of steps 5 alone" in text
               for text in again["warnings"])


def train_anew(memory: str, stop: int) -> tuple[list[str], list[int]]:
    """Train to `stop` without a load; return the warnings, and the steps of the copies."""
    os.environ[PAGES] = memory
    os.makedirs(memory, exist_ok=True)
    warnings: list[str] = []
    logging.getLogger("shoal").addHandler(handler := logging.Handler())
    handler.emit = lambda record: warnings.append(record.getMessage())
    engine, *_ = shoal.initialize(model=nn.Linear(8, 1), config={
        "train_batch_size": 2, "optimizer": {"type": "Adam"}, "resilience": {"vault": {"every": 2}}})
    for _ in range(stop):
        engine.backward(engine(torch.ones(1, 8)).sum())
        engine.step()
    engine.copy_due()
    engine.checkpointer.wait_for_copy()
    torch.distributed.barrier()
    return warnings, [each.step for each in tags(Path(memory, "vault0"))]


def test_a_script_that_loads_nothing_says_so_and_leaves_the_copies(tmp_path: Path) -> None:
    (warnings, copies), _ = run_ranks(2, train_anew, str(tmp_path), 6)
    assert copies == [4, 6]
    assert not any("without having loaded" in text for text in warnings)
    (warnings, copies), _ = run_ranks(2, train_anew, str(tmp_path), 2)
    assert copies == [2]
    assert any("the script takes step 1 without having loaded them; call engine.load_checkpoint(folder)" in text
               for text in warnings)


def test_a_newer_checkpoint_on_disk_is_loaded_instead(tmp_path: Path) -> None:
    memory, disk = str(tmp_path / "memory"), str(tmp_path / "disk")
    run_ranks(2, train, memory, disk, 7, 1, 7)
    assert [each["first"] for each in run_ranks(2, train, memory, disk, 7, 1)] == [7, 7]


def files_of_copies(memory: str, stop: int) -> tuple[set[int], list[str]]:
    """Train to `stop`; return the inodes of the files of all ranks, and the faults that reading the generations finds."""
    train(memory, "/nonexistent", stop, 2)
    torch.distributed.barrier()
    inodes = {path.stat().st_ino for path in Path(memory).rglob("rank*-*.safetensors")}
    inodes |= {path.stat().st_ino for path in Path(memory, "staged-vault0").glob("*/*")}
    faults = [fault for tag in tags(Path(memory, "vault0")) for fault in verify(tag.path.parent, tag.name).faults]
    return inodes, faults


def test_copies_take_turns_in_three_files_of_each_rank(tmp_path: Path) -> None:
    for inodes, faults in run_ranks(2, files_of_copies, str(tmp_path), 20):
        assert len(inodes) == 2 * 3
        assert faults == []
    for inodes, faults in run_ranks(3, files_of_copies, str(tmp_path), 30):  # a restart with another number of ranks
        assert len(inodes) == 3 * 3
        assert faults == []


def train_in_lost_memory(memory: str) -> tuple[list[int], list[str]]:
    """Train to step 12; before the copy of step 4 rank 1 has no room, before that of step 8 its files are gone.

    Return the steps that have copies in the end, and the warnings.
    """
    take, taken = FilePool.take, 0

    def fail_once(pool: FilePool, size: int) -> tuple[Path, Tensor]:
        nonlocal taken
        taken += 1
        if torch.distributed.get_rank() == 1 and taken == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        if torch.distributed.get_rank() == 1 and taken == 4:
            shutil.rmtree(Path(memory, "staged-vault0", "1"))
        return take(pool, size)

    FilePool.take = fail_once
    warnings = train(memory, "/nonexistent", 12, 2)["warnings"]
    torch.distributed.barrier()
    return [tag.step for tag in tags(Path(memory, "vault0"))], warnings


def test_a_copy_without_room_is_logged_and_later_ones_are_made(tmp_path: Path) -> None:
    for rank, (steps, warnings) in enumerate(run_ranks(2, train_in_lost_memory, str(tmp_path))):
        assert steps == [10, 12]
        failed = [text for text in warnings if "no space is left" in text]
        assert failed, (rank, warnings)


def in_no_room(memory: str, limit: str) -> tuple[str, list[str]]:
    """Build an engine where 1,000 bytes are free; return the error, and the log."""
    if limit == "file system":
        vault.shutil.disk_usage = lambda path: namedtuple("usage", "free")(1000)  # type: ignore
    else:  # of a container, which counts the pages of /dev/shm too
        vault.memory_left = lambda: 1000  # type: ignore
    with logged() as lines, pytest.raises(VaultTooLarge) as raised:
        build(memory, every=1_000_000)
    return str(raised.value), lines


@contextmanager
def logged() -> Generator[list[str]]:
    """Collect what Shoal logs meanwhile."""
    lines: list[str] = []
    logging.getLogger("shoal").addHandler(handler := logging.Handler())
    handler.emit = lambda record: lines.append(record.getMessage())
    try:
        yield lines
    finally:
        logging.getLogger("shoal").removeHandler(handler)


def build(memory: str, every: int, stage: int = 2, optimizer: str = "Adam") -> Any:
    """Return an engine over 90 weights, as in an attempt whose agent owns `memory`."""
    os.environ[PAGES] = memory
    os.makedirs(memory, exist_ok=True)
    config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": optimizer, "params": {"lr": 0.1}},
              "zero_optimization": {"stage": stage}, "resilience": {"vault": {"every": every}}}
    return shoal.initialize(model=nn.Sequential(nn.Linear(8, 9), nn.Linear(9, 1, bias=False)), config=config)[0]


@pytest.mark.parametrize("limit", ["file system", "control group"])
def test_a_vault_larger_than_memory_is_refused_before_the_first_step(limit: str, tmp_path: Path) -> None:
    for rank, (message, lines) in enumerate(run_ranks(2, in_no_room, str(tmp_path), limit)):
        assert message.startswith(f"resilience.vault: {socket.gethostname()}"), message
        assert re.search(r" has [\d.]+ K?i?B free, and copies need (\S+ KiB) of memory on this node \(2 generations, ",
                         message)[1] == NEEDED
        assert "Another `every` needs as much, and fewer generations cannot be chosen: " in message
        remedy = f"enlarge {tmp_path.parent} (" if limit == "file system" else "give the machine or the container more mem"
        assert remedy in message
        assert message.endswith(", put less state on a node (more nodes, a smaller model), or remove resilience.vault and "
                                "save checkpoints")
        assert not list(tmp_path.glob("vault*/step*"))
        assert [line.partition(" of memory")[0] for line in lines] == ([LINE] if rank == 0 else [])


class Meeting:
    """The collective calls of threads that stand for ranks, each on a node of its own."""

    def __init__(self, ranks: int) -> None:
        self.values: list[Any] = [None] * ranks
        self.barrier = threading.Barrier(ranks, timeout=60)

    def communicator(self, rank: int) -> Any:
        """Return what `rank` calls."""
        def gather(value: Any) -> list[Any]:
            self.values[rank] = value
            self.barrier.wait()
            values = list(self.values)
            self.barrier.wait()
            return values

        return SimpleNamespace(rank=rank, ranks=len(self.values), gather_objects=gather)


def test_ranks_agree_to_log_where_the_bytes_of_some_nodes_change(tmp_path: Path) -> None:
    meeting = Meeting(4)

    def reserve(rank: int) -> list[int]:
        own = Vault(tmp_path / f"node{rank}" / "job" / "vault0", 10, meeting.communicator(rank))
        own.folder.parent.mkdir(parents=True)
        needed: list[int] = []
        for size in (1000, 1004 if rank == 0 else 1000):  # a load brings scalars, which one rank saves
            own.reserve(size, 0)
            assert own._size is not None
            needed.append(own._size.needed)
        return needed

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(reserve, range(4))) == [[6000, 6012], [6000, 6012], [6000, 6000], [6000, 6000]]


def take_steps(memory: str) -> None:
    """Copy the state after each of three steps."""
    engine = build(memory, every=1)
    for _ in range(3):
        engine.backward(engine(torch.ones(1, 8)).sum())
        engine.step()
    engine.copy_due()
    engine.checkpointer.end_copies()


def go_on_in_no_room(memory: str) -> tuple[list[int], int, list[str]]:
    """Go on from copies where there is no room for more; return the steps of those that are left, the step, and the log."""
    vault.shutil.disk_usage = lambda path: namedtuple("usage", "free")(-(1 << 40))  # type: ignore
    with logged() as lines:
        engine = build(memory, every=1)
        engine.load_checkpoint(f"{memory}/disk")
        engine.backward(engine(torch.ones(1, 8)).sum())
        engine.step()
        engine.copy_due()
        engine.checkpointer.end_copies()
    return sorted(each.step for each in tags(Path(memory, "vault0"))), engine.global_steps, lines


def test_an_attempt_with_less_memory_goes_on_from_copies(tmp_path: Path) -> None:
    run_ranks(2, take_steps, str(tmp_path))
    for rank, (steps, step, lines) in enumerate(run_ranks(2, go_on_in_no_room, str(tmp_path))):
        assert (steps, step) == ([2, 3], 4)
        told = [line for line in lines if "goes on with the copies that an earlier one made, and makes no more" in line]
        assert len(told) == (2 if rank == 0 else 0), lines


def sizes_of_copies(memory: str, stage: int, optimizer: str) -> tuple[int, int, int]:
    """Return the bytes that this node reserves at the start and after a load, and those of the tensors of a generation."""
    engine = build(memory, 1, stage, optimizer)
    needed = [engine.checkpointer._copies._vault._size.needed]
    engine.backward(engine(torch.ones(1, 8)).sum())
    engine.step()
    engine.copy_due()
    engine.save_checkpoint(f"{memory}/disk")
    engine.load_checkpoint(f"{memory}/disk")
    needed.append(engine.checkpointer._copies._vault._size.needed)
    engine.destroy()
    assert engine.checkpointer._copies._vault._size is None
    torch.distributed.barrier()
    (generation,) = Path(memory, "vault0").glob("step1")
    return needed[0], needed[1], sum(map(bytes_of_tensors, generation.glob("*.safetensors")))


def bytes_of_tensors(path: Path) -> int:
    """Return the bytes of the tensors of a file, without numbers and random states."""
    data = path.read_bytes()
    header = json.loads(data[8:8 + int.from_bytes(data[:8], "little")])
    return sum(entry["data_offsets"][1] - entry["data_offsets"][0] for name, entry in header.items()
               if not name.startswith(("__metadata__", "private/", "scalar.", "number.")))


@pytest.mark.parametrize(("stage", "optimizer"), [(0, "Adam"), (3, "Adam"), (2, "SGD"), (1, "Lamb")])
def test_what_a_copy_needs_is_known_before_the_first_step(stage: int, optimizer: str, tmp_path: Path) -> None:
    for first, loaded, tensors in run_ranks(2, sizes_of_copies, str(tmp_path), stage, optimizer):
        assert first == 3 * tensors
        assert first <= loaded <= first + 3 * 2 * 3 * 8, "the step counts of three parameters come on top"


def in_room_for_one(memory: str) -> str:
    """Build two engines where there is room for the copies of one; return the error of the second."""
    first = build(memory, 1)
    needed = first.checkpointer._copies._vault._size.needed
    vault.shutil.disk_usage = lambda path: namedtuple("usage", "free")(needed * 3 // 2)  # type: ignore
    with pytest.raises(VaultTooLarge) as raised:
        build(memory, 1)
    first.destroy()
    build(memory, 1)
    return str(raised.value)


def test_two_engines_share_the_room_until_one_is_destroyed(tmp_path: Path) -> None:
    assert " (2 generations, and the next, of 2 engines). " in run_ranks(2, in_room_for_one, str(tmp_path))[0]


def test_the_start_says_what_copies_need_and_what_is_not_covered(tmp_path: Path) -> None:
    ((_, lines),) = run_ranks(1, shown_at_the_start, str(tmp_path))
    shown, loading = lines  # and none for each copy that is made or removed
    assert "nothing is loaded" in loading
    assert shown.startswith(f"{LINE} of memory, a copy every 2 ")
    assert shown.endswith("All ranks are on one node: to survive its loss, save checkpoints elsewhere")


def shown_at_the_start(memory: str) -> tuple[None, list[str]]:
    with logged() as lines:
        engine = build(memory, 2)
        engine.load_checkpoint("/nonexistent")
        for _ in range(8):
            engine.backward(engine(torch.ones(1, 8)).sum())
            engine.step()
        engine.copy_due()
        engine.destroy()
    assert [tag.step for tag in tags(Path(memory, "vault0"))] == [6, 8], "earlier copies were removed"
    return None, lines


def without_agent() -> list[str]:
    warnings: list[str] = []
    logging.getLogger("shoal").addHandler(handler := logging.Handler())
    handler.emit = lambda record: warnings.append(record.getMessage())
    config = {"train_batch_size": 1, "optimizer": {"type": "Adam"}, "resilience": {"vault": {"every": 2}}}
    shoal.initialize(model=nn.Linear(2, 2), config=config)
    return warnings


def test_without_an_agent_a_vault_says_that_it_has_no_effect() -> None:
    (warnings,) = run_ranks(1, without_agent)
    assert any(text.startswith("resilience.vault: has no effect here") for text in warnings)


def test_a_copy_every_0_steps_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"resilience.vault.every: got 0"):
        Config.resolve({"train_batch_size": 1, "resilience": {"vault": {"every": 0}}}, data_ranks=1)
