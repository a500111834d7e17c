"""Counts the collectives of this process, and records their times while `comms_logger` is on.

`traffic` counts calls and bytes at launch, always. A `Recorder` sums up calls by kind and size, keeps the latest ones, and
never blocks on a device: calls that the device has not finished are summed up with later calls, or for a report.
"""

from __future__ import annotations

import inspect
from collections import Counter, defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from threading import Lock
from typing import TYPE_CHECKING

from torch import Tensor

from shoal.device import on_accelerator, synchronize
from shoal.log import logger
from shoal.recording.call import Call, Clock, Handle, Key, Stamps, operation
from shoal.recording.stats import CallStats, Name, bus_factor

if TYPE_CHECKING:  # a launcher, which imports this for the page of a rank, is spared pydantic
    from shoal.recording.settings import CommsLoggerSettings

__all__ = ["KEPT", "Recorder", "Traffic", "Watched", "traffic"]

KEPT = 256
"""Calls of one name that are kept for comparison between ranks."""

_BEHIND = 64
"""Ended calls that are collected before they are summed up."""

_TRANSPORT = ("shoal.transport.collectives", "shoal.recording", "shoal.transport.reduction", "shoal.comm",
              "shoal.tensor_parallel.axis")
"""Modules that call collectives for others, which are skipped to find the caller."""


class Recorder:
    """The calls of this process since the recorder was created, as `settings` select them."""

    def __init__(self, settings: CommsLoggerSettings, *, is_logging_rank: bool = False):
        self.settings = settings
        self.is_logging_rank = is_logging_rank
        """Whether this rank logs each call if `verbose` is set."""
        self._clock = Clock()
        self._rows: dict[Key, CallStats] = {}
        self._numbers = Counter[Name]()
        self._recent: defaultdict[Name, deque[tuple[int, Stamps]]] = defaultdict(lambda: deque(maxlen=KEPT))
        self._ended: deque[Call] = deque()  # other threads may append
        self._lock = Lock()

    @property
    def rows(self) -> list[CallStats]:
        """The statistics of all calls, with the times of those that have ended."""
        self._sum_ended()
        return list(self._rows.values())

    @property
    def recent(self) -> dict[Name, list[tuple[int, Stamps]]]:
        """The latest calls of each name."""
        self._sum_ended()
        return {name: list(calls) for name, calls in self._recent.items()}

    def update_settings(self, settings: CommsLoggerSettings) -> None:
        """Record the following calls with other settings."""
        self._sum_ended()
        self.settings = settings

    def wait_for_calls(self) -> None:
        """Wait until the device has finished all launched calls."""
        for device in {call.device for call in list(self._ended) if call.device is not None and not call.passed}:
            synchronize(device)
        self._sum_ended()

    def begin(self, kind: str, sent: int, op: str, buffer: Sequence[Tensor], ranks: tuple[int, ...], what: str, *,
              requested: bool = False) -> Call | None:
        """Count a call that is launched now; return None if the settings exclude it and it is not `requested`."""
        if not (self.settings.prof_all or requested or operation(op) in self.settings.prof_ops):
            return None
        size = sum(tensor.numel() * tensor.element_size() for tensor in buffer) if buffer else sent
        key = Key(kind=kind, op=op, size=size, ranks=ranks, caller=_caller() if self.settings.debug else "")
        device = buffer[0].device if buffer and on_accelerator(buffer[0]) else None
        with self._lock:
            row = self._rows.get(key) or CallStats(key=key)
            self._rows[key] = replace(row, calls=row.calls + 1, sent=row.sent + sent)
            number = self._numbers[key, what]
            self._numbers[key, what] += 1
        return Call(key=key, what=what, number=number, device=device, clock=self._clock, began=self._clock.now(device),
                    done=self._done)

    @property
    def _logs(self) -> bool:
        return self.is_logging_rank and self.settings.verbose

    def _done(self, call: Call) -> None:
        self._ended.append(call)
        if self._logs or len(self._ended) >= _BEHIND:
            self._sum_ended()

    def _sum_ended(self) -> None:
        """Sum up the ended calls whose times can be read without blocking."""
        with self._lock:
            while self._ended and self._ended[0].passed:
                call = self._ended.popleft()
                stamps = call.stamps
                row = self._rows[call.key]
                self._rows[call.key] = replace(row, timed=row.timed + 1, seconds=row.seconds + stamps.ended - stamps.began,
                                               exposed=row.exposed + stamps.ended - stamps.waiting)
                self._recent[call.key, call.what].append((call.number, stamps))
                if self._logs:
                    _log(call, stamps)


class Watched:
    """A handle of a collective that records its end."""

    def __init__(self, handle: Handle, call: Call):
        self._handle = handle
        self._call: Call | None = call

    def wait(self) -> None:
        call, self._call = self._call, None
        if call is None:
            self._handle.wait()
        else:
            call.over(self._handle.wait)


def _log(call: Call, stamps: Stamps) -> None:
    key, seconds = call.key, max(stamps.ended - stamps.began, 1e-9)
    speed = key.size / seconds / 1e9
    logger.info("%s%s: %s of %d bytes over %d ranks in %.3f ms, %.3f of it exposed; %.3f GB/s, bus %.3f GB/s",
                call.what or key.kind, f" for {key.caller}" if key.caller else "", key.op, key.size, len(key.ranks),
                1e3 * seconds, 1e3 * (stamps.ended - stamps.waiting), speed, speed * bus_factor(key.op, len(key.ranks)))


def _caller() -> str:
    """Return the name of the function that called for the collective, outside of the transport modules."""
    frame = inspect.currentframe()
    while frame is not None and frame.f_back is not None and str(frame.f_globals["__name__"]).startswith(_TRANSPORT):
        frame = frame.f_back
    return "" if frame is None else f"{frame.f_globals['__name__']}.{frame.f_code.co_name}"


@dataclass(slots=True)
class Traffic:
    """The calls of this rank and the payload bytes that it sent, by purpose."""

    calls: Counter[str] = field(default_factory=Counter[str])
    bytes: Counter[str] = field(default_factory=Counter[str])
    peer_memory_bytes: int = 0
    """Of these bytes, those that ranks of one machine read from memory instead of the network."""

    @property
    def bytes_sent(self) -> int:
        return self.bytes.total()

    recorder: Recorder | None = None
    """Records the times of the calls; None: they are only counted."""

    def count(self, kind: str, size: int, *, op: str = "send", of: Tensor | Sequence[Tensor] = (),
              ranks: tuple[int, ...] = (), what: object = "", requested: bool = False) -> Call | None:
        """Count a call that sends `size` bytes; return its record, or None if it is not recorded.

        The record has the operation `op`, the whole buffer `of`, the `ranks` of the job and the name `what` of the call.
        A `requested` call is recorded whatever the settings select.
        """
        self.calls[kind] += 1
        self.bytes[kind] += size
        if self.recorder is None:
            return None
        buffer = [of] if isinstance(of, Tensor) else of
        return self.recorder.begin(kind, size, op, buffer, ranks, str(what), requested=requested)


traffic = Traffic()
