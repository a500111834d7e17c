"""One run under its cap: proof, training and report; returns the exit code."""

from __future__ import annotations

import argparse
import signal
import sys

import torch.distributed as dist
from rich.console import Console

import shoal
from cgroup import capping_group
from model import PRESETS
from plot import plot
from proof import SMALL, TINY, prove
from report import Report
from shoal.errors import ConfigError, TierError
from training import Case, build, shape_of, train
from usage import UsageProbe
from view import View, chart

OK, FAILED, BAD_INPUT, INTERRUPTED = 0, 1, 2, 130


def session(args: argparse.Namespace) -> int:
    """Run the proof, train, and report; returns the exit code."""
    console = Console()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that the files on the disk are removed
    try:
        shoal.init_distributed()
        console.quiet = dist.get_rank() != 0
        if not args.no_proof and not proof(console, args):
            return FAILED
        return OK if args.proof or training(console, args) else FAILED
    except (ConfigError, TierError) as error:
        print(f"train.py: error: {error}", file=sys.stderr)
        return BAD_INPUT
    except KeyboardInterrupt:
        return INTERRUPTED


def proof(console: Console, args: argparse.Namespace) -> bool:
    """Print for each dtype whether training with and without the disk is bit-identical; return whether all are."""
    shape, steps = (SMALL, 6) if args.proof else (TINY, 3)
    equal = True
    for comparison in prove(args.path, shape, steps):
        equal &= comparison.equal
        console.print(str(comparison), style="green" if comparison.equal else "bold red", highlight=False, soft_wrap=True)
    return equal


def training(console: Console, args: argparse.Namespace) -> bool:
    """Train under the cap; return whether memory stayed below it."""
    ranks = dist.get_world_size()
    shape = PRESETS[args.model] if args.model else shape_of(int(args.times * args.cap * ranks))
    case = Case(shape=shape, dtype=args.dtype, steps=args.steps, block=args.block, path=args.path)
    with console.status(f"building a GPT of {shape.layers} blocks of {shape.dim} on the disk"):
        engine = build(case)
    probe = UsageProbe(engine, capping_group(args.under))
    with View(console, args.cap, probe.now) as view:
        records, events = train(engine, case, view, probe)
    report = Report.of(engine, records, cap=args.cap, method=args.under, peak=probe.peak())
    if engine.global_rank == 0:
        args.out.mkdir(parents=True, exist_ok=True)
        for kind in ("png", "svg"):
            plot(args.out / f"step.{kind}", records[-1].timeline, events, report.title)
    if not console.is_terminal:
        console.print(chart(records[-1].timeline, 80), soft_wrap=True)
    console.print()
    console.print(report.title, style="bold", highlight=False, soft_wrap=True)
    console.print(report.table())
    console.print(f"A plot of the last step: {args.out / 'step.png'}, and .svg", highlight=False, soft_wrap=True)
    return report.peak <= args.cap
