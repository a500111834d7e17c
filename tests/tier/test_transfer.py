"""I/O threads record their requests."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from shoal.tier.pages import PAGE
from shoal.tier.swap import Swap
from shoal.tier.trace import Event, Trace

from .conftest import Gate
from .test_disk_span import filled, resident


def test_every_request_is_recorded_while_a_trace_is_set(swap: Swap) -> None:
    span = filled(swap)
    swap.record_to(trace := Trace())
    span.fetch().wait()
    span.commit().wait()
    swap.record_to(None)
    span.fetch().wait()
    recorded = [(event.lane, event.name, event.bytes) for event in trace.events]
    assert sorted(recorded) == [("read", "w", PAGE)] * 4 + [("write", "w", PAGE)] * 4
    assert all(event.start <= event.stop for event in trace.events)


def test_several_threads_record_into_one_trace() -> None:
    trace = Trace()
    threads = [threading.Thread(target=lambda: [trace.record("read", "w", 0, 1, bytes=2) for _ in range(100)])
               for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert trace.events == [Event(lane="read", name="w", start=0, stop=1, bytes=2)] * 400


# Threads


def serving() -> set[threading.Thread]:
    """Threads that serve a disk file, among them those of files which an earlier test has left to Python's collector."""
    return {thread for thread in threading.enumerate() if thread.name.startswith("shoal-disk-")}


def test_as_many_threads_serve_a_file_as_requested(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(monkeypatch, "preadv")
    before = serving()
    swap = Swap(tmp_path, block_bytes=4096, requests=3)
    span = filled(swap, chunks=8)
    gate.open.clear()
    arriving = span.fetch()
    named = serving() - before
    gate.open.set()
    arriving.wait()
    assert len(named) == 3 and all(thread.daemon for thread in named)
    swap.close()
    assert not any(thread.is_alive() for thread in named)


def test_no_more_than_64_threads_serve_a_file(tmp_path: Path) -> None:
    before = serving()
    swap = Swap(tmp_path, requests=1000)
    filled(swap)
    assert len(serving() - before) == 64
    swap.close()


def test_requests_are_whole_blocks(tmp_path: Path) -> None:
    swap = Swap(tmp_path, block_bytes=5000)
    assert swap.block_bytes == 8192
    swap.close()


def test_dropped_chunks_are_not_resident(swap: Swap) -> None:
    assert not any(resident(filled(swap)))
