"""`shoal sbatch` writes a script for Slurm whose ranks save before the time limit, and go on when Slurm starts it again.

Slurm sends SIGUSR1 some seconds before the limit. The script passes SIGTERM to `shoal run`, whose ranks save and end. The
program must save on SIGTERM within the grace period. Then the script puts the job back into the queue; a job that ends in
another way ends with the exit code of `shoal run`. From its second start on the program gets the arguments that resume it.
"""

from __future__ import annotations

import argparse
import io
import os
import re
import shlex
import signal
import sys
from pathlib import Path
from typing import NoReturn

from shoal.errors import LaunchError, UsageError
from shoal.launch import run
from shoal.launch.launch_plan import add_program
from shoal.launch.selection import split_words

__all__ = ["add_arguments", "main", "script"]

MARGIN = 30
"""Seconds beyond the grace period between the signal and the time limit."""
EARLY = 60
"""Seconds by which Slurm may send the signal too early (its manual on `--signal`)."""
OWN = ("launcher", "ranks", "grace", "nodes", "hosts", "hostfile", "include", "exclude", "rendezvous", "node_rank", "module",
       "dry_run")
"""Options of `shoal run` that the script decides; `--run-args` cannot."""

TIME = re.compile(r"(?:(?P<days>\d+)-(?P<hours>\d+)(?::(?P<minutes>\d+)(?::(?P<seconds>\d+))?)?"
                  r"|(?P<m>\d+)(?::(?P<s>\d+))?|(?P<H>\d+):(?P<M>\d+):(?P<S>\d+))")
"""The forms of a time limit in Slurm's manual of sbatch."""

TEMPLATE = """#!/bin/bash
{directives}

run=0
asked=0
ask() {{  # the time limit is near: the ranks save and end
    asked=1
    [ "$run" -eq 0 ] || kill -TERM "$run"
}}
trap ask USR1

more=()
[ "${{SLURM_RESTART_COUNT:-0}}" -eq 0 ] || more=({resume})
{command} "${{more[@]}}" &
run=$!
[ "$asked" -eq 0 ] || kill -TERM "$run"  # the signal came in between
while true; do  # a trap ends `wait`, but not the run
    wait "$run"
    code=$?
    kill -0 "$run" 2>/dev/null || break
done
{requeue}exit "$code"
"""

REQUEUE = f"""if [ "$asked" -eq 1 ] && [ "$code" -eq {128 + signal.SIGTERM} ]; then  # ended by SIGTERM: there is more to do
    echo "shoal sbatch: the time limit is near; job $SLURM_JOB_ID goes back into the queue after start" \\
        "$((${{SLURM_RESTART_COUNT:-0}} + 1))" >&2
    scontrol requeue "$SLURM_JOB_ID" && exit 0
    echo "shoal sbatch: Slurm did not take the job back; submit it again with the arguments that resume it" >&2
fi
"""


_OWN_DIRECTIVES = {
    "--job-name": "give --name", "-J": "give --name", "--nodes": "give --nodes", "-N": "give --nodes",
    "--time": "give --time", "-t": "give --time", "--output": "give --log", "-o": "give --log", "--signal": "give --grace",
    "--requeue": "leave --no-requeue out", "--no-requeue": "give --no-requeue", "--open-mode": "the log has all starts",
    "--ntasks-per-node": "one task of a node starts its --ranks",
}
"""By the name of a directive that this command writes, what to do instead of giving it."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `shoal sbatch`."""
    parser.add_argument("--nodes", type=int, default=1, metavar="N", help="number of nodes (1)")
    parser.add_argument("--ranks", type=int, required=True, metavar="N", help="ranks on each node")
    parser.add_argument("-m", "--module", action="store_true", help="SCRIPT is a module, as with `python -m`")
    parser.add_argument("--name", default="shoal", help="name of the job (shoal)")
    parser.add_argument("--time", metavar="LIMIT", help="time limit of one start, such as 4:00:00")
    parser.add_argument("--grace", type=int, default=90, metavar="SECONDS",
                        help="time that ranks have to save before the limit (90)")
    parser.add_argument("--log", default="shoal-%j.log", metavar="FILE", help="output of all starts (shoal-%%j.log)")
    parser.add_argument("--directive", action="append", default=[], metavar="OPTION",
                        help="a further #SBATCH line, such as --directive=--gpus-per-node=8")
    parser.add_argument("--run-args", default="", metavar="WORDS", help="further options of `shoal run`, as one word")
    parser.add_argument("--resume-args", default="", metavar="WORDS",
                        help="further arguments of the script from its second start on, as one word, such as "
                             "--resume-args=--resume; not needed by a script that resumes wherever it finds a checkpoint")
    parser.add_argument("--no-requeue", action="store_true",
                        help="end at the time limit (default: go back into the queue, and start again)")
    parser.add_argument("--output", metavar="FILE", help="where the script goes (default: standard output)")
    add_program(parser)


