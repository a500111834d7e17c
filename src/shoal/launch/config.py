"""`shoal config show FILE` prints the resolved configuration; `shoal config reference` prints the page of all keys."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from shoal.config.reference import render
from shoal.config.resolve import DEFAULT, leaves
from shoal.engine.schema import Config
from shoal.errors import ShoalError
from shoal.optim.registry import check_optimizer_name
from shoal.schedule.registry import check_schedule_name

__all__ = ["add_arguments", "main"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the actions `show` and `reference` with their arguments to `parser`."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    show = actions.add_parser("show", help="print the resolved values and the origin of each")
    show.add_argument("file", help="a JSON file, or URL-safe base64 of JSON")
    show.add_argument("--ranks", type=_ranks, help="data ranks that share the batch (default 1)", metavar="N")
    show.add_argument("--json", action="store_true", help="print one JSON object with values and origins")
    reference = actions.add_parser("reference", help="print the reference page of every key, as Markdown")
    reference.add_argument("--output", type=Path, help="write the page to FILE instead", metavar="FILE")


def main(args: argparse.Namespace) -> int:
    """Run the action and return its exit code. Raises ConfigError for an invalid configuration."""
    match args.action:
        case "show":
            origin = "one, as --ranks is not given" if args.ranks is None else "--ranks"
            config = Config.resolve(args.file, data_ranks=args.ranks or 1, data_ranks_origin=origin)
            show = _print_json if args.json else _print_table
            show(config)
            _warn_of_names(config)
        case "reference":
            _write(render(Config), args.output)
        case _:
            raise AssertionError(args.action)
    return 0


def _warn_of_names(config: Config) -> None:
    """Write a line to standard error for an optimizer or a schedule of unknown name, which the script may yet register."""
    for check, name, register in ((check_optimizer_name, config.optimizer.type, "shoal.register_optimizer"),
                                  (check_schedule_name, config.scheduler.type, "shoal.register_schedule")):
        try:
            if name is not None:
                check(name)
        except ShoalError as error:
            print(f"shoal config: {error}. initialize refuses it, unless the script calls {register} before",
                  file=sys.stderr)


def _ranks(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"got {text!r}; give a whole number of at least 1")
    return int(text)


def _write(page: str, output: Path | None) -> None:
    if output is None:
        print(page, end="")
    else:
        output.write_text(page, encoding="utf-8")


def _print_json(config: Config) -> None:
    print(json.dumps({"values": config.as_dict(), "origins": dict(config.origins)}, indent=2))


def _print_table(config: Config) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False)
    table.add_column("key", no_wrap=True)
    table.add_column("value", overflow="fold")
    table.add_column("origin", overflow="fold")
    previous: tuple[str, ...] = ()
    for path, value in leaves(config.as_dict()):
        *sections, key = path.split(".")
        for depth, section in enumerate(sections):
            if previous[: depth + 1] != tuple(sections[: depth + 1]):
                table.add_row(Text("  " * depth + section, style="bold"))
        previous = tuple(sections)
        origin = config.origins[path]
        row = (Text("  " * len(sections) + key), Text(json.dumps(value)), Text(origin))
        table.add_row(*row, style="dim" if origin == DEFAULT else "")
    Console().print(table)
