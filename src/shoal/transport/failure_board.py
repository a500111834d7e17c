"""A failing rank publishes its error to the c10d store; blocked ranks poll the store and abort their waits.

    publish             a rank that cannot go on writes its error to the store of the process group
    interruptible_wait  a rank in a long wait polls the store in a thread, which aborts the wait after a failure
    published_failure   the error that started it, which an aborted wait raises instead of the transport's own error

No rank polls while no wait is long. A wait inside gloo can be aborted only with its whole group: once an error is published
the group's ranks wait for messages that will never come.

A rank in a long wait also publishes which call it is in, so that ranks in different calls (one trains, one evaluates) find
out, and which collective it waits for, so that ranks that wait for each other do (stalemate.py).
"""

from __future__ import annotations

import atexit
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from functools import cache
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # pyright: ignore[reportPrivateImportUsage]  documented as public

from shoal.errors import PeerFailed
from shoal.log import logger
from shoal.recording.page import page
from shoal.transport.stalemate import Awaited, WaitRecord, explain, stalemate

__all__ = ["POLL_AFTER", "FailureBoard", "OldestWait", "abort_waits", "interruptible_wait", "peer_failed",
           "published_failure", "watch_oldest"]

POLL_AFTER = 0.5
"""Seconds that a wait lasts before it polls the store."""

_WATCH_INTERVAL = 0.25  # seconds between the watching thread's looks at the waits
_POLL_INTERVAL = 2.0  # seconds between two polls of the store by one wait
_UNUSED_TAG = (1 << 20) - 9  # no rank sends with it
_IMMEDIATE = timedelta(milliseconds=1)
_WARN_AFTER = 5.0  # seconds of a wait after which a warning names the ranks that it waits for
_PEERS = 16  # ranks whose records one poll reads: all of a small group, in turn those of a large one
_CALL_KEYS = 16  # the store keeps the last calls under so many keys, in turn


class FailureBoard:
    """The failure record of one engine in the c10d store; all its ranks pass the same `name`, which no other engine has."""

    def __init__(self, name: str):
        self._rank = dist.get_rank()
        self._store: Store = PrefixStore(f"shoal/{name}", dist.distributed_c10d._get_default_store())  # pyright: ignore
        self._call_number = 0
        self._polls = 0
        self._call = self._named = ""
        self.closed = dist.get_world_size() == 1
        """Whether this rank has failed itself, and polls no more."""
        _boards.add(self)
        if not self.closed:
            _start_watching()

    def start_call(self, call: str) -> None:
        """Record which engine call this rank is in from now on; every rank makes the same calls in one order."""
        self._call_number += 1
        self._call = call

    def name_call(self, call: str) -> None:
        """Name the engine call that this rank is in, or was in last; ranks may make different ones."""
        self._named = call

    def publish(self, text: str) -> None:
        """Write why this rank cannot go on, unless another failure is there already."""
        if not self.closed:
            self.closed = True
            try:
                self._store.compare_set("failed", "", text)
            except RuntimeError:  # the rank that hosts the store has ended, and so has the job
                return

    def poll(self, awaited: Awaited | None = None) -> str | None:
        """Return the published failure, None where there is none; a rank that is blocked says which collective it awaits."""
        if self.closed:
            return None
        try:
            if self._store.check(["failed"]):
                return self._store.get("failed").decode()
            return self._compare_calls() or (None if awaited is None else self._compare_waits(awaited))
        except RuntimeError:
            return None

    def _compare_calls(self) -> str | None:
        """Publish this rank's call; publish and return a failure if a rank waits in another call of the same number."""
        if not self._call_number:
            return None
        key, own = f"call {self._call_number % _CALL_KEYS}", f"{self._call_number}|{self._rank}|{self._call}"
        number, rank, call = (self._store.get(key).decode() if self._store.check([key]) else "0||").split("|", 2)
        if int(number) < self._call_number:
            self._store.set(key, own)
        if int(number) != self._call_number or call == self._call:
            return None
        text = (f"ranks call different things: rank {rank} waits in {call}, rank {self._rank} in {self._call}; let every "
                f"rank make the same calls, in one order")
        return self._store.compare_set("failed", "", text).decode()

    def _compare_waits(self, awaited: Awaited) -> str | None:
        """Publish what this rank awaits; publish and return a failure if it is in a circle of ranks that do."""
        records = self._wait_records(awaited)
        circle = stalemate(self._rank, records)
        if not circle:
            return None
        return self._store.compare_set("failed", "", explain(circle, records)).decode()

    def late_ranks(self, awaited: Awaited) -> list[int]:
        """Return the ranks that have not begun what this rank awaits, and have not been blocked themselves lately."""
        try:
            records = self._wait_records(awaited)
        except RuntimeError:
            return []
        recent = time.time() - 3 * _POLL_INTERVAL
        blocked = {rank for rank, record in records.items() if record.time > recent}
        begun = {rank for rank, record in records.items() if not records[self._rank].lacked_by(record)}
        return [rank for rank in awaited.members if rank not in blocked | begun]

    def warn_of_wait(self, awaited: Awaited, seconds: float) -> None:
        """Log a warning that names the ranks for which this rank has waited `seconds`, where they are few."""
        late = self.late_ranks(awaited)
        if not self.closed and late and len(late) <= _PEERS:
            names = f"rank{'s' if late[1:] else ''} {', '.join(map(str, late))}"
            logger.warning(
                "rank %d has waited %.0f s for %s (%s), which %s did not begin, or could not say so. Such a rank is slow, "
                "has ended, or is cut off: where data ends sooner on some ranks, put the loop within `with engine.join():`",
                self._rank, seconds, awaited.what, self._named, names)

    def _wait_records(self, awaited: Awaited) -> dict[int, WaitRecord]:
        """Publish the record of this rank's wait, and return it with those that other ranks of the group have published."""
        own = WaitRecord(tag=awaited.tag, number=awaited.number, what=str(awaited.what), call=self._named,
                         begun=dict(awaited.begun), time=time.time())
        self._store.set(f"wait {awaited.group} {self._rank}", own.dumps())
        place = awaited.members.index(self._rank)
        self._polls += 1
        near = [*awaited.members[place + 1:], *awaited.members[:place]]
        first = (self._polls * _PEERS) % len(near) if len(near) > _PEERS else 0
        keys = {rank: f"wait {awaited.group} {rank}" for rank in [*near[first:], *near[:first]][:_PEERS]}
        return {self._rank: own} | {rank: WaitRecord.loads(self._store.get(key).decode()) for rank, key in keys.items()
                                    if self._store.check([key])}


