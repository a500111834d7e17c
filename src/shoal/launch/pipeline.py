"""`shoal pipeline show` simulates all ranks of a pipeline: the grid, its bubble beside 1F1B's, and the memory it takes."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.errors import UsageError

if TYPE_CHECKING:
    from rich.console import Console

    from shoal.pipeline.simulate import Durations, Simulation

__all__ = ["add_arguments", "main"]

_MOST = 1_000_000
"""Instructions of a schedule that is simulated; more would be neither read nor waited for."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the action `show` with its arguments to `parser`."""
    from shoal.pipeline.schedules import SCHEDULES

    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    show = actions.add_parser(
        "show", help="simulate a schedule and draw it",
        description="Simulate every rank of a pipeline, check that none waits for ever, and show who computes when, how "
                    "much of the time is bubble, and how many microbatches' activations each rank holds.")
    which = show.add_mutually_exclusive_group(required=True)
    which.add_argument("--schedule", metavar="X", help=f"one of {', '.join(SCHEDULES)}")
    which.add_argument("--all", action="store_true", help="compare all schedules in a table")
    show.add_argument("--stages", type=_count, required=True, metavar="P", help="the ranks of the pipeline")
    show.add_argument("--microbatches", type=_count, required=True, metavar="M", help="of one step")
    show.add_argument("--stages-per-rank", type=_count, metavar="V",
                      help="parts that a rank's layers are cut into (default: the fewest of the schedule; with --all, V for "
                           "those that can)")
    show.add_argument("--in-flight", type=_count, metavar="N",
                      help="microbatches that a rank may hold at once (default: as many as the schedule does; with --all, N "
                           "for those that can)")
    for name, default, what in (("forward", 1.0, "of a microbatch through all layers of a rank"),
                                ("input", 1.0, "of its backward for the inputs"),
                                ("weight", 1.0, "of its backward for the weights"),
                                ("travel", 0.0, "of a tensor from rank to rank")):
        show.add_argument(f"--{name}", type=_travel if name == "travel" else _time, default=default, metavar="T",
                          help=f"time {what}, in any unit (default {default:g})")
    show.add_argument("--svg", metavar="FILE", help="draw it in a file, too")


def main(args: argparse.Namespace) -> int:
    """Show what is asked for. Raises `UsageError` for what no schedule can do."""
    from rich.console import Console

    from shoal.pipeline.schedules import SCHEDULES

    if args.all and args.svg is not None:
        raise UsageError("--svg: a table is not drawn; name one schedule with --schedule in place of --all")
    if args.all:
        asked = args.stages_per_rank
        simulations = [_simulated(name, asked if asked is not None and recipe.takes(asked) else recipe.fewest, args,
                                  args.in_flight if recipe.holds(args.in_flight, args.stages) else None)
                       for name, recipe in SCHEDULES.items()]
        _compare(simulations, _wait(_simulated("1f1b", 1, args, None)), Console())
        if args.in_flight is not None:
            limited = [name for name, recipe in SCHEDULES.items() if recipe.holds(args.in_flight, args.stages)]
            Console().print(f"in flight: at most {args.in_flight} microbatches in {', '.join(limited) or 'none'}; in "
                            f"others, and in the 1F1B that all are compared with, as many as they take", highlight=False,
                            soft_wrap=True)
        return 0
    simulation = _simulated(args.schedule, args.stages_per_rank, args, args.in_flight)
    _show(simulation, (args.stages - 1) * (args.forward + args.input + args.weight), Console())
    if args.svg is not None:
        _write(args.svg, simulation)
    return 0


def _simulated(name: str, stages_per_rank: int | None, args: argparse.Namespace, in_flight: int | None) -> Simulation:
    from shoal.pipeline.check import check
    from shoal.pipeline.schedules import make_schedule
    from shoal.pipeline.simulate import simulate

    instructions = 3 * args.stages * args.microbatches * (stages_per_rank or 2)
    if instructions > _MOST:
        raise UsageError(f"--stages {args.stages} --microbatches {args.microbatches}: up to {instructions:,} instructions; "
                         f"at most {_MOST:,} are simulated")
    schedule = make_schedule(name, ranks=args.stages, microbatches=args.microbatches, stages_per_rank=stages_per_rank,
                             in_flight=in_flight)
    check(schedule)
    return simulate(schedule, _durations(args, schedule.stages_per_rank))


def _durations(args: argparse.Namespace, stages_per_rank: int) -> Durations:
    """Return how long a stage takes that is one of several of its rank."""
    from shoal.pipeline.simulate import Durations

    return Durations(forward=args.forward / stages_per_rank, input=args.input / stages_per_rank,
                     weight=args.weight / stages_per_rank, travel=args.travel)


def _show(simulation: Simulation, usual: float, console: Console) -> None:
    """Print the grid, and what it says; `usual` is what each rank waits with 1F1B."""
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
    console.print(f"{schedule.name} ({SCHEDULES[schedule.name].summary}): {_counted(schedule.ranks, 'rank')}{each}, "
                  f"{_counted(schedule.microbatches, 'microbatch', 'es')}\n", highlight=False, soft_wrap=True)
    console.print(painted(simulation, width=console.width), soft_wrap=True)
    console.print("\n" + "\n".join(lines), highlight=False, soft_wrap=True)


def _compare(simulations: list[Simulation], usual: float, console: Console) -> None:
    """Print a table, where 1F1B as it is waits `usual`."""
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
    """Return how long a rank waits; all of them wait as long, for all have the same to do."""
    return sum(simulation.idle) / len(simulation.idle)


def _write(path: str, simulation: Simulation) -> None:
    from shoal.pipeline.svg_grid import svg
    from shoal.pipeline.text_grid import VOID, is_void

    if is_void(simulation.rows):
        raise UsageError(f"--svg: {VOID}")
    try:
        Path(path).write_text(svg(simulation))
    except OSError as error:
        raise UsageError(f"--svg: got {path!r}: {error.strerror}; name a file in a folder that is there") from None


def _short(value: float) -> str:
    return f"{round(value, 2):g}"


def _counted(count: int, word: str, ending: str = "s") -> str:
    return f"{count} {word}{ending if count > 1 else ''}"


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
