"""One run under its cap, from the proof to the report; the exit code says how it went."""

from __future__ import annotations

import argparse
import signal
import sys

import torch.distributed as dist
from rich.console import Console

import shoal
from facts import Facts
from group import own_group
from model import PRESETS
from picture import picture
from places import Look
from proof import SMALL, TINY, prove
from shoal.errors import ConfigError, TierError
from training import Case, build, shape_of, train
from view import View, chart

GOOD, BAD, USAGE, INTERRUPTED = 0, 1, 2, 130


def session(args: argparse.Namespace) -> int:
    """Show that the disk changes nothing, train, and report; returns the exit code."""
    console = Console()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that the files on the disk are removed
    try:
        shoal.init_distributed()
        console.quiet = dist.get_rank() != 0
        if not args.no_proof and not proof(console, args):
            return BAD
        return GOOD if args.proof or training(console, args) else BAD
    except (ConfigError, TierError) as error:
        print(f"train.py: error: {error}", file=sys.stderr)
        return USAGE
    except KeyboardInterrupt:
        return INTERRUPTED


def proof(console: Console, args: argparse.Namespace) -> bool:
    """Say of each dtype whether training with and without the disk is the same; return whether it always is."""
    shape, steps = (SMALL, 6) if args.proof else (TINY, 3)
    equal = True
    for found in prove(args.path, shape, steps):
        equal &= found.equal
        console.print(str(found), style="green" if found.equal else "bold red", highlight=False, soft_wrap=True)
    return equal


def training(console: Console, args: argparse.Namespace) -> bool:
    """Train under the cap; return whether memory stayed below it."""
    ranks = dist.get_world_size()
    shape = PRESETS[args.model] if args.model else shape_of(int(args.times * args.cap * ranks))
    case = Case(shape=shape, dtype=args.dtype, steps=args.steps, block=args.block, path=args.path)
    with console.status(f"building a GPT of {shape.layers} blocks of {shape.dim} on the disk"):
        engine = build(case)
    look = Look(engine, own_group(args.under))
    with View(console, args.cap, look.now) as view:
        readings, events = train(engine, case, view, look)
    facts = Facts.of(engine, readings, cap=args.cap, way=args.under, peak=look.peak())
    if engine.global_rank == 0:
        args.out.mkdir(parents=True, exist_ok=True)
        for kind in ("png", "svg"):
            picture(args.out / f"step.{kind}", readings[-1].timeline, events, facts.title)
    if not console.is_terminal:
        console.print(chart(readings[-1].timeline, 80), soft_wrap=True)
    console.print()
    console.print(facts.title, style="bold", highlight=False, soft_wrap=True)
    console.print(facts.table())
    console.print(f"The last step as a picture: {args.out / 'step.png'}, and .svg", highlight=False, soft_wrap=True)
    return facts.peak <= args.cap
