"""The record of one collective on one rank, from its launch until the caller goes on with its result.

    began      the rank launches the collective
    waiting    the caller starts to wait for the result
    ended      the wait returns

`ended - began` is the time of the call: at least that of the transfer, and more if the result lay unused. `ended - waiting`
is the exposed part, which no computation hid. On the host these are moments of the waiting thread on the monotonic clock;
on a device they are events of the waiting stream, read after they have passed, so that recording never blocks.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch

from shoal.device import DeviceEvent

__all__ = ["Call", "Clock", "Handle", "Key", "Moment", "Stamps", "operation", "over"]

T = TypeVar("T")
Moment = float | DeviceEvent
"""Seconds of the monotonic clock, or an event of a device's stream."""

_TAILS = ("_list", "_object", "_into_tensor", "_tensor", "_single", "_base", "_coalesced")


class Handle(Protocol):
    """A collective under way. `wait` returns when its result may be used; later calls return at once."""

    def wait(self) -> None: ...


def operation(name: str) -> str:
    """Return the operation of torch's function `name`: `all_gather_into_tensor` is an `all_gather`."""
    short = name.removeprefix("inference_")
    for tail in _TAILS:
        short = short.removesuffix(tail)
    return short


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """The key by which calls are summed up."""

    kind: str
    """The purpose, as in `traffic`: gather, reduce, ..."""
    op: str
    size: int
    """Bytes of the whole buffer of all ranks."""
    ranks: tuple[int, ...]
    """The ranks of the job that take part, if known."""
    caller: str = ""


@dataclass(frozen=True, slots=True)
class Stamps:
    """The moments of one call, in seconds."""

    began: float
    waiting: float
    ended: float


class Clock:
    """Converts a device's events to the host's monotonic clock."""

    def __init__(self) -> None:
        self._anchor: tuple[DeviceEvent, float] | None = None

    def now(self, device: torch.device | None) -> Moment:
        """Return the present moment of the host, or of what the current stream of `device` was given so far."""
        if device is None:
            return time.monotonic()
        if self._anchor is None:  # the first call waits for the device once
            anchor = DeviceEvent(device, timing=True)
            anchor.synchronize()
            self._anchor = anchor, time.monotonic()
        return DeviceEvent(device, timing=True)

    def seconds(self, moment: Moment) -> float:
        """Return the time of a moment that has passed."""
        if not isinstance(moment, DeviceEvent):
            return moment
        assert self._anchor is not None
        anchor, at = self._anchor
        return at + anchor.seconds_until(moment)


@dataclass(slots=True, kw_only=True)
class Call:
    """A collective under way."""

    key: Key
    what: str
    number: int
    """The number of earlier calls of this rank with the same key and name."""
    device: torch.device | None
    """The accelerator of its buffer; None for the host."""
    clock: Clock
    began: Moment
    done: Callable[[Call], None]
    waiting: Moment = 0.0
    ended: Moment = 0.0

    def over(self, wait: Callable[[], T]) -> T:
        """Call `wait` and record when it returns; a call whose `wait` raises is counted, but not timed."""
        self.waiting = self.clock.now(self.device)
        result = wait()
        self.ended = self.clock.now(self.device)
        self.done(self)
        return result

    @property
    def passed(self) -> bool:
        """Whether the moments can be read without blocking."""
        return not isinstance(self.ended, DeviceEvent) or self.ended.passed

    @property
    def stamps(self) -> Stamps:
        return Stamps(*(self.clock.seconds(moment) for moment in (self.began, self.waiting, self.ended)))


def over(call: Call | None, wait: Callable[[], T]) -> T:
    """Call `wait`, and record it as the end of `call` unless that is None."""
    return wait() if call is None else call.over(wait)
