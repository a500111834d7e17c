"""Every save ends, so that no caller waits forever, even if its thread cannot start or Ctrl-C interrupts it."""

import threading
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from checkpoint_cases import SHARDINGS, assert_equal_state, save, state, whole

from shoal.checkpoint import PendingSave, Ranks, Writer, read, wait_for_saves
from shoal.checkpoint import writer as module
from shoal.errors import CheckpointError
from shoal.testing import run_ranks


def no_thread(self: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


def assert_no_running_save(writer: Writer) -> None:
    """Assert that `wait_for_saves` returns, the lock is free, and the failure is not reported again."""
    waiting = threading.Thread(target=wait_for_saves, daemon=True)
    waiting.start()
    waiting.join(120)
    assert not waiting.is_alive(), "wait_for_saves waits for a save that never ends"
    assert not writer.ranks.lock.locked(), "the lock is not released"
    writer.wait()  # does not raise the reported failure again


def test_a_save_whose_thread_cannot_start_ends_and_frees_the_writer(tmp_path: Path,
                                                                       monkeypatch: pytest.MonkeyPatch) -> None:
    writer = Writer()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", no_thread)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            writer.write(tmp_path, "a", whole(state()))
    assert_no_running_save(writer)
    assert list(tmp_path.iterdir()) == []
    writer.write(tmp_path, "b", whole(state())).wait()
    assert_equal_state(read(tmp_path), state())


def without_threads_on_rank_1(folder: str) -> str:
    writer = Writer(Ranks.join())
    pieces = list(SHARDINGS["flat"](state(), dist.get_rank(), 2))
    if dist.get_rank() == 0:
        with pytest.raises(CheckpointError) as raised:
            writer.write(folder, "a", pieces).wait()
    else:
        with pytest.MonkeyPatch.context() as patch, pytest.raises(RuntimeError) as raised:
            patch.setattr(threading.Thread, "start", no_thread)
            writer.write(folder, "a", pieces)
    assert_no_running_save(writer)
    writer.write(folder, "b", pieces).wait()
    return str(raised.value)


def test_other_ranks_learn_of_a_thread_that_cannot_start(tmp_path: Path) -> None:
    first, second = run_ranks(2, without_threads_on_rank_1, str(tmp_path))
    assert first.endswith("rank 1: RuntimeError: can't start new thread") and second == "can't start new thread"
    assert_equal_state(read(tmp_path), state())


def test_an_interrupt_after_the_thread_starts_does_not_stop_the_save(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start, writer = threading.Thread.start, Writer()

    def interrupted(self: threading.Thread) -> None:
        start(self)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", interrupted)
        with pytest.raises(KeyboardInterrupt):
            writer.write(tmp_path, "a", whole(state()))
    assert_no_running_save(writer)
    assert_equal_state(read(tmp_path), state())


class InterruptedLock:
    """A lock whose acquisition is interrupted."""

    def acquire(self) -> None:
        raise KeyboardInterrupt


def test_an_interrupt_before_the_lock_leaves_no_running_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = Writer()
    with monkeypatch.context() as patch:
        patch.setattr(writer.ranks, "lock", InterruptedLock())
        with pytest.raises(KeyboardInterrupt):
            writer.write(tmp_path, "a", whole(state()))
    assert_no_running_save(writer)
    save(tmp_path, "a")


def test_saves_can_begin_and_end_during_wait_for_saves(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    first, second, third = (PendingSave(tmp_path / name) for name in "abc")
    for pending in (first, second):
        pending.begin()
    waited: list[PendingSave] = []

    def begin_and_end(pending: Any) -> None:
        waited.append(pending)
        third.begin()
        pending.end(None)

    monkeypatch.setattr(PendingSave, "wait_until_ended", begin_and_end)
    wait_for_saves()
    third.end(None)
    assert set(waited) == {first, second} and not module._running
