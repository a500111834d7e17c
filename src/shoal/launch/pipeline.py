"""`shoal pipeline show` simulates a pipeline schedule and prints its grid, its bubble beside 1F1B's, and its memory."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.errors import UsageError
from shoal.launch.console import counted

if TYPE_CHECKING:
    from rich.console import Console

    from shoal.pipeline.simulation import Durations, Simulation

__all__ = ["add_arguments", "main"]

_MAX_INSTRUCTIONS = 1_000_000
"""The largest schedule that is simulated; a larger one takes too long and is too wide to read."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the action `show` with its arguments to `parser`."""
    from shoal.pipeline.schedules import SCHEDULES

    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    show = actions.add_parser(
        "show", help="simulate a schedule and draw it",
        description="Simulate every rank of a pipeline, check that no rank deadlocks, and show when each rank computes, how "
                    "much of the time is bubble, and how many microbatches' activations each rank holds.")
    which = show.add_mutually_exclusive_group(required=True)
    which.add_argument("--schedule", metavar="X", help=f"one of {', '.join(SCHEDULES)}")
    which.add_argument("--all", action="store_true", help="compare all schedules in a table")
    show.add_argument("--ranks", "--stages", type=_count, required=True, metavar="P",
                      help="ranks of the pipeline (stages, where each rank has one)")
    show.add_argument("--microbatches", type=_count, required=True, metavar="M", help="microbatches of one step")
    show.add_argument("--stages-per-rank", type=_count, metavar="V",
                      help="stages per rank (default: the least that the schedule allows; with --all, V for the schedules "
                           "that allow it)")
    show.add_argument("--in-flight", type=_count, metavar="N",
                      help="microbatches that a rank may hold at once (default: the schedule's own number; with --all, N "
                           "for the schedules that allow it)")
    for name, default, what in (("forward", 1.0, "of a microbatch through all layers of a rank"),
                                ("input", 1.0, "of its backward for the input gradient"),
                                ("weight", 1.0, "of its backward for the weight gradients"),
                                ("travel", 0.0, "of a message from rank to rank")):
        show.add_argument(f"--{name}", type=_travel if name == "travel" else _time, default=default, metavar="T",
                          help=f"time {what}, in any unit (default {default:g})")
    show.add_argument("--svg", metavar="FILE", help="also draw the grid as an SVG file")


def main(args: argparse.Namespace) -> int:
    """Run `shoal pipeline show`. Raises `UsageError` for arguments that no schedule allows."""
    from rich.console import Console

    from shoal.pipeline.schedules import SCHEDULES

    if args.all and args.svg is not None:
        raise UsageError("--svg: a table is not drawn; name one schedule with --schedule instead of --all")
    if args.all:
        asked = args.stages_per_rank
        simulations = [_simulated(name, asked if asked is not None and recipe.allows_stages(asked) else recipe.min_stages,
                                  args, args.in_flight if recipe.allows_in_flight(args.in_flight, args.ranks) else None)
                       for name, recipe in SCHEDULES.items()]
        _compare(simulations, _wait(_simulated("1f1b", 1, args, None)), Console())
        if args.in_flight is not None:
            limited = [name for name, recipe in SCHEDULES.items() if recipe.allows_in_flight(args.in_flight, args.ranks)]
            Console().print(f"in flight: at most {args.in_flight} microbatches in {', '.join(limited) or 'none'}; the "
                            f"others, and the 1F1B that all are compared with, hold their own number", highlight=False,
                            soft_wrap=True)
        return 0
    simulation = _simulated(args.schedule, args.stages_per_rank, args, args.in_flight)
    _show(simulation, (args.ranks - 1) * (args.forward + args.input + args.weight), Console())
    if args.svg is not None:
        _write(args.svg, simulation)
    return 0


def _simulated(name: str, stages_per_rank: int | None, args: argparse.Namespace, in_flight: int | None) -> Simulation:
    from shoal.pipeline.check import check, simulate
    from shoal.pipeline.schedules import make_schedule

    instructions = 3 * args.ranks * args.microbatches * (stages_per_rank or 2)
    if instructions > _MAX_INSTRUCTIONS:
        raise UsageError(f"--ranks {args.ranks} --microbatches {args.microbatches}: up to {instructions:,} instructions; "
                         f"at most {_MAX_INSTRUCTIONS:,} are simulated")
    schedule = make_schedule(name, ranks=args.ranks, microbatches=args.microbatches, stages_per_rank=stages_per_rank,
                             in_flight=in_flight)
    check(schedule)
    return simulate(schedule, _durations(args, schedule.stages_per_rank))


