"""Sums up calls by kind and size, remembers the latest, and never waits for any.

What a device has not finished yet is summed up later: with the calls that follow, or when somebody asks.
"""

from __future__ import annotations

import inspect
from collections import Counter, defaultdict, deque
from collections.abc import Sequence
from dataclasses import replace
from threading import Lock

import torch
from torch import Tensor

from shoal.log import logger
from shoal.recording.call import Call, Clock, Handle, Key, Stamps, operation
from shoal.recording.rows import CallStats, Name, bus_factor
from shoal.recording.settings import CommsLoggerSettings

__all__ = ["KEPT", "Recorder", "Watched"]

KEPT = 256
"""How many calls of one name are remembered for comparison between ranks."""

_BEHIND = 64
"""Ended calls that may wait to be summed up."""

_TRANSPORT = ("shoal.transport.collectives", "shoal.recording", "shoal.transport.reduction", "shoal.comm",
              "shoal.tensor_parallel.axis")
"""Modules that speak for others."""


class Recorder:
    """The calls of this process since it was made, as `settings` select them."""

    def __init__(self, settings: CommsLoggerSettings, *, speaks: bool = False):
        self.settings = settings
        self.speaks = speaks
        """Whether this rank is the one that logs, where each call is to be logged."""
        self._clock = Clock()
        self._rows: dict[Key, CallStats] = {}
        self._numbers = Counter[Name]()
        self._recent: defaultdict[Name, deque[tuple[int, Stamps]]] = defaultdict(lambda: deque(maxlen=KEPT))
        self._ended: deque[Call] = deque()  # another thread may have waited for them
        self._lock = Lock()

    @property
    def rows(self) -> list[CallStats]:
        """What was recorded, with what has ended so far."""
        self._fold()
        return list(self._rows.values())

    @property
    def recent(self) -> dict[Name, list[tuple[int, Stamps]]]:
        """The latest calls of each name."""
        self._fold()
        return {name: list(calls) for name, calls in self._recent.items()}

    def follow(self, settings: CommsLoggerSettings) -> None:
        """Go on as other settings say."""
        self._fold()
        self.settings = settings

    def settle(self) -> None:
        """Wait until what was launched on a device is over."""
        if any(not call.passed for call in self._ended):
            torch.cuda.synchronize()
        self._fold()

    def begin(self, kind: str, sent: int, op: str, buffer: Sequence[Tensor], ranks: tuple[int, ...], what: str, *,
              asked: bool = False) -> Call | None:
        """Count a call that is launched now; None where the settings leave it out, unless it is `asked` for by name."""
        if not (self.settings.prof_all or asked or operation(op) in self.settings.prof_ops):
            return None
        size = sum(tensor.numel() * tensor.element_size() for tensor in buffer) if buffer else sent
        key = Key(kind=kind, op=op, size=size, ranks=ranks, caller=_caller() if self.settings.debug else "")
        on_device = bool(buffer) and buffer[0].is_cuda
        with self._lock:
            row = self._rows.get(key) or CallStats(key=key)
            self._rows[key] = replace(row, calls=row.calls + 1, sent=row.sent + sent)
            number = self._numbers[key, what]
            self._numbers[key, what] += 1
        return Call(key=key, what=what, number=number, on_device=on_device, clock=self._clock,
                    began=self._clock.now(on_device=on_device), done=self._done)

    @property
    def _logs(self) -> bool:
        return self.speaks and self.settings.verbose

    def _done(self, call: Call) -> None:
        self._ended.append(call)
        if self._logs or len(self._ended) >= _BEHIND:
            self._fold()

    def _fold(self) -> None:
        """Sum up what has ended, as far as it can be read."""
        with self._lock:
            while self._ended and self._ended[0].passed:
                call = self._ended.popleft()
                stamps = call.stamps
                row = self._rows[call.key]
                self._rows[call.key] = replace(row, timed=row.timed + 1, seconds=row.seconds + stamps.ended - stamps.began,
                                               exposed=row.exposed + stamps.ended - stamps.waiting)
                self._recent[call.key, call.what].append((call.number, stamps))
                if self._logs:
                    _say(call, stamps)


class Watched:
    """A collective under way whose end is recorded."""

    def __init__(self, handle: Handle, call: Call):
        self._handle = handle
        self._call: Call | None = call

    def wait(self) -> None:
        call, self._call = self._call, None
        if call is None:
            self._handle.wait()
        else:
            call.over(self._handle.wait)


def _say(call: Call, stamps: Stamps) -> None:
    key, seconds = call.key, max(stamps.ended - stamps.began, 1e-9)
    speed = key.size / seconds / 1e9
    logger.info("%s%s: %s of %d bytes over %d ranks in %.3f ms, %.3f of it exposed; %.3f GB/s, bus %.3f GB/s",
                call.what or key.kind, f" for {key.caller}" if key.caller else "", key.op, key.size, len(key.ranks),
                1e3 * seconds, 1e3 * (stamps.ended - stamps.waiting), speed, speed * bus_factor(key.op, len(key.ranks)))


def _caller() -> str:
    """Return the function that asked for a collective."""
    frame = inspect.currentframe()
    while frame is not None and frame.f_back is not None and str(frame.f_globals["__name__"]).startswith(_TRANSPORT):
        frame = frame.f_back
    return "" if frame is None else f"{frame.f_globals['__name__']}.{frame.f_code.co_name}"
