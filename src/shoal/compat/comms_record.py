"""Shoal's record of collectives as the published logger, whose attributes switch the record and whose methods read it.

The record sums calls up, so each call of a name and size has their mean latency.
"""

from __future__ import annotations

from typing import Any

import shoal.comm
from shoal.compat.deepspeed.utils.comms_logging import CommsLogger, Records
from shoal.errors import NotSupportedYet
from shoal.recording import traffic
from shoal.recording.settings import CommsLoggerSettings

__all__ = ["RecordedComms"]


def _setting(name: str) -> Any:
    """Return a property that reads and changes a setting of the record."""
    def read(self: RecordedComms) -> Any:
        return getattr(self.settings, name)

    return property(read, lambda self, value: self.change(**{name: value}))


class RecordedComms(CommsLogger):
    """The logger of this process; a change of its settings changes what is recorded."""

    def __init__(self) -> None:
        """Store nothing: the record is the process's."""

    enabled, prof_all, verbose, debug = map(_setting, ("enabled", "prof_all", "verbose", "debug"))

    @property
    def settings(self) -> CommsLoggerSettings:
        """The settings of the record."""
        return CommsLoggerSettings() if traffic.recorder is None else traffic.recorder.settings

    def change(self, **values: Any) -> None:
        """Change settings of the record."""
        now = self.settings
        changed: dict[str, Any] = {name: getattr(now, name) for name in ("enabled", "prof_all", "verbose", "debug")}
        changed["prof_ops"] = list(now.prof_ops)
        changed.update(values)
        shoal.comm.configure(None, **changed)

    @property
    def comms_dict(self) -> Records:  # pyright: ignore[reportIncompatibleVariableOverride]  computed here
        """The calls of the record."""
        found: Records = {}
        for row in [] if traffic.recorder is None else traffic.recorder.rows:
            to_gigabits = 8 / 1e9
            means = (row.latency * 1e3, row.algorithm_bandwidth * to_gigabits, row.bus_bandwidth * to_gigabits)
            record = found.setdefault(row.key.kind, {}).setdefault(row.key.size, [0, [], [], []])
            record[0] += row.calls
            for values, mean in zip(record[1:], means, strict=True):
                values += [mean] * row.calls
        return found

    @property
    def prof_ops(self) -> list[str]:  # pyright: ignore[reportIncompatibleVariableOverride]  the record's
        """The operations that are recorded beside `prof_all`."""
        return list(self.settings.prof_ops)

    @prof_ops.setter
    def prof_ops(self, value: list[str]) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]  the record's
        self.change(prof_ops=value)

    def append(self, raw_name: str, record_name: str, latency: float, msg_size: int) -> None:
        """Raise `NotSupportedYet`: the record times its calls itself."""
        raise NotSupportedYet("comms_logger.append: the record of this process times its calls itself; use a CommsLogger of "
                              "your own, or `timed_op` on your collective")

    def reset_data(self) -> None:
        """Forget all calls."""
        shoal.comm.reset_log()
