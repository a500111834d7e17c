"""The record in the form that published scripts read: by what was called and the bytes of its buffer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from shoal.recording.call import Key
from shoal.recording.rows import CallStats, Lateness, Wait
from shoal.recording.table import short

__all__ = ["published"]


def published(rows: Sequence[CallStats], ranks: Sequence[Lateness] | None, waits: Mapping[tuple[Key, int], Wait],
              rank: int) -> dict[str, Any]:
    """Return `summary`, `straggler_analysis` (None unless asked for) and `metadata`, in ms and gigabits per second."""
    summary: dict[str, dict[int, dict[str, Any]]] = {}
    late: dict[str, dict[int, dict[str, float]]] = {}
    for row in rows:
        name, size = f"{row.key.kind}:{row.key.caller}" if row.key.caller else row.key.kind, row.key.size
        line = summary.setdefault(name, {}).setdefault(size, dict.fromkeys(_SUMS, 0))
        for word, value in zip(_SUMS, (row.calls, row.timed, 1e3 * row.seconds, _bits(row.algorithm_bandwidth, row),
                                       _bits(row.bus_bandwidth, row)), strict=True):
            line[word] += value
        wait = waits.get((row.key, rank))
        if wait is not None:
            each = late.setdefault(name, {}).setdefault(size, {"count": 0, "min_latency_ms": 0.0, "straggler_ms": 0.0})
            each["count"] += wait.calls
            each["min_latency_ms"] += 1e3 * wait.transfer
            each["straggler_ms"] += 1e3 * wait.stood
    for sizes in summary.values():
        for size, line in sizes.items():
            timed = max(1, line.pop("timed"))
            line |= {"avg_latency_ms": line["total_latency_ms"] / timed, "msg_size_bytes": size, "msg_size_str": short(size)}
            for word in ("tput_avg_gbps", "busbw_avg_gbps"):
                line[word] /= timed
    who = None if ranks is None else {"ops": late, "ranks": {
        each.rank: {"count": each.calls, "last": each.last, "held_ms": 1e3 * each.held, "stood_ms": 1e3 * each.stood}
        for each in ranks}}
    return {"summary": summary, "straggler_analysis": who, "metadata": {"rank": rank}}


_SUMS = ("count", "timed", "total_latency_ms", "tput_avg_gbps", "busbw_avg_gbps")


def _bits(speed: float, row: CallStats) -> float:
    """Return bytes per second as gigabits, as often as there were calls, so that rows of one size make one mean."""
    return 8 * speed * row.timed / 1e9
