"""One collective of one rank, from its launch to where somebody goes on with its result.

    began      the rank launches it
    waiting    whoever needs the result comes for it
    ended      and goes on with it

`ended - began` is its time: no less than the transfer took, and more where the result lay unused. `ended - waiting` is what
it cost: the exposed part, which no computation hid. On the host these are moments of the thread that waits, by the
monotonic clock; on a device they are events of the stream that waits, read when they have passed, so that nobody waits
for them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch

__all__ = ["Call", "Clock", "Handle", "Key", "Moment", "Stamps", "operation", "over"]

T = TypeVar("T")
Moment = float | torch.cuda.Event
"""Seconds of the monotonic clock, or an event of a device's stream."""

_TAILS = ("_list", "_object", "_into_tensor", "_tensor", "_single", "_base", "_coalesced")


class Handle(Protocol):
    """A collective under way; `wait` returns when its result may be used, and may be called again."""

    def wait(self) -> None: ...


def operation(name: str) -> str:
    """Return what the collective of a torch-like name does: `all_gather_into_tensor` is an `all_gather`."""
    short = name.removeprefix("inference_")
    for tail in _TAILS:
        short = short.removesuffix(tail)
    return short


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """What calls of one row have in common."""

    kind: str
    """What it is for, as `traffic` counts it."""
    op: str
    size: int
    """Bytes of the whole buffer, over all ranks."""
    ranks: tuple[int, ...]
    """The ranks of the job that take part, where it is known."""
    caller: str = ""


@dataclass(frozen=True, slots=True)
class Stamps:
    """The moments of one call, in seconds."""

    began: float
    waiting: float
    ended: float


class Clock:
    """Reads a device's events on the host's monotonic clock."""

    def __init__(self) -> None:
        self._anchor: tuple[torch.cuda.Event, float] | None = None

    def now(self, *, on_device: bool) -> Moment:
        if not on_device:
            return time.monotonic()
        if self._anchor is None:  # the only wait for the device, at the first call
            anchor = _event()
            anchor.synchronize()
            self._anchor = anchor, time.monotonic()
        return _event()

    def seconds(self, moment: Moment) -> float:
        """Return when a moment that has passed was."""
        if not isinstance(moment, torch.cuda.Event):
            return moment
        assert self._anchor is not None
        anchor, at = self._anchor
        return at + anchor.elapsed_time(moment) / 1000


@dataclass(slots=True, kw_only=True)
class Call:
    """A collective under way."""

    key: Key
    what: str
    number: int
    """How many calls of the same name, size and ranks this rank has made before."""
    on_device: bool
    clock: Clock
    began: Moment
    done: Callable[[Call], None]
    waiting: Moment = 0.0
    ended: Moment = 0.0

    def over(self, wait: Callable[[], T]) -> T:
        """Call `wait`, which returns when the result may be used; a call that fails stays open, and is only counted."""
        self.waiting = self.clock.now(on_device=self.on_device)
        result = wait()
        self.ended = self.clock.now(on_device=self.on_device)
        self.done(self)
        return result

    @property
    def passed(self) -> bool:
        """Whether its moments can be read without waiting."""
        return not isinstance(self.ended, torch.cuda.Event) or self.ended.query()

    @property
    def stamps(self) -> Stamps:
        return Stamps(*(self.clock.seconds(moment) for moment in (self.began, self.waiting, self.ended)))


def over(call: Call | None, wait: Callable[[], T]) -> T:
    """Call `wait` as the end of `call`, if that is recorded."""
    return wait() if call is None else call.over(wait)


def _event() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event
