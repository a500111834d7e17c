"""`shoal run`: start a script on several ranks of this machine, or of several, and stay responsible for them.

Everything that a user can get wrong is checked here, before torch is imported and before a process is started.
"""

from __future__ import annotations

import argparse
import importlib.machinery
import os
import secrets
import shutil
import signal
import socket
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from shoal.errors import LaunchError, UsageError
from shoal.launch.orphans import MARK, Guardian

__all__ = ["LaunchPlan", "add_arguments", "main"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchPlan:
    """A launch, as the command line describes it."""

    kind: str
    """`script`, `module` or `program`."""
    target: str
    args: tuple[str, ...]
    ranks: int | None
    """Ranks on this node; None: one for each GPU, or half as many as there are cores."""
    nodes: tuple[int, int]
    """The fewest and the most nodes."""
    rendezvous: str | None
    """`host:port` where the nodes meet; None: this node only."""
    hosts_rendezvous: bool | None
    """Whether this node hosts the meeting; None: decided by the address."""
    job: str
    """The name by which the nodes of one job know each other."""
    max_restarts: int
    log_dir: str | None
    bind_cores: bool
    grace: float
    """Seconds that ranks get to finish after a signal, before they are killed."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `shoal run`."""
    parser.add_argument("--ranks", default="auto", metavar="N",
                        help="ranks on this node; auto (default): one per GPU, else half the cores")
    parser.add_argument("--nodes", default="1", metavar="A[:B]", help="nodes that take part: exactly A, or A to B")
    parser.add_argument("--rendezvous", metavar="HOST:PORT", help="where the nodes meet; the same on every node")
    parser.add_argument("--node-rank", type=int, metavar="R",
                        help="0: this node hosts the rendezvous; other: it does not (default: decided by HOST)")
    parser.add_argument("--job", default="shoal", help="name of the job, where several meet at one rendezvous")
    parser.add_argument("--max-restarts", type=int, default=0, metavar="K",
                        help="start all ranks again up to K times when one fails")
    parser.add_argument("-m", "--module", action="store_true", help="SCRIPT is a module, as with `python -m`")
    parser.add_argument("--no-python", action="store_true", help="SCRIPT is a program, not Python")
    parser.add_argument("--log-dir", metavar="DIR", help="also write what each rank prints to files in DIR")
    parser.add_argument("--bind-cores", action=argparse.BooleanOptionalAction, default=True,
                        help="keep each rank on its own share of the cores")
    parser.add_argument("--env", action="append", default=[], metavar="NAME=VALUE", help="set a variable for all ranks")
    parser.add_argument("--grace", type=float, default=30.0, metavar="SECONDS",
                        help="time to finish after Ctrl-C or SIGTERM before ranks are killed (default 30)")
    parser.add_argument("script", metavar="SCRIPT")
    parser.add_argument("args", nargs=argparse.REMAINDER, metavar="ARGS", help="given to the script as they are")


def main(args: argparse.Namespace) -> int:
    """Run the ranks to their end; return 0, the first failing rank's code (128 + n for signal n), or 128 + signal."""
    plan = read_plan(args)
    check_target(plan)
    variables = read_variables(args.env)
    mark = f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"
    folder = tempfile.mkdtemp(prefix="shoal-run-")
    signal.signal(signal.SIGTERM, _leave)
    try:
        with Guardian(mark, folder):
            os.environ.update({**variables, MARK: mark})
            from shoal.launch.agent import launch  # imports torch, which may start threads: after the guardian's fork

            return launch(plan, mark, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _leave(number: int, frame: object) -> None:
    raise SystemExit(128 + number)


def read_plan(args: argparse.Namespace) -> LaunchPlan:
    """Turn parsed arguments into a plan. Raises `UsageError` for values that cannot be meant."""
    if args.module and args.no_python:
        raise UsageError("--module and --no-python: SCRIPT cannot be both a Python module and a program; drop one")
    low, _, high = args.nodes.partition(":")
    nodes = _count("--nodes", low, least=1), _count("--nodes", high or low, least=1)
    if nodes[0] > nodes[1]:
        raise UsageError(f"--nodes {args.nodes}: the fewest nodes exceed the most; write A:B with A at most B")
    if nodes != (1, 1) and args.rendezvous is None:
        raise UsageError(f"--nodes {args.nodes}: several nodes need --rendezvous HOST:PORT, the same on each of them")
    if args.rendezvous is None and args.node_rank is not None:
        raise UsageError("--node-rank: it says which node hosts the rendezvous; give --rendezvous HOST:PORT too")
    if args.max_restarts < 0:
        raise UsageError(f"--max-restarts: got {args.max_restarts}; 0 (never start again) or more")
    if args.grace < 0:
        raise UsageError(f"--grace: got {args.grace:g} seconds; 0 (kill at once) or more")
    return LaunchPlan(
        kind="module" if args.module else "program" if args.no_python else "script",
        target=args.script, args=tuple(args.args),
        ranks=None if args.ranks == "auto" else _count("--ranks", args.ranks, least=1),
        nodes=nodes, rendezvous=_endpoint(args.rendezvous),
        hosts_rendezvous=None if args.node_rank is None else args.node_rank == 0,
        job=args.job, max_restarts=args.max_restarts, log_dir=args.log_dir, bind_cores=args.bind_cores, grace=args.grace)


def _count(option: str, text: str, *, least: int) -> int:
    if not text.isdecimal() or int(text) < least:
        auto = ", or auto" if option == "--ranks" else ""
        raise UsageError(f"{option}: got {text!r}; choose a whole number, {least} or more{auto}")
    return int(text)


def _endpoint(text: str | None) -> str | None:
    if text is None:
        return None
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise UsageError(f"--rendezvous: got {text!r}; write HOST:PORT, such as node0:29500")
    return text


def check_target(plan: LaunchPlan) -> None:
    """Raise `LaunchError` if what is to run is missing, or is no Python: once, not once for every rank."""
    if plan.kind == "program":
        if shutil.which(plan.target) is None:
            raise LaunchError(f"no program {plan.target!r} on the path or in {os.getcwd()}")
        return
    if plan.kind == "module":
        if not _is_module(plan.target):
            raise LaunchError(f"no module {plan.target!r} in {os.getcwd()} or among the installed packages")
        return
    path = Path(plan.target)
    if not path.exists():
        raise LaunchError(f"no script {plan.target!r} in {os.getcwd()}")
    if path.is_dir():
        if not (path / "__main__.py").exists():
            raise LaunchError(f"{plan.target!r} is a folder without a __main__.py; name a script in it")
        return
    if path.suffix == ".py":
        _check_syntax(path)


def _is_module(name: str) -> bool:
    """Look for the top package only: looking further would import it."""
    top = name.partition(".")[0]
    return importlib.machinery.PathFinder.find_spec(top, [os.getcwd(), *sys.path]) is not None


def _check_syntax(path: Path) -> None:
    try:
        compile(path.read_bytes(), str(path), "exec", dont_inherit=True)
    except SyntaxError as error:
        if error.lineno is None:
            raise LaunchError(f"{path} cannot be read as Python: {error.msg}") from None
        line, caret = (error.text or "").rstrip("\n"), " " * max(0, (error.offset or 1) - 1) + "^"
        raise LaunchError(f"{path}, line {error.lineno}: {error.msg}\n    {line}\n    {caret}") from None
    except (OSError, ValueError) as error:
        raise LaunchError(f"{path} cannot be read as Python: {error}") from None


def read_variables(pairs: list[str]) -> dict[str, str]:
    """Read `NAME=VALUE` pairs."""
    variables: dict[str, str] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not name or not equals:
            raise UsageError(f"--env: got {pair!r}; write NAME=VALUE")
        variables[name] = value
    return variables


def say(text: str) -> None:
    """Tell the person at the terminal, on stderr, in one piece."""
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()
