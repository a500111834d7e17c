"""`shoal run` starts a script on several ranks of one or more nodes, monitors them, and ends all of their processes.

All user input is checked here, before torch is imported and before any process starts.
"""

from __future__ import annotations

import argparse
import os
import re
import secrets
import shlex
import shutil
import socket
import tempfile

from shoal.errors import LaunchError, UsageError
from shoal.launch import cluster, selection
from shoal.launch.console import Terminal, check_log_dir, counted
from shoal.launch.cores import check_usable, parse_cpu_list, restrict
from shoal.launch.launch_plan import MODES, LaunchPlan, add_program, check_target, page_of_killed
from shoal.launch.orphans import MARK, Guardian, exit_on_signals, memory_folder, open_streams, signals_held

__all__ = ["add_arguments", "main"]

OF_RANKS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK",
            "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""Variables that torch's agent sets for each rank, whatever the environment holds."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `shoal run`."""
    parser.add_argument("--ranks", default="auto", metavar="N",
                        help="ranks on this node; auto (default): one per GPU, else half the cores")
    parser.add_argument("--nodes", metavar="A[:B]",
                        help="number of nodes: exactly A, or A to B; of a hostfile the first A or B (default: all), "
                             "and with A:B the job goes on while A are left")
    parser.add_argument("--rendezvous", metavar="HOST:PORT", help="address of the rendezvous; the same on every node")
    parser.add_argument("--node-rank", type=int, metavar="R",
                        help="0: this node hosts the rendezvous; other: it does not (default: decided by HOST)")
    parser.add_argument("--job", default="shoal", help="name of the job, if several jobs share one rendezvous")
    parser.add_argument("--max-restarts", type=int, default=0, metavar="K",
                        help="restart all ranks up to K times when one fails")
    parser.add_argument("--watch", choices=MODES, default="auto",
                        help="what happens to a rank that is stopped or hung: restart (it is killed, like one that "
                             "crashed), report, off; auto (default): restart where --max-restarts allows it, else report")
    parser.add_argument("--spares", action=argparse.BooleanOptionalAction, default=None,
                        help="keep an interpreter ready that forks the ranks of a restart (default: with --max-restarts)")
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
    parser.add_argument("--core-list", metavar="LIST", help="the cores that the ranks of a node share, such as 0-7,16")
    parser.add_argument("--dry-run", action="store_true", help="show what would start, and whether it could")
    parser.add_argument("--env", action="append", default=[], metavar="NAME=VALUE", help="set a variable for all ranks")
    parser.add_argument("--grace", type=float, default=30.0, metavar="SECONDS",
                        help="time to finish after Ctrl-C or SIGTERM before ranks are killed (default 30)")
    selection.add_arguments(parser)
    add_program(parser)


def main(args: argparse.Namespace) -> int:
    """Run the ranks to completion; return 0, the exit code of the rank that failed first, or 128 + signal number."""
    open_streams()
    exit_on_signals()
    plan = read_plan(args)
    if selection.asks_for_hosts(args):
        return _run_on_hosts(args, plan)
    selection.refuse_without_hosts(args)
    check_target(plan)
    variables = read_variables(args.env)
    if args.dry_run:
        check_usable(plan.core_list)
        check_log_dir(plan.log_dir)
        ranks = "as many ranks as fit" if plan.ranks is None else counted(plan.ranks, "rank")
        where = "1 host" if plan.rendezvous is None else f"this node of {args.nodes or 1}, rendezvous {plan.rendezvous}"
        print(f"{where}, {ranks}\neach rank runs: {_program(plan)}")
        return 0
    with Terminal(plan.log_dir) as terminal:
        return _run_here(plan, variables, terminal)


def _run_here(plan: LaunchPlan, variables: dict[str, str], terminal: Terminal) -> int:
    mark = f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"
    folder = tempfile.mkdtemp(prefix="shoal-run-")
    try:
        with Guardian(mark, folder, page_of_killed(plan, mark)) as guardian:  # before any thread starts
            os.environ.update({**variables, MARK: mark})
            restrict(plan.core_list)
            with signals_held():
                from shoal.launch.agent import launch  # imports torch, which may start threads, so after the guardian's fork

            return launch(plan, guardian, terminal)
    finally:
        for each in (folder, memory_folder(mark)):
            shutil.rmtree(each, ignore_errors=True)


def _run_on_hosts(args: argparse.Namespace, plan: LaunchPlan) -> int:
    if plan.nodes[0] != plan.nodes[1] and not plan.max_restarts:
        raise UsageError(f"--nodes {args.nodes}: to go on with fewer hosts is a restart, and none is allowed; give "
                         "--max-restarts K, or one number of nodes")
    chosen = selection.select(args, nodes=None if args.nodes is None else plan.nodes, ranks=plan.ranks,
                              variables=read_variables(args.env))
    if args.dry_run:
        check_log_dir(plan.log_dir)
        print(chosen.describe(_program(plan)))
        if problems := chosen.problems(plan):
            raise LaunchError("\n".join(problems))
        return 0
    with Terminal(plan.log_dir) as terminal, chosen.cluster(plan, terminal.status) as started:
        return cluster.run_job(started, terminal, plan.grace)


def _program(plan: LaunchPlan) -> str:
    words = {"script": ["python", plan.target], "module": ["python", "-m", plan.target], "program": [plan.target]}[plan.kind]
    return shlex.join([*words, *plan.args])


def read_plan(args: argparse.Namespace) -> LaunchPlan:
    """Convert parsed arguments to a plan. Raises `UsageError` for invalid values and combinations."""
    if args.module and args.no_python:
        raise UsageError("--module and --no-python: SCRIPT cannot be both a Python module and a program; drop one")
    hosts = selection.asks_for_hosts(args)
    low, _, high = (args.nodes or "1").partition(":")
    nodes = _count("--nodes", low, least=1), _count("--nodes", high or low, least=1)
    if nodes[0] > nodes[1]:
        raise UsageError(f"--nodes {args.nodes}: the minimum exceeds the maximum; write A:B with A at most B")
    if nodes != (1, 1) and args.rendezvous is None and not hosts:
        raise UsageError(f"--nodes {args.nodes}: several nodes need --rendezvous HOST:PORT, the same on each of them, or "
                         "--hostfile FILE to start them from here")
    if args.rendezvous is None and args.node_rank is not None and not hosts:
        raise UsageError("--node-rank: it selects the node that hosts the rendezvous; give --rendezvous HOST:PORT too")
    if args.as_deepspeed and args.no_python:
        raise UsageError("--as-deepspeed and --no-python: a program that is not started as Python cannot be given the name; "
                         "install the wheel of `make deepspeed-wheel`, and drop --as-deepspeed")
    if hosts and args.node_rank is not None:
        raise UsageError("--node-rank: the order of the hosts gives each its number; drop it")
    if hosts and args.port:
        raise UsageError("--port: it is that of a single node; with several, give --rendezvous HOST:PORT")
    if args.core_list is not None and re.fullmatch(r"\d{1,5}(-\d{1,5})?(,\d{1,5}(-\d{1,5})?)*", args.core_list) is None:
        raise UsageError(f"--core-list: got {args.core_list!r}; write numbers below 100000 and ranges, such as 0-7,16")
    core_list = tuple(parse_cpu_list(args.core_list or ""))
    if args.core_list is not None and not core_list:
        raise UsageError(f"--core-list: got {args.core_list!r}, which is no core; write the smaller number of a range first")
    if args.port and args.rendezvous is not None:
        raise UsageError("--port and --rendezvous: the rendezvous has a port of its own; drop --port")
    if not 0 <= args.port <= 65535:
        raise UsageError(f"--port: got {args.port}; choose 1 to 65535, or 0 for a free one")
    if not args.job:
        raise UsageError("--job: got an empty name; give one, the same on each node")
    if args.max_restarts < 0:
        raise UsageError(f"--max-restarts: got {args.max_restarts}; choose 0 (never restart) or more")
    if args.watch == "restart" and not args.max_restarts:
        raise UsageError("--watch restart: no restart is allowed; give --max-restarts K, or --watch report")
    if args.spares and (args.no_python or not args.max_restarts):
        raise UsageError("--spares: they wait to restart Python programs; give --max-restarts K, and drop --no-python")
    if not 0 <= args.grace <= selection.MOST_SECONDS:
        raise UsageError(f"--grace: got {args.grace:g} seconds; choose 0 (kill at once) or more, up to "
                         f"{selection.MOST_SECONDS:g}")
    return LaunchPlan(
        kind="module" if args.module else "program" if args.no_python else "script",
        target=args.script, args=tuple(args.args),
        ranks=None if args.ranks == "auto" else _count("--ranks", args.ranks, least=1),
        nodes=nodes, rendezvous=_endpoint(args.rendezvous, bare=hosts),
        hosts_rendezvous=None if args.node_rank is None else args.node_rank == 0,
        job=args.job, max_restarts=args.max_restarts, log_dir=args.log_dir, bind_cores=args.bind_cores, grace=args.grace,
        as_deepspeed=args.as_deepspeed, local_rank_argument=args.local_rank_argument, port=args.port,
        core_list=core_list,
        watch=args.watch, spares=args.max_restarts > 0 if args.spares is None else args.spares)


_DIGITS = 9
"""The most digits of a number of ranks, nodes or restarts."""


def _count(option: str, text: str, *, least: int) -> int:
    if len(text) > _DIGITS:
        raise UsageError(f"{option}: got {text[:_DIGITS]!r}...; choose a whole number of at most {_DIGITS} digits")
    if not text.isdecimal() or int(text) < least:
        auto = ", or auto" if option == "--ranks" else ""
        raise UsageError(f"{option}: got {text!r}; choose a whole number, {least} or more{auto}")
    return int(text)


def _endpoint(text: str | None, *, bare: bool) -> str | None:
    """Check `HOST:PORT`; `bare` allows `:PORT`, where the address of the first host is found, and 0 for a free port."""
    if text is None:
        return None
    host, _, port = text.rpartition(":")
    if not (host or bare) or not port.isdecimal() or len(port) > _DIGITS or not (0 if bare else 1) <= int(port) <= 65535:
        raise UsageError(f"--rendezvous: got {text!r}; write HOST:PORT, such as node0:29500")
    return text


def read_variables(pairs: list[str]) -> dict[str, str]:
    """Parse `NAME=VALUE` pairs. Raises `UsageError` for a malformed pair."""
    variables: dict[str, str] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not name or not equals:
            raise UsageError(f"--env: got {pair!r}; write NAME=VALUE")
        if name in OF_RANKS:
            raise UsageError(f"--env {pair}: the launcher sets {name} for each rank; drop it, or choose the address by "
                             f"--rendezvous HOST:PORT, on one host by --port PORT")
        variables[name] = value
    return variables
