"""`shoal run` starts a script on several ranks of one or more nodes, monitors them, and ends all of their processes.

All user input is checked here, before torch is imported and before any process starts.
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
    """The options of one launch."""

    kind: str
    """`script`, `module` or `program`."""
    target: str
    args: tuple[str, ...]
    ranks: int | None
    """Ranks on this node; None: one per GPU, or half the number of cores."""
    nodes: tuple[int, int]
    """The minimum and maximum number of nodes."""
    rendezvous: str | None
    """`host:port` of the rendezvous; None: this node only."""
    hosts_rendezvous: bool | None
    """Whether this node hosts the rendezvous; None: decided by the address."""
    job: str
    """The name that identifies the job at the rendezvous."""
    max_restarts: int
    log_dir: str | None
    bind_cores: bool
    grace: float
    """Seconds that ranks have to finish after a signal, before SIGKILL."""
    as_deepspeed: bool = False
    """Whether `import deepspeed` gives Shoal in the ranks."""
    local_rank_argument: bool = False
    """Whether the first argument of each rank is `--local_rank=N`."""
    port: int = 0
    """The port of the ranks' store on a single node; 0: the system chooses."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `shoal run`."""
    parser.add_argument("--ranks", default="auto", metavar="N",
                        help="ranks on this node; auto (default): one per GPU, else half the cores")
    parser.add_argument("--nodes", default="1", metavar="A[:B]", help="number of nodes: exactly A, or A to B")
    parser.add_argument("--rendezvous", metavar="HOST:PORT", help="address of the rendezvous; the same on every node")
    parser.add_argument("--node-rank", type=int, metavar="R",
                        help="0: this node hosts the rendezvous; other: it does not (default: decided by HOST)")
    parser.add_argument("--job", default="shoal", help="name of the job, if several jobs share one rendezvous")
    parser.add_argument("--max-restarts", type=int, default=0, metavar="K",
                        help="restart all ranks up to K times when one fails")
    parser.add_argument("-m", "--module", action="store_true", help="SCRIPT is a module, as with `python -m`")
    parser.add_argument("--no-python", action="store_true", help="SCRIPT is a program, not Python")
    parser.add_argument("--log-dir", metavar="DIR", help="also write the output of each rank to files in DIR")
    parser.add_argument("--bind-cores", action=argparse.BooleanOptionalAction, default=True,
                        help="bind each rank to its own share of the cores")
    parser.add_argument("--as-deepspeed", action="store_true",
                        help="`import deepspeed` in SCRIPT gives Shoal under that name")
    parser.add_argument("--local-rank-argument", action="store_true",
                        help="pass --local_rank=N to each rank as its first argument, as older launchers do")
    parser.add_argument("--port", type=int, default=0, metavar="PORT",
                        help="MASTER_PORT on a single node (default: a free one)")
    parser.add_argument("--env", action="append", default=[], metavar="NAME=VALUE", help="set a variable for all ranks")
    parser.add_argument("--grace", type=float, default=30.0, metavar="SECONDS",
                        help="time to finish after Ctrl-C or SIGTERM before ranks are killed (default 30)")
    parser.add_argument("script", metavar="SCRIPT")
    parser.add_argument("args", nargs=argparse.REMAINDER, metavar="ARGS", help="passed to the script unchanged")


def main(args: argparse.Namespace) -> int:
    """Run the ranks to completion; return 0, the exit code of the rank that failed first, or 128 + signal number."""
    plan = read_plan(args)
    check_target(plan)
    variables = read_variables(args.env)
    mark = f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"
    folder = tempfile.mkdtemp(prefix="shoal-run-")
    signal.signal(signal.SIGTERM, _exit_on_signal)
    try:
        with Guardian(mark, folder):
            os.environ.update({**variables, MARK: mark})
            from shoal.launch.agent import launch  # imports torch, which may start threads, so after the guardian's fork

            return launch(plan, mark, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _exit_on_signal(number: int, frame: object) -> None:
    raise SystemExit(128 + number)


def read_plan(args: argparse.Namespace) -> LaunchPlan:
    """Convert parsed arguments to a plan. Raises `UsageError` for invalid values and combinations."""
    if args.module and args.no_python:
        raise UsageError("--module and --no-python: SCRIPT cannot be both a Python module and a program; drop one")
    low, _, high = args.nodes.partition(":")
    nodes = _count("--nodes", low, least=1), _count("--nodes", high or low, least=1)
    if nodes[0] > nodes[1]:
        raise UsageError(f"--nodes {args.nodes}: the minimum exceeds the maximum; write A:B with A at most B")
    if nodes != (1, 1) and args.rendezvous is None:
        raise UsageError(f"--nodes {args.nodes}: several nodes need --rendezvous HOST:PORT, the same on each of them")
    if args.rendezvous is None and args.node_rank is not None:
        raise UsageError("--node-rank: it selects the node that hosts the rendezvous; give --rendezvous HOST:PORT too")
    if args.as_deepspeed and args.no_python:
        raise UsageError("--as-deepspeed and --no-python: a program that is not started as Python cannot be given the name; "
                         "install the wheel of `make deepspeed-wheel`, and drop --as-deepspeed")
    if args.port and args.rendezvous is not None:
        raise UsageError("--port and --rendezvous: the rendezvous has a port of its own; drop --port")
    if not 0 <= args.port <= 65535:
        raise UsageError(f"--port: got {args.port}; choose 1 to 65535, or 0 for a free one")
    if args.max_restarts < 0:
        raise UsageError(f"--max-restarts: got {args.max_restarts}; choose 0 (never restart) or more")
    if args.grace < 0:
        raise UsageError(f"--grace: got {args.grace:g} seconds; choose 0 (kill at once) or more")
    return LaunchPlan(
        kind="module" if args.module else "program" if args.no_python else "script",
        target=args.script, args=tuple(args.args),
        ranks=None if args.ranks == "auto" else _count("--ranks", args.ranks, least=1),
        nodes=nodes, rendezvous=_endpoint(args.rendezvous),
        hosts_rendezvous=None if args.node_rank is None else args.node_rank == 0,
        job=args.job, max_restarts=args.max_restarts, log_dir=args.log_dir, bind_cores=args.bind_cores, grace=args.grace,
        as_deepspeed=args.as_deepspeed, local_rank_argument=args.local_rank_argument, port=args.port)


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
    """Raise `LaunchError` if the target is missing or is not valid Python, so that the error appears once, not per rank."""
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
    """Look up the top-level package only, because a lookup of a submodule imports its parent."""
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
    """Parse `NAME=VALUE` pairs. Raises `UsageError` for a malformed pair."""
    variables: dict[str, str] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not name or not equals:
            raise UsageError(f"--env: got {pair!r}; write NAME=VALUE")
        variables[name] = value
    return variables


def print_status(text: str) -> None:
    """Write one message to stderr in a single write."""
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()
