"""`shoal disk bench PATH` measures the speed of a disk for training state and recommends `aio` settings."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from shoal.config.sizes import format_bytes
from shoal.errors import UsageError
from shoal.launch.console import size_argument

if TYPE_CHECKING:
    from rich.table import Table

    from shoal.tier.bench import BenchRow

__all__ = ["add_arguments", "main"]

_GIGA = 1e9
_BAR = 24


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the action `bench` with its arguments to `parser`."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    bench = actions.add_parser(
        "bench", help="measure a disk and recommend aio settings",
        description="Measure the read and write speed of a folder's disk by block_size and by requests in flight "
                    "(queue_depth times intra_op_parallelism), with the I/O engine that training uses, and recommend the "
                    "`aio` section of the configuration. The test file is always removed.")
    bench.add_argument("folder", help="a folder on the disk, as in nvme_path", metavar="PATH")
    bench.add_argument("--size", type=size_argument, default="1G", metavar="SIZE",
                       help="size of the test file, for example 512M or 4G; choose more than the disk's cache (default 1G)")
    bench.add_argument("--seconds", type=_seconds, default=20.0, metavar="N", help="total duration (default 20)")
    bench.add_argument("--json", action="store_true", help="print one JSON object instead of the table")


def main(args: argparse.Namespace) -> int:
    """Run the benchmark. Raises TierError if the folder cannot be used, UsageError if the file is too small to measure."""
    from rich.console import Console
    from rich.progress import track

    from shoal.tier.bench import ROUNDS, SETTINGS, SMALLEST, best, measure, merged
    from shoal.tier.folder_check import slow_reason

    if args.size < SMALLEST:
        raise UsageError(f"--size: got {format_bytes(args.size)}; give at least {format_bytes(SMALLEST)}")
    progress = Console(stderr=True)
    rows = merged(track(measure(args.folder, SETTINGS, bytes=args.size, seconds=args.seconds), "writing and reading",
                        total=ROUNDS * len(SETTINGS), console=progress, transient=True, disable=not progress.is_terminal))
    recommended, reason = best(rows), slow_reason(args.folder)
    aio = {"aio": {"block_size": recommended.setting.block_bytes, "queue_depth": recommended.setting.requests,
                   "intra_op_parallelism": 1}}
    if args.json:
        print(json.dumps({"path": args.folder, "file_bytes": args.size, "slow": reason,
                          "rows": [_as_json(row) for row in rows], **aio}))
        return 0
    console = Console()
    console.print(f"{args.folder}, a file of {format_bytes(args.size)}", highlight=False, soft_wrap=True)
    console.print(_table(rows, recommended))
    if reason is not None:
        console.print(f"note: {args.folder} {reason}", highlight=False, soft_wrap=True)
    console.print("*: within 5 % of the fastest, with the fewest bytes in flight; for the configuration:", highlight=False,
                  soft_wrap=True)
    print(json.dumps(aio))
    return 0


def _table(rows: Sequence[BenchRow], recommended: BenchRow) -> Table:
    from rich.bar import Bar
    from rich.table import Table

    table = Table()
    for column in ("block", "requests", "read GB/s", "write GB/s"):
        table.add_column(column, justify="right")
    table.add_column("read and write")
    table.add_column("")
    fastest = max(row.both for row in rows)
    for row in rows:
        table.add_row(format_bytes(row.setting.block_bytes), str(row.setting.requests), f"{row.read / _GIGA:.2f}",
                      f"{row.write / _GIGA:.2f}", Bar(fastest, 0, row.both, width=_BAR), "*" if row is recommended else "")
    return table


def _as_json(row: BenchRow) -> dict[str, float]:
    return {"block_size": row.setting.block_bytes, "requests": row.setting.requests,
            "read_bytes_per_second": row.read, "write_bytes_per_second": row.write}


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < math.inf:
        raise argparse.ArgumentTypeError(f"got {text!r}; give a number of seconds above 0")
    return seconds