class interruptible_wait:
    """A context that waits for other ranks; a thread calls `abort` when a failure is published, `grace` seconds later."""

    __slots__ = ("abort", "awaited", "failed_at", "grace", "polled_at", "since", "warned")

    def __init__(self, abort: Callable[[], None], *, grace: float = 0.0, awaited: Awaited | None = None):
        """`awaited` is the collective that ends the wait, where every rank must begin it."""
        self.abort = abort
        self.awaited = awaited
        self.warned = False
        self.grace = grace
        self.failed_at: float | None = None
        """When this rank read of a failure."""

    def warn(self, seconds: float) -> None:
        """Log once for which ranks this wait has lasted `seconds`."""
        if self.awaited is None or self.warned:
            return
        self.warned = True
        for board in list(_boards)[:1]:
            board.warn_of_wait(self.awaited, seconds)

    def begin(self) -> interruptible_wait:
        """Count the time of the wait from now on."""
        self.since = self.polled_at = time.monotonic()
        return self

    def __enter__(self) -> None:
        self.begin()
        _waits.add(self)
        page.begin_wait("other ranks" if self.awaited is None else self.awaited.what, len(_waits))

    def __exit__(self, *_: object) -> None:
        _waits.discard(self)
        page.end_wait(len(_waits))


class OldestWait(ABC):
    """Work for which the host does not wait itself, so that the board's thread asks for the oldest of it."""

    @abstractmethod
    def oldest(self) -> interruptible_wait | None:
        """Return the same wait for as long as the same work has not ended; None where all has."""


def watch_oldest(work: OldestWait) -> None:
    """Ask for the oldest of `work` until it is gone."""
    _unwaited.add(work)
    _start_watching()


def abort_waits(group: dist.ProcessGroup) -> None:
    """Abort every wait in a gloo group, on this rank and its peers: gloo closes its connections when a wait times out."""
    if "cpu:gloo" in dist.get_backend_config(group) and dist.get_world_size(group) > 1:
        peer = (dist.get_rank(group) + 1) % dist.get_world_size(group)
        with suppress(RuntimeError):
            group.recv([torch.empty(1, dtype=torch.float32, device="cpu")], peer, _UNUSED_TAG).wait(_IMMEDIATE)


def peer_failed(where: str) -> PeerFailed | None:
    """Return the error to raise where a wait at `where` ended because another rank published a failure; else None."""
    text = published_failure()
    if text is None:
        return None
    error = PeerFailed(text)
    error.add_note(f"heard by {where}")
    return error


def published_failure(awaited: Awaited | None = None) -> str | None:
    """Return the failure that a rank of any engine of this process has published, None where there is none.

    A rank that is blocked says which collective it awaits.
    """
    for board in list(_boards):
        if (text := board.poll(awaited)) is not None:
            return text
    return None


_boards: WeakSet[FailureBoard] = WeakSet()
_waits: set[interruptible_wait] = set()
_unwaited: WeakSet[OldestWait] = WeakSet()
_exiting = threading.Event()


@cache
def _start_watching() -> None:
    thread = threading.Thread(target=_watch, name="shoal-board", daemon=True)
    thread.start()
    atexit.register(_stop_watching, thread)


def _stop_watching(thread: threading.Thread) -> None:
    """End the watching thread before the interpreter does: a call into the store that returns later aborts the process."""
    _exiting.set()
    thread.join(_POLL_INTERVAL)


def _watch() -> None:
    while not _exiting.wait(_WATCH_INTERVAL):
        now = time.monotonic()
        unwaited = [wait for work in list(_unwaited) if (wait := work.oldest()) is not None]
        for wait in [*_waits, *unwaited]:
            interval = POLL_AFTER if now - wait.since < _POLL_INTERVAL else _POLL_INTERVAL
            if wait.failed_at is None and now - wait.polled_at >= interval:
                wait.polled_at = now
                wait.failed_at = now if published_failure(wait.awaited) is not None else None
                if wait.failed_at is None and now - wait.since > _WARN_AFTER:
                    wait.warn(now - wait.since)
            if wait.failed_at is not None and now - wait.failed_at >= wait.grace and (wait in _waits or wait in unwaited):
                wait.abort()