def _durations(args: argparse.Namespace, stages_per_rank: int) -> Durations:
    """Return the durations of one stage, given those of all stages of a rank."""
    from shoal.pipeline.simulation import Durations

    return Durations(forward=args.forward / stages_per_rank, input=args.input / stages_per_rank,
                     weight=args.weight / stages_per_rank, travel=args.travel)


def _show(simulation: Simulation, usual: float, console: Console) -> None:
    """Print the grid and its numbers; `usual` is the time that each rank waits with 1F1B."""
    from shoal.pipeline.schedules import SCHEDULES
    from shoal.pipeline.text_grid import painted

    schedule = simulation.schedule
    each = f" of {schedule.stages_per_rank} stages" if schedule.stages_per_rank > 1 else ""
    peaks = [_short(peak) for peak in schedule.peak_microbatches]
    lines = [f"makespan     {simulation.makespan:.6g}",
             f"bubble       {simulation.bubble:.1%}: each rank waits {_wait(simulation):.6g}",
             f"             1F1B without travel: {usual / (usual + simulation.busy[0]):.1%}, (p-1)/(m+p-1): each waits "
             f"(p-1)(F+I+W) = {usual:.6g}",
             f"activations  at most {_short(max(schedule.peak_microbatches))}, of microbatches at all layers of a rank; "
             f"by rank: {' '.join(peaks)}"]
    console.print(f"{schedule.name} ({SCHEDULES[schedule.name].summary}): {counted(schedule.ranks, 'rank')}{each}, "
                  f"{counted(schedule.microbatches, 'microbatch', 'es')}\n", highlight=False, soft_wrap=True)
    console.print(painted(simulation, width=console.width), soft_wrap=True)
    console.print("\n" + "\n".join(lines), highlight=False, soft_wrap=True)


def _compare(simulations: list[Simulation], usual: float, console: Console) -> None:
    """Print a table of all schedules; `usual` is the time that each rank waits with plain 1F1B."""
    from rich.table import Table

    table = Table()
    for column in ("schedule", "stages per rank", "makespan", "bubble", "each rank waits", "of 1F1B's", "activations"):
        table.add_column(column, justify="left" if column == "schedule" else "right")
    for simulation in simulations:
        wait, peaks = _wait(simulation), simulation.schedule.peak_microbatches
        held = sorted({_short(min(peaks)): min(peaks), _short(max(peaks)): max(peaks)}.items(), key=lambda item: item[1])
        table.add_row(simulation.schedule.name, str(simulation.schedule.stages_per_rank), f"{simulation.makespan:.6g}",
                      f"{simulation.bubble:.1%}", f"{wait:.6g}", f"{wait / usual:.0%}" if usual else "-",
                      " to ".join(text for text, _ in held))
    console.print(table)
    console.print("bubble: waiting as a part of all time; activations: of microbatches at all layers of a rank, by rank",
                  highlight=False, soft_wrap=True)


def _wait(simulation: Simulation) -> float:
    """Return the time that a rank waits; it is equal on all ranks, which compute equally long."""
    return sum(simulation.idle) / len(simulation.idle)


def _write(path: str, simulation: Simulation) -> None:
    from shoal.pipeline.svg_grid import svg
    from shoal.pipeline.text_grid import NOT_DRAWN, mostly_idle

    if mostly_idle(simulation.rows):
        raise UsageError(f"--svg: {NOT_DRAWN}")
    try:
        Path(path).write_text(svg(simulation))
    except OSError as error:
        raise UsageError(f"--svg: got {path!r}: {error.strerror}; name a file in a folder that exists") from None


def _short(value: float) -> str:
    return f"{round(value, 2):g}"


def _count(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and int(text)):
        raise argparse.ArgumentTypeError(f"got {text!r}; give a whole number, 1 or more")
    return int(text)


def _time(text: str) -> float:
    return _number(text, lambda value: 0 < value < math.inf, "a number above 0")


def _travel(text: str) -> float:
    return _number(text, lambda value: 0 <= value < math.inf, "0 or more")


def _number(text: str, allowed: Callable[[float], bool], words: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not allowed(value):
        raise argparse.ArgumentTypeError(f"got {text!r}; give {words}")
    return value
