"""The options of one launch on a node, and the check of its program before any process starts."""

from __future__ import annotations

import argparse
import importlib.machinery
import os
import shlex
import shutil
import socket
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal.errors import LaunchError

__all__ = ["MODES", "LaunchPlan", "add_program", "check_target", "page_of_killed"]

MODES = ("auto", "restart", "report", "off")
"""The fates of a rank that is stopped or hung; `auto` is `restart` where restarts are allowed, else `report`."""


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
    watch: str = "off"
    """One of `MODES`."""
    spares: bool = False
    """Whether an interpreter waits that forks the ranks of a restart."""
    core_list: tuple[int, ...] = ()
    """The cores that the ranks of a node share; empty: all that this process may use."""


def page_of_killed(plan: LaunchPlan | None, mark: str) -> Callable[[], None]:
    """Return what a guardian calls where this process, of the launch `mark`, is killed: it leaves a page beside the logs."""
    killed = f"the process {os.getpid()} of `shoal run` on {socket.gethostname()} was killed, and its ranks ended with it"

    def leave() -> None:
        if plan is not None and plan.log_dir is not None:
            from shoal.launch.doctor import leave_page  # here: it loads torch, which a launch does later

            leave_page(plan.log_dir, mark, killed)

    return leave


def add_program(parser: argparse.ArgumentParser) -> None:
    """Declare SCRIPT and what follows it, as `script` and `args`."""
    parser.add_argument("script", nargs=argparse.PARSER, action=_Program, metavar="SCRIPT",
                        help="the program; what follows it is passed to it unchanged")


class _Program(argparse.Action):
    """Takes SCRIPT and its arguments as one list: of two lists argparse would drop a `--` between them."""

    def __call__(self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: str | Sequence[Any] | None,
                 option_string: str | None = None) -> None:
        words = list(values or ())
        namespace.script, *namespace.args = words[words[0] == "--":]


def check_target(plan: LaunchPlan) -> None:
    """Raise `LaunchError` if the target is missing or is not valid Python, so that the error appears once, not per rank."""
    if plan.kind == "program":
        if os.path.isfile(plan.target) and not os.access(plan.target, os.X_OK) and shutil.which(plan.target) is None:
            raise LaunchError(f"{plan.target!r} may not be executed; run `chmod +x {shlex.quote(plan.target)}`, or leave "
                              "--no-python out where it is a Python script")
        if shutil.which(plan.target) is None:
            raise LaunchError(f"no program {plan.target!r} on the path or in {os.getcwd()}; install it, or give its path")
        return
    if plan.kind == "module":
        if not _is_module(plan.target):
            raise LaunchError(f"no module {plan.target!r} in {os.getcwd()} or among the installed packages; install it, "
                              "or start in its folder")
        return
    path = Path(plan.target)
    if not path.exists():
        raise LaunchError(f"no script {plan.target!r} in {os.getcwd()}; correct its path; options of `shoal run` stand "
                          "before SCRIPT")
    if path.is_dir():
        if not (path / "__main__.py").exists():
            raise LaunchError(f"{plan.target!r} is a folder without a __main__.py; name a script in it")
        return
    if not path.is_file():
        raise LaunchError(f"{plan.target!r} is no regular file, and can be read once, by one rank; give the path of a file")
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
