"""One rank: tie it to its launcher and its cores, then run the user's program as if python had been called on it.

This file is executed by path, before anything of the user's, and imports the standard library only: what the script does
not import, a rank does not pay for. What ends the rank is written down for the launcher, which shows it once.
"""

from __future__ import annotations

import atexit
import builtins
import ctypes
import faulthandler
import importlib.machinery
import io
import json
import os
import runpy
import signal
import sys
import time
import traceback
import types
from dataclasses import asdict, dataclass
from typing import NoReturn

PR_SET_PDEATHSIG = 1

GRACE = 0.1
"""Seconds at exit in which gloo's threads let go of tensors; it takes them microseconds once they run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What a launcher asks of a rank; it travels as JSON in the rank's first argument."""

    parent: int
    """Process id of the launcher."""
    kind: str
    """`script` (a path), `module` (as with `python -m`) or `program` (any executable)."""
    cores: tuple[tuple[int, ...], ...] = ()
    """The cores of each local rank; empty: leave the rank where it is."""
    threads: tuple[int, ...] = ()
    """OMP_NUM_THREADS of each local rank, unless the environment sets it."""

    def __str__(self) -> str:
        return json.dumps(asdict(self), separators=(",", ":"))


def main(argv: list[str]) -> None:
    """Run `argv` = [this file, order, target, *arguments of the target]."""
    order, target, args = Order(**json.loads(argv[1])), argv[2], argv[3:]
    die_with(order.parent)
    settle(order, int(os.environ["LOCAL_RANK"]))
    if order.kind == "program":
        os.execvp(target, [target, *args])
    path = os.environ.get("TORCHELASTIC_ERROR_FILE", "")
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True, write_through=False)  # live, and whole lines where ranks share it
    faults = open(f"{path}.fault", "w") if path and not faulthandler.is_enabled() else None  # noqa: SIM115  lives as long
    if faults:
        faulthandler.enable(faults)
    atexit.register(leave)
    try:
        execute(order.kind, target, args)
    except SystemExit as end:
        if end.code not in (None, 0):
            record(path, end, "", summary=f"sys.exit({end.code!r})")
        raise
    except BaseException as error:
        _end(path, error)


def die_with(parent: int) -> None:
    """Have the kernel kill this process when process `parent` ends, however that ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent:  # it ended before the kernel was asked
        os._exit(128 + signal.SIGKILL)


def settle(order: Order, local_rank: int) -> None:
    """Keep this rank, and all that it starts, on its own cores, with as many threads as it has cores."""
    if order.cores:
        os.sched_setaffinity(0, order.cores[local_rank])
    if order.threads:
        os.environ.setdefault("OMP_NUM_THREADS", str(order.threads[local_rank]))


def execute(kind: str, target: str, args: list[str]) -> None:
    """Run a script or a module as `__main__`, with the `sys.argv` and `sys.path` that python would give it."""
    sys.argv = [target, *args]
    if kind == "module":
        sys.path.insert(0, os.getcwd())
        runpy.run_module(target, run_name="__main__", alter_sys=True)
    elif os.path.isdir(target) or target.endswith((".zip", ".pyz")):
        runpy.run_path(target, run_name="__main__")
    else:
        sys.path.insert(0, os.path.dirname(os.path.realpath(target)))
        path = os.path.abspath(target)
        module = types.ModuleType("__main__")
        module.__file__ = path
        module.__loader__ = importlib.machinery.SourceFileLoader("__main__", path)
        module.__dict__["__builtins__"] = builtins
        sys.modules["__main__"] = module
        with open(target, "rb") as file:
            source = file.read()
        exec(compile(source, path, "exec", dont_inherit=True), module.__dict__)


def leave() -> None:
    """Leave gloo's process groups, if the script has not: at exit their threads now and then abort the process instead.

    Groups that the script still holds keep their threads, which need the interpreter to let go of the last tensor that
    travelled, and abort when it is gone: they get time for that.
    """
    if "torch.distributed" in sys.modules:
        import torch.distributed as dist

        if dist.is_initialized() and dist.get_backend() == "gloo":
            dist.destroy_process_group()
            time.sleep(GRACE)


def record(path: str, error: BaseException, text: str, summary: str = "") -> None:
    """Write down what ended this rank, in torch's error file format, with the exact time and the kind of error added."""
    if not path:
        return
    now = time.time()
    summary = summary or (f"{type(error).__name__}: {error}" if str(error) else type(error).__name__)
    fact = {"message": {"message": summary, "extraInfo": {"py_callstack": text, "timestamp": str(int(now))}},
            "time": now, "kinds": [f"{kind.__module__}.{kind.__qualname__}" for kind in type(error).__mro__]}
    with open(f"{path}.part", "w") as file:
        json.dump(fact, file)
    os.replace(f"{path}.part", path)


def _end(path: str, error: BaseException) -> NoReturn:
    """End as python does after an uncaught error, but leave its traceback to the launcher."""
    start = error.__traceback__
    while start is not None and start.tb_next is not None and start.tb_frame.f_code.co_filename in (
            __file__, runpy.__file__, "<frozen runpy>"):
        start = start.tb_next
    text = "".join(traceback.format_exception(type(error), error, start))
    record(path, error, text)
    if not path:
        sys.stderr.write(text)
    elif sys.excepthook is not sys.__excepthook__ and not sys.excepthook.__module__.startswith("torch.distributed"):
        sys.excepthook(type(error), error, start)  # the user's own; torch's would only print
    sys.exit(128 + signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1)


if __name__ == "__main__":
    main(sys.argv)
