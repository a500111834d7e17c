"""Reports of recorded calls: tables for people, and the dictionary that published scripts read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from shoal.config.sizes import format_bytes
from shoal.recording.call import Key
from shoal.recording.stats import CallStats, Lateness, Wait

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["bytes_table", "lateness_table", "published", "stats_table"]

_BAR = 30
_SUMS = ("count", "timed", "total_latency_ms", "tput_avg_gbps", "busbw_avg_gbps")


def stats_table(rows: Sequence[CallStats], waits: Mapping[tuple[Key, int], Wait], rank: int) -> Table:
    """Return a row for each collective and size, with the waits of `rank` for late ranks if `waits` has any."""
    from rich.table import Table

    table = Table(title=f"collectives of rank {rank}")
    for column in ("collective", "for"):
        table.add_column(column)
    for column in ("buffer", "ranks", "calls", "sent", "ms a call", "exposed ms", "GB/s", "bus GB/s",
                   *(("least ms", "late ms") if waits else ())):
        table.add_column(column, justify="right")
    for row in sorted(rows, key=lambda row: (-row.sent, row.key.kind)):
        wait = waits.get((row.key, rank), Wait())
        lateness = _mean(wait.transfer, wait.calls, 1e3), _mean(wait.waited, wait.calls, 1e3)
        table.add_row(row.key.op, " ".join(filter(None, (row.key.kind, row.key.caller))), format_bytes(row.key.size),
                      str(len(row.key.ranks) or "-"), str(row.calls), format_bytes(row.sent), *_times(row),
                      *(lateness if waits else ()))
    return table


def bytes_table(sent: Sequence[Mapping[str, int]], rank: int) -> Table:
    """Return a row for each purpose: the bytes that `rank` sent, with a bar, and those of all ranks together."""
    from rich.bar import Bar
    from rich.table import Table

    table = Table(title="bytes sent")
    table.add_column("for")
    table.add_column(f"rank {rank}", justify="right")
    table.add_column("")
    table.add_column("all ranks", justify="right")
    together = Counter[str]()
    for each in sent:
        together.update(each)
    most = max([1, *sent[rank].values()])
    for kind, total in together.most_common():
        mine = sent[rank].get(kind, 0)
        table.add_row(kind, format_bytes(mine), Bar(most, 0, mine, width=_BAR), format_bytes(total))
    return table


def lateness_table(ranks: Sequence[Lateness]) -> Table:
    """Return a row for each rank; the rank that others waited for longest is first."""
    from rich.table import Table

    table = Table(title="ranks that entered collectives last")
    for column in ("rank", "calls", "was last", "others waited ms", "waited ms"):
        table.add_column(column, justify="right")
    for each in sorted(ranks, key=lambda each: -each.delay_caused):
        table.add_row(str(each.rank), str(each.calls), str(each.last), f"{1e3 * each.delay_caused:.3f}",
                      f"{1e3 * each.waited:.3f}")
    return table


def published(rows: Sequence[CallStats], ranks: Sequence[Lateness] | None, waits: Mapping[tuple[Key, int], Wait],
              rank: int) -> dict[str, Any]:
    """Return `summary`, `straggler_analysis` (None without `ranks`) and `metadata`, in ms and gigabits per second.

    `summary` is by name of the collective and bytes of its buffer.
    """
    summary: dict[str, dict[int, dict[str, Any]]] = {}
    stragglers: dict[str, dict[int, dict[str, float]]] = {}
    for row in rows:
        name, size = f"{row.key.kind}:{row.key.caller}" if row.key.caller else row.key.kind, row.key.size
        line = summary.setdefault(name, {}).setdefault(size, dict.fromkeys(_SUMS, 0))
        for word, value in zip(_SUMS, (row.calls, row.timed, 1e3 * row.seconds, _bits(row.algorithm_bandwidth, row),
                                       _bits(row.bus_bandwidth, row)), strict=True):
            line[word] += value
        wait = waits.get((row.key, rank))
        if wait is not None:
            each = stragglers.setdefault(name, {}).setdefault(size, {"count": 0, "min_latency_ms": 0.0, "straggler_ms": 0.0})
            each["count"] += wait.calls
            each["min_latency_ms"] += 1e3 * wait.transfer
            each["straggler_ms"] += 1e3 * wait.waited
    for sizes in summary.values():
        for size, line in sizes.items():
            timed = max(1, line.pop("timed"))
            line |= {"avg_latency_ms": line["total_latency_ms"] / timed, "msg_size_bytes": size,
                     "msg_size_str": format_bytes(size)}
            for word in ("tput_avg_gbps", "busbw_avg_gbps"):
                line[word] /= timed
    analysis = None if ranks is None else {"ops": stragglers, "ranks": {
        each.rank: {"count": each.calls, "last": each.last, "held_ms": 1e3 * each.delay_caused,
                    "stood_ms": 1e3 * each.waited}
        for each in ranks}}
    return {"summary": summary, "straggler_analysis": analysis, "metadata": {"rank": rank}}


def _times(row: CallStats) -> Iterator[str]:
    yield _mean(row.seconds, row.timed, 1e3)
    yield _mean(row.exposed, row.timed, 1e3)
    for speed in (row.algorithm_bandwidth, row.bus_bandwidth):
        yield f"{speed / 1e9:.3f}" if row.timed and row.key.size else "-"


def _mean(total: float, calls: int, factor: float) -> str:
    return f"{factor * total / calls:.3f}" if calls else "-"


def _bits(speed: float, row: CallStats) -> float:
    """Return gigabits per second times the timed calls, so that rows of one size give a weighted mean."""
    return 8 * speed * row.timed / 1e9