def main(args: argparse.Namespace) -> int:
    """Write the script."""
    for option, value in (("--nodes", args.nodes), ("--ranks", args.ranks), ("--grace", args.grace)):
        if value < 1:
            raise UsageError(f"{option}: got {value}; choose 1 or more")
    for option, value in (("--name", args.name), ("--time", args.time or ""), ("--log", args.log), *(
            ("--directive", each) for each in args.directive)):
        if "\n" in value:
            raise UsageError(f"{option}: got {value!r}; a directive is one line")
    for each in args.directive:
        _check_directive(each)
    _check_time(args)
    _check_run_args(args)
    if not args.module and not Path(args.script).exists():
        raise LaunchError(f"no script {args.script!r} in {Path.cwd()}; correct its path")
    if args.output is not None and Path(args.output).exists() and Path(args.script).exists() and (
            Path(args.output).samefile(args.script)):
        raise UsageError(f"--output {args.output}: is SCRIPT itself, which it would overwrite; give another file")
    text = script(args)
    if args.output is None:
        if isinstance(sys.stdout, io.TextIOWrapper):  # words that are no text leave byte for byte
            sys.stdout.reconfigure(encoding=sys.getfilesystemencoding(), errors="surrogateescape")
        sys.stdout.write(text)
    else:
        try:
            Path(args.output).write_bytes(os.fsencode(text))
        except OSError as error:
            raise LaunchError(f"--output {args.output}: cannot be written: {error.strerror}; give another file") from None
    return 0


def script(args: argparse.Namespace) -> str:
    """Return the script for parsed arguments."""
    directives = [f"--job-name={_quoted(args.name)}", f"--nodes={args.nodes}", "--ntasks-per-node=1",
                  f"--signal=B:USR1@{args.grace + MARGIN}", "--open-mode=append", f"--output={_quoted(args.log)}",
                  "--no-requeue" if args.no_requeue else "--requeue"]
    directives += [f"--time={_quoted(args.time)}"] if args.time else []
    directives += args.directive
    command = [sys.executable, "-m", "shoal", "run", *_run_words(args)]
    return TEMPLATE.format(directives="\n".join(f"#SBATCH {each}" for each in directives), command=shlex.join(command),
                           resume=shlex.join(split_words("--resume-args", args.resume_args)),
                           requeue="" if args.no_requeue else REQUEUE)


def _run_words(args: argparse.Namespace, run_args: str | None = None) -> list[str]:
    """Return the words of `shoal run`, with `run_args` in place of those that the user gave."""
    return ["--launcher", "slurm", "--ranks", str(args.ranks), "--grace", str(args.grace),
            *split_words("--run-args", args.run_args if run_args is None else run_args),
            *(["--module"] if args.module else []), args.script, *args.args]


def _check_time(args: argparse.Namespace) -> None:
    """Raise `UsageError` for a limit that is none, or that would begin with the signal at which the ranks end."""
    if args.time is None:
        return
    found = TIME.fullmatch(args.time)
    if found is None:
        raise UsageError(f"--time: got {args.time!r}; write MINUTES, MINUTES:SECONDS, HOURS:MINUTES:SECONDS, DAYS-HOURS, "
                         "DAYS-HOURS:MINUTES or DAYS-HOURS:MINUTES:SECONDS, such as 4:00:00")
    given = {unit: int(count or 0) for unit, count in found.groupdict().items()}
    minutes = (given["days"] * 24 + given["hours"] + given["H"]) * 60 + given["minutes"] + given["m"] + given["M"]
    limit = minutes * 60 + given["seconds"] + given["s"] + given["S"]
    needed = args.grace + MARGIN + EARLY
    if 0 < limit <= needed:  # 0 is no limit
        raise UsageError(f"--time: got {args.time}, which is {limit} s, with --grace {args.grace}: Slurm sends the signal "
                         f"{args.grace + MARGIN} s before the limit, or up to {EARLY} s earlier, so that each start would "
                         f"end at once, without end; give more than {needed} s, or a smaller --grace")


def _check_directive(given: object) -> None:
    """Raise `UsageError` for a line that is no option of sbatch, or one that this command writes from its own options."""
    line = given if isinstance(given, str) else "--"  # of that value argparse of Python 3.11 makes an empty list
    name = re.split(r"[\s=]", line, maxsplit=1)[0]
    if not re.fullmatch(r"-[A-Za-z].*|--[a-z][a-z0-9-]*", name):
        raise UsageError(f"--directive: got {line!r}; give an option of sbatch, such as --directive=--gpus-per-node=8")
    instead = _OWN_DIRECTIVES.get(name if name.startswith("--") else name[:2])  # a value may follow a letter at once
    if instead is not None:
        raise UsageError(f"--directive: got {line!r}, which this command writes itself; {instead}")


class _RunParser(argparse.ArgumentParser):
    """The parser of `shoal run`; it raises instead of ending the process."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"--run-args: {message}; give options of `shoal run`")


def _check_run_args(args: argparse.Namespace) -> None:
    """Raise `UsageError` for words that `shoal run` would refuse, or take for SCRIPT, at every start of the job."""
    parser = _RunParser(prog="shoal run", allow_abbrev=False, add_help=False)
    run.add_arguments(parser)
    parsed = parser.parse_args(_run_words(args))
    expected = parser.parse_args(_run_words(args, ""))
    for name in OWN:
        if (found := getattr(parsed, name)) != getattr(expected, name):
            raise UsageError(f"--run-args: got --{name.replace('_', '-')} {found}, which the script sets for itself: Slurm "
                             f"chooses the hosts, and --nodes, --ranks, --grace and --module are options of `shoal sbatch`")
    if (parsed.script, parsed.args) != (args.script, args.args):
        raise UsageError(f"--run-args: got {parsed.script!r}, which is no option of `shoal run`; words of SCRIPT follow it")
    try:
        run.read_plan(parsed)
        run.read_variables(parsed.env)
    except UsageError as error:
        raise UsageError(f"--run-args: {error}" if args.run_args else str(error)) from None


def _quoted(value: str) -> str:
    """Return a value of a directive, in quotes where Slurm would take it for several words or a comment."""
    return value if re.fullmatch(r"[^\s#'\"\\]*", value) else '"' + re.sub(r'(["\\])', r"\\\1", value) + '"'
