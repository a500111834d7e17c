"""Of the collectives that a device runs the oldest is watched, and orders that differ are told by name."""

from __future__ import annotations

import gc
import threading
from typing import Any
from weakref import ref

import pytest
import torch
import torch.distributed as dist

from shoal.testing import run_ranks
from shoal.transport import native_watch
from shoal.transport.failure_board import FailureBoard, published_failure
from shoal.transport.native_watch import IssuedOrder, LaunchedCollectives, first_difference


class _Work:
    """A collective that ends when the test says so."""

    def __init__(self) -> None:
        self.ended = False

    def is_completed(self) -> bool:
        return self.ended


def _oldest() -> list[bool]:
    assert dist.group.WORLD is not None
    launched = LaunchedCollectives(dist.group.WORLD)
    works: list[Any] = [_Work(), _Work()]
    found = [launched.oldest() is None]
    for work in works:
        launched.add(work)
    first = launched.oldest()
    found.append(first is not None and launched.oldest() is first)
    works[0].ended = True
    second = launched.oldest()
    found.append(second is not None and second is not first)
    works[1].ended = True
    return [*found, launched.oldest() is None]


def test_the_oldest_collective_that_has_not_ended_is_watched() -> None:
    assert run_ranks(1, _oldest) == [[True] * 4]


def _waited() -> list[bool]:
    assert dist.group.WORLD is not None
    launched = LaunchedCollectives(dist.group.WORLD)
    first: Any = _Work()
    second: Any = _Work()
    number, held = launched.add(first), ref(first)
    launched.add(second)
    launched.waited(number)
    del first
    return [held() is None, launched.oldest() is not None]


def test_a_collective_that_was_waited_for_is_freed_and_others_are_watched() -> None:
    assert run_ranks(1, _waited) == [[True, True]]


def _device_of_thread() -> bool:
    """Ask for the oldest collective in a thread; return whether it took the rank's device first."""
    assert dist.group.WORLD is not None
    device, taken = torch.device("cuda", 3), list[torch.device]()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native_watch, "current_device", lambda: device)
        patch.setattr(native_watch, "set_current", taken.append)
        launched = LaunchedCollectives(dist.group.WORLD)
        patch.setattr(native_watch, "current_device", lambda: torch.device("cuda", 0))
        work: Any = _Work()
        launched.add(work)
        launched.oldest()
    return taken == [device]


def test_the_watch_asks_on_the_device_of_its_rank() -> None:
    assert run_ranks(1, _device_of_thread) == [True]


class _Broken:
    """A collective whose backend raises its error when it is asked."""

    def is_completed(self) -> bool:
        raise RuntimeError("connection reset")


def _broken() -> bool:
    assert dist.group.WORLD is not None
    launched = LaunchedCollectives(dist.group.WORLD)
    work: Any = _Broken()
    launched.add(work)
    return launched.oldest() is None


def test_a_collective_that_failed_does_not_end_the_watch() -> None:
    assert run_ranks(1, _broken) == [True]


class _Heard(LaunchedCollectives):
    """Says when its collectives were aborted."""

    def __init__(self, group: dist.ProcessGroup):
        super().__init__(group)
        self.heard = threading.Event()

    def _abort(self) -> None:
        super()._abort()
        self.heard.set()


def _abandoned() -> bool:
    board, store = FailureBoard("test"), dist.distributed_c10d._get_default_store()
    assert dist.group.WORLD is not None
    if dist.get_rank() == 1:
        board.publish("rank 1: out of memory")
        store.wait(["rank 0 has heard"])
        return True
    launched = _Heard(dist.group.WORLD)
    work: Any = _Work()
    launched.add(work)
    heard = launched.heard.wait(60)
    store.set("rank 0 has heard", "")
    return heard and launched.aborted and published_failure() == "rank 1: out of memory"


def test_a_failed_rank_aborts_collectives_that_others_do_not_wait_for() -> None:
    assert run_ranks(2, _abandoned) == [True, True]


def test_the_first_difference_of_orders_is_told_by_rank_and_name() -> None:
    same, other = ["gather of unit 'a'", "reduce of unit 'a'"], ["gather of unit 'a'"]
    assert first_difference([same, same, other], (4, 5, 6)) == (
        "collective 2 since the last step is reduce of unit 'a' on rank 4 and nothing on rank 6")
    assert "before the last" in first_difference([same, same], (0, 1))


def test_a_checksum_is_of_the_names_since_the_last_one() -> None:
    one, other = IssuedOrder(), IssuedOrder()
    for order, names in ((one, "ab"), (other, "ba")):
        for name in names:
            order.add(name)
    assert one.take()[0] != other.take()[0]
    for order in (one, other):
        order.add("c")
    assert one.take() == other.take()


def _of_a_destroyed_group() -> bool:
    group = dist.new_group()
    assert isinstance(group, dist.ProcessGroup)
    launched = LaunchedCollectives(group)
    work: Any = _Work()
    launched.add(work)
    wait = launched.oldest()
    dist.destroy_process_group(group)
    del group
    gc.collect()
    assert wait is not None
    wait.abort()  # as the board's thread does, which must go on
    return launched.oldest() is None


def test_the_abort_of_a_group_that_is_gone_raises_nothing() -> None:
    assert run_ranks(1, _of_a_destroyed_group) == [True]
