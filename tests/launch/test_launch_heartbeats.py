"""Agents find out from the job's store that another node, or they themselves, are lost."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import SimpleNamespace

import pytest
from torch.distributed import HashStore, PrefixStore, TCPStore  # pyright: ignore[reportPrivateImportUsage]  documented as public

from shoal.launch import heartbeats
from shoal.launch.clocks import Clocks
from shoal.launch.heartbeats import ENDED, PAUSE, Heartbeats

PERIOD, SILENCE = 0.02, 0.5


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_node_without_signs_of_life_is_lost_to_the_others() -> None:
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    store = PrefixStore("attempt", server)
    beats = [Heartbeats(store, node, 3, lambda seconds: None, period=10 * PERIOD, silence=SILENCE) for node in range(3)]
    beats[1]._store = HashStore()  # its words reach nobody
    until(lambda: all(set(beats[node].silent_for) == {1} for node in (0, 2)))
    assert beats[0].silent_for[1] >= SILENCE
    for each in beats:
        each.end()


def test_a_node_that_ends_in_order_is_not_lost() -> None:
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    one, other = (Heartbeats(server, node, 2, lambda seconds: None, period=PERIOD, silence=SILENCE) for node in range(2))
    other.end()
    until(lambda: server.add("beat/1", 0) >= ENDED)
    time.sleep(3 * SILENCE)
    assert one.silent_for == {}
    one.end()


def test_a_pause_of_this_process_or_the_store_counts_for_nothing() -> None:
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    one = Heartbeats(server, 0, 2, lambda seconds: None, period=PERIOD, silence=SILENCE)
    exchange = one._exchange

    def slow() -> None:
        time.sleep(2 * PAUSE * PERIOD)
        exchange()

    until(lambda: server.add("beat/0", 0) > 2)
    one._exchange = slow
    until(lambda: server.add("beat/0", 0) > 2 * SILENCE / PERIOD)  # node 1 never sent a heartbeat
    assert one.silent_for == {}
    one.end()


def test_a_node_that_was_stopped_is_not_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    stopped = [0.0]
    monkeypatch.setattr(heartbeats, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + stopped[0]))
    told: list[float] = []
    one = Heartbeats(server, 0, 1, told.append, period=PERIOD, silence=60.0)
    for beats in (3, 6, 9):
        until(lambda beats=beats: server.add("beat/0", 0) > beats)
        stopped[0] += 1000.0  # all threads of a process stop together
    until(lambda: server.add("beat/0", 0) > 12)
    assert told == []
    one.end()


def test_a_blocked_client_of_the_store_blocks_no_signs_of_life() -> None:
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    client = TCPStore("127.0.0.1", server.port, wait_for_workers=False)
    blocked = threading.Thread(target=client.get, args=("never",), daemon=True)
    blocked.start()
    one, other = (Heartbeats(store, node, 2, lambda seconds: None, period=PERIOD, silence=SILENCE)
                  for node, store in enumerate((server, client)))
    time.sleep(3 * SILENCE)
    until(lambda: not one.silent_for and not other.silent_for)
    one.end()
    other.end()
    server.set("never", "")
    blocked.join()


def test_a_node_that_does_not_reach_the_store_is_told() -> None:
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    client = TCPStore("127.0.0.1", server.port, wait_for_workers=False)
    told: list[float] = []
    beats = Heartbeats(client, 1, 2, told.append, period=10 * PERIOD, silence=SILENCE)  # a busy machine pauses for 2 periods
    until(lambda: client.add("beat/1", 0) > 2)
    del server
    until(lambda: bool(told))
    assert told[0] > 2 * SILENCE
    beats.end()


def test_clocks_that_are_off_are_told_and_a_late_answer_is_not() -> None:
    store, now, told = HashStore(), [1000.0], list[str]()
    offsets = (0.0, 30.0, -30.0, 0.0)
    first, *others = [Clocks(node, len(offsets), told.append, lambda offset=offset: now[0] + offset)
                      for node, offset in enumerate(offsets)]
    for each in (others[0], first, *others[:2], first):
        each.look(store)
        now[0] += 1.0
    now[0] += 100.0
    for each in (others[2], first, *others, first):
        each.look(store)
    assert [line.partition("; ")[0].partition(" is at least ")[2].partition(" s ")[0] for line in told] == ["28.0", "28.0"]
    assert [word in line for word, line in zip(("ahead of", "behind"), told, strict=True)] == [True, True]
