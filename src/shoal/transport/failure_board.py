"""What went wrong on one rank, for all who wait for it: word of a failure crosses the job by no message that others await.

    post     a rank that cannot go on leaves word at the store of the process group
    waiting  who waits for other ranks longer than a moment looks there, in a thread, and is woken where there is word
    cause    what a wait that broke raises: the word of the rank where it began, rather than what the transport saw

While nobody waits long nothing is asked or sent. A wait within gloo can only be ended together with its group: that of the
ranks that wait is, when there is word, for what they wait for will never come.

Who waits long also says in which call, so that ranks in different ones (one trains, one evaluates) hear of it.
"""

from __future__ import annotations

import atexit
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from functools import cache
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # pyright: ignore[reportPrivateImportUsage]  documented as public

from shoal.errors import PeerFailed

__all__ = ["PATIENCE", "FailureBoard", "cause", "end_waits", "peer_failed", "waiting"]

PATIENCE = 0.5
"""Seconds of waiting that are nobody's fault."""

_LOOK = 0.25  # seconds between looks at the waits
_RARELY = 2.0  # seconds between looks at the store, of a wait that goes on
_TAG = (1 << 20) - 9  # of what nobody sends
_AT_ONCE = timedelta(milliseconds=1)
_CALLS = 16  # calls of which the store knows who is in them


class FailureBoard:
    """Where the ranks of one engine leave word; every rank makes it with the same `name`, which no other engine has."""

    def __init__(self, name: str):
        self._rank = dist.get_rank()
        self._store: Store = PrefixStore(f"shoal/{name}", dist.distributed_c10d._get_default_store())  # pyright: ignore
        self._number = 0
        self._call = ""
        self.over = dist.get_world_size() == 1
        """Whether this rank has failed or heard of it, and looks no more."""
        _boards.add(self)
        if not self.over:
            _start()

    def begin(self, call: str) -> None:
        """Say what this rank does from now on, as all others should."""
        self._number += 1
        self._call = call

    def post(self, text: str) -> None:
        """Leave word of why this rank cannot go on, unless there is some."""
        if not self.over:
            self.over = True
            try:
                self._store.compare_set("failed", "", text)
            except RuntimeError:  # the rank that keeps the store is gone, and so is the job
                return

    def look(self) -> str | None:
        """Return the word that there is."""
        if self.over:
            return None
        try:
            return self._store.get("failed").decode() if self._store.check(["failed"]) else self._astray()
        except RuntimeError:
            return None

    def _astray(self) -> str | None:
        """Return what there is to say if somebody waits in another call than this rank does."""
        if not self._number:
            return None
        key, mine = f"call {self._number % _CALLS}", f"{self._number}|{self._rank}|{self._call}"
        number, rank, call = (self._store.get(key).decode() if self._store.check([key]) else "0||").split("|", 2)
        if int(number) < self._number:
            self._store.set(key, mine)
        if int(number) != self._number or call == self._call:
            return None
        text = (f"ranks call different things: rank {rank} waits in {call}, rank {self._rank} in {self._call}; let every "
                f"rank make the same calls, in one order")
        return self._store.compare_set("failed", "", text).decode()


class waiting:
    """A context that waits for other ranks; `cut` ends that from another thread, `grace` seconds after there is word."""

    __slots__ = ("cut", "grace", "looked", "since", "word")

    def __init__(self, cut: Callable[[], None], *, grace: float = 0.0):
        self.cut = cut
        self.grace = grace
        self.word: float | None = None
        """When there was word."""

    def __enter__(self) -> None:
        self.since = self.looked = time.monotonic()
        _waits.add(self)

    def __exit__(self, *_: object) -> None:
        _waits.discard(self)


def end_waits(group: dist.ProcessGroup) -> None:
    """End whatever waits for gloo in a group, here and at its peers: it closes its connections when a wait is too long."""
    if "cpu:gloo" in dist.get_backend_config(group) and dist.get_world_size(group) > 1:
        peer = (dist.get_rank(group) + 1) % dist.get_world_size(group)
        with suppress(RuntimeError):
            group.recv([torch.empty(1)], peer, _TAG).wait(_AT_ONCE)


def peer_failed(where: str) -> PeerFailed | None:
    """Return what to raise if a wait at `where` ended because another rank failed, and said so."""
    text = cause()
    if text is None:
        return None
    error = PeerFailed(text)
    error.add_note(f"heard by {where}")
    return error


def cause() -> str | None:
    """Return the word of a rank that failed, if there is any."""
    for board in list(_boards):
        if (text := board.look()) is not None:
            return text
    return None


_boards: WeakSet[FailureBoard] = WeakSet()
_waits: set[waiting] = set()
_ended = threading.Event()


@cache
def _start() -> None:
    threading.Thread(target=_watch, name="shoal-board", daemon=True).start()
    atexit.register(_ended.set)


def _watch() -> None:
    while not _ended.wait(_LOOK):
        now = time.monotonic()
        for wait in list(_waits):
            due = PATIENCE if now - wait.since < _RARELY else _RARELY
            if wait.word is None and now - wait.looked >= due:
                wait.looked = now
                wait.word = now if cause() is not None else None
            if wait.word is not None and now - wait.word >= wait.grace and wait in _waits:
                wait.cut()
