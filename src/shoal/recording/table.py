"""A record as tables: calls and bandwidths, bytes by what they are for, and what lateness cost whom."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from shoal.recording.call import Key
from shoal.recording.rows import CallStats, Lateness, Wait

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["bytes_table", "late_table", "rows_table", "short"]

_BAR = 30
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def short(size: float) -> str:
    """Return bytes in words: 1536 is 1.5 KiB."""
    power = 0
    while size >= 1024 and power < len(_UNITS) - 1:
        size, power = size / 1024, power + 1
    return f"{size:.4g} {_UNITS[power]}"


def rows_table(rows: Sequence[CallStats], waits: Mapping[tuple[Key, int], Wait], rank: int) -> Table:
    """Return a line for each collective and size, with what `rank` lost to late ranks where `waits` say it."""
    from rich.table import Table

    table = Table(title=f"collectives of rank {rank}")
    for column in ("collective", "for"):
        table.add_column(column)
    for column in ("buffer", "ranks", "calls", "sent", "ms a call", "exposed ms", "GB/s", "bus GB/s",
                   *(("least ms", "late ms") if waits else ())):
        table.add_column(column, justify="right")
    for row in sorted(rows, key=lambda row: (-row.sent, row.key.kind)):
        wait = waits.get((row.key, rank), Wait())
        least = _mean(wait.transfer, wait.calls, 1e3), _mean(wait.stood, wait.calls, 1e3)
        table.add_row(row.key.op, " ".join(filter(None, (row.key.kind, row.key.caller))), short(row.key.size),
                      str(len(row.key.ranks) or "-"), str(row.calls), short(row.sent), *_times(row),
                      *(least if waits else ()))
    return table


def bytes_table(sent: Sequence[Mapping[str, int]], rank: int) -> Table:
    """Return a bar of the bytes that `rank` sent for each purpose, beside what all ranks did, of what each `sent`."""
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
        table.add_row(kind, short(mine), Bar(most, 0, mine, width=_BAR), short(total))
    return table


def late_table(ranks: Sequence[Lateness]) -> Table:
    """Return a line for each rank, the one that the others waited for longest first."""
    from rich.table import Table

    table = Table(title="who came last, and what it cost the others")
    for column in ("rank", "calls", "came last", "held others ms", "stood waiting ms"):
        table.add_column(column, justify="right")
    for each in sorted(ranks, key=lambda each: -each.held):
        table.add_row(str(each.rank), str(each.calls), str(each.last), f"{1e3 * each.held:.3f}", f"{1e3 * each.stood:.3f}")
    return table


def _times(row: CallStats) -> Iterator[str]:
    yield _mean(row.seconds, row.timed, 1e3)
    yield _mean(row.exposed, row.timed, 1e3)
    for speed in (row.algorithm_bandwidth, row.bus_bandwidth):
        yield f"{speed / 1e9:.3f}" if row.timed and row.key.size else "-"


def _mean(total: float, calls: int, factor: float) -> str:
    return f"{factor * total / calls:.3f}" if calls else "-"
