"""`shoal attention show` draws the layout of a `sparse_attention` section, with its cost beside dense attention."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from shoal.errors import ConfigError, UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from shoal.attention.cost import AttentionCost
    from shoal.attention.drawing import Panel
    from shoal.attention.sparsity import SparsityConfig

__all__ = ["add_arguments", "main"]

_MAX_BLOCKS = 8192
"""The largest number of blocks in a row; a layout of more takes too much memory to draw."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the action `show` with its arguments to `parser`."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    show = actions.add_parser(
        "show", help="draw the layout of a structure, and print what it costs",
        description="Draw which blocks of keys each block of queries sees, and print the density, FLOPs and memory of the "
                    "layout beside dense attention.")
    show.add_argument("file", metavar="CONFIG", help="a JSON file with the section sparse_attention, or that section itself")
    show.add_argument("--length", type=_count, required=True, metavar="N", help="positions; padded to the block")
    show.add_argument("--heads", type=_count, default=4, metavar="H", help="heads of a layer (default 4)")
    show.add_argument("--dim", type=_count, default=64, metavar="D", help="the head dim (default 64)")
    show.add_argument("--svg", metavar="FILE", help="also draw the layout as an SVG file")


def main(args: argparse.Namespace) -> int:
    """Run `shoal attention show`. Raises ConfigError for the section, UsageError for the other arguments."""
    from rich.console import Console

    from shoal.attention.cost import AttentionCost
    from shoal.attention.drawing import svg, text
    from shoal.attention.settings import sparsity_config

    structure = sparsity_config(_section(args.file), args.heads)
    length = args.length + -args.length % structure.block
    if length // structure.block > _MAX_BLOCKS:
        raise UsageError(f"--length {args.length}: {length // structure.block:,} blocks of {structure.block} in a row; at "
                         f"most {_MAX_BLOCKS:,} are drawn: give larger blocks or a shorter length")
    blocks = structure.blocks(length)
    panels = _panels(structure, length)
    console = Console()
    if console.width < 2:  # COLUMNS=0, as where a terminal does not know its size
        console = Console(width=80)
    for panel in panels:
        drawn = text(panel.layout, width=console.width)
        console.print(f"{panel.title}\n{drawn}\n", markup=False, highlight=False, soft_wrap=True)
    cost = AttentionCost(blocks=blocks, heads=args.heads, dim=args.dim)
    heading = f"{type(structure).__name__}, length {length:,}, blocks of {structure.block}"
    console.print("\n".join([heading, *_lines(cost)]), markup=False, highlight=False, soft_wrap=True)
    if args.svg is not None:
        _write(args.svg, svg(heading, panels))
    return 0


def _section(file: str) -> Mapping[str, Any]:
    """Return the section of a configuration, or the file's object if that is one."""
    from shoal.attention.settings import SparseAttentionSettings
    from shoal.config.load import read

    given = read(file)
    if "sparse_attention" in given:
        if not isinstance(given["sparse_attention"], dict):
            raise ConfigError(f"sparse_attention: got {given['sparse_attention']!r}; give a JSON object")
        return cast("Mapping[str, Any]", given["sparse_attention"])
    if not set(given) <= set(SparseAttentionSettings.model_fields):
        raise ConfigError(f"{file}: has no section sparse_attention; add one, such as "
                          f'"sparse_attention": {{"mode": "fixed", "block": 16}}')
    return given


def _panels(structure: SparsityConfig, length: int) -> list[Panel]:
    """Return one panel for each layout that differs, named by its heads."""
    from shoal.attention.drawing import Panel

    blocks = structure.blocks(length)
    if blocks.heads == 1:
        return [Panel("all heads", blocks.layout[0])]
    heads_of: dict[bytes, list[int]] = {}
    for head, layout in enumerate(blocks.layout):
        heads_of.setdefault(layout.numpy().tobytes(), []).append(head)
    return [Panel(f"head{'s' if len(heads) > 1 else ''} {', '.join(map(str, heads))}", blocks.layout[heads[0]])
            for heads in heads_of.values()]


def _lines(cost: AttentionCost) -> list[str]:
    ratio = cost.dense_flops / cost.flops if cost.flops else 0.0
    return [
        f"density   {cost.blocks.density:.2%}: {cost.pairs:,} of {cost.dense_pairs:,} pairs of query and key, "
        f"{cost.heads} heads",
        f"compute   {_scaled(cost.flops, 'FLOPs')} forward and backward; dense {_scaled(cost.dense_flops, 'FLOPs')}: "
        f"{ratio:.1f} x",
        f"memory    {_scaled(cost.saved_bytes, 'bytes')} kept for backward; dense with its probabilities "
        f"{_scaled(cost.dense_bytes, 'bytes')}: {cost.dense_bytes / cost.saved_bytes:.1f} x",
        f"index     {_scaled(cost.index_bytes, 'bytes')}, once for all layers; a layer and one sample in fp32, head dim "
        f"{cost.dim}",
    ]


def _scaled(number: int, unit: str) -> str:
    value, prefix = float(number), ""
    for prefix in ("", "k", "M", "G", "T", "P"):
        if value < 1000 or prefix == "P":
            break
        value /= 1000
    short = {"bytes": "B", "FLOPs": "FLOPs"}[unit]
    return f"{value:.3g} {prefix}{short}"


def _write(path: str, drawn: str) -> None:
    try:
        Path(path).write_text(drawn)
    except OSError as error:
        raise UsageError(f"--svg: got {path!r}: {error.strerror}; name a file in a folder that exists") from None


def _count(words: str) -> int:
    if not (words.isascii() and words.isdecimal() and int(words)):
        raise argparse.ArgumentTypeError(f"got {words!r}; give a whole number, 1 or more")
    return int(words)
