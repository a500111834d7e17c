"""The entry point of a rank process: bind it to its launcher and cores, then run the user's program as `__main__`.

The launcher executes this file by path. It imports the standard library only, and what its options ask for, so that a
rank imports nothing that the user's script does not need. An exception that ends the rank is written to an error file; the
launcher reports it once. A rank that failed runs its exit handlers and flushes its files, and leaves without the teardown of
the interpreter, which takes torch most of a second. A child that the script forks (`os.fork`) leaves so too, and Python
reports its error, if there is one: the rank goes on.
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import ctypes
import errno
import faulthandler
import functools
import gc
import importlib
import importlib.machinery
import io
import json
import os
import runpy
import signal
import socket
import sys
import time
import traceback
import types
import typing
from collections.abc import Generator
from dataclasses import asdict, dataclass
from typing import NoReturn

PR_SET_PDEATHSIG = 1
SPARE = "SHOAL_SPARE"
"""The environment variable that makes a process the spare of a node, and names the socket on which it gets its orders."""
DUMP_SIGNAL = signal.SIGRTMIN + 5
"""The signal at which a rank writes the stacks of its threads to a file, the error file's name with `STACKS`."""
STACKS = ".stacks"

THREADS_END = 5.0
"""Seconds for which a rank that failed waits for its threads before its exit handlers run; the other ranks wait for it."""
SAVES = "shoal-save"
"""How the names of threads begin that write a checkpoint: these have the whole grace period."""
GLOO_EXIT_DELAY = 0.1
"""Seconds at exit for gloo's threads to release their tensors, which takes microseconds once they are scheduled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankOptions:
    """The options of a rank; the launcher passes them as JSON in the first argument."""

    parent: int
    """Process id of the launcher."""
    kind: str
    """`script` (a path), `module` (as with `python -m`) or `program` (any executable)."""
    cores: tuple[tuple[int, ...], ...] = ()
    """The cores of each local rank; empty: ranks are not bound."""
    threads: tuple[int, ...] = ()
    """OMP_NUM_THREADS of each local rank, unless the environment sets it."""
    as_deepspeed: bool = False
    """Whether `import deepspeed` gives Shoal."""
    local_rank_argument: bool = False
    """Whether the first argument is `--local_rank=N`."""

    def __str__(self) -> str:
        return json.dumps(asdict(self), separators=(",", ":"))


def main(argv: list[str]) -> None:
    """Run `argv` = [this file, options, target, *arguments of the target]."""
    options, target, args = RankOptions(**json.loads(argv[1])), argv[2], argv[3:]
    die_with(options.parent)
    bind_to_cores(options, int(os.environ["LOCAL_RANK"]))
    if SPARE in os.environ:
        serve_as_spare(socket.socket(fileno=int(os.environ[SPARE])), options)
    if options.local_rank_argument:
        args = [f"--local_rank={os.environ['LOCAL_RANK']}", *args]
    if options.kind == "program":
        try:
            os.execvp(target, [target, *args])
        except OSError as error:  # as of a script without its first line, `#!` and an interpreter
            sys.stderr.write(f"shoal run: {target!r} cannot be executed: {error.strerror}"
                             f"{'; a script begins with #!, such as #!/bin/sh' if error.errno == errno.ENOEXEC else ''}\n")
            os._exit(126)
    path = os.environ.get("TORCHELASTIC_ERROR_FILE", "")
    process, last = os.getpid(), LastExit(path)
    atexit.register(last)  # handlers run in reverse order, so this is the last one
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True, write_through=False)  # whole lines: ranks share the stream
    if path and not faulthandler.is_enabled():
        faulthandler.enable(_file_until_exit(f"{path}.fault"))
    if path:
        signal.signal(DUMP_SIGNAL, signal.SIG_IGN)  # which faulthandler restores at exit: else the signal would kill
        faulthandler.register(DUMP_SIGNAL, _file_until_exit(f"{path}{STACKS}"))
    atexit.register(destroy_gloo_groups)
    os.register_at_fork(after_in_child=functools.partial(atexit.unregister, destroy_gloo_groups))
    try:
        if options.as_deepspeed:
            from shoal.compat import install

            install()
        try:
            execute(options.kind, target, args)
        finally:
            if os.getpid() == process:
                end_training_phase()
            else:  # a child that the script has forked; the teardown would wait for threads of gloo that it does not have
                last.code = 0
    except BaseException as error:
        if os.getpid() != process:  # the rank goes on: Python reports the error
            last.code = _code_of(error)
            raise
        _end_with(error, path, last)


def _end_with(error: BaseException, path: str, last: LastExit) -> NoReturn:
    """End a rank whose script has raised `error`, as Python does, but leave the traceback to the launcher."""
    code = _code_of(error)
    if isinstance(error, SystemExit):
        if code:
            last.code = code
            with _handlers_silenced():
                record(path, error, "", summary=f"sys.exit({error.code!r})")
            _limit_wait_for_threads()
        raise error
    last.code = code
    _end(path, error, code)


def _limit_wait_for_threads() -> None:
    """Have Python, which waits for threads that are no daemons before exit handlers, wait for `THREADS_END` seconds only.

    A signal handler that raises ends that wait, and Python goes on with the exit handlers.
    """
    threading = sys.modules.get("threading")
    if threading is None or not _running_threads(threading):
        return
    hook = sys.unraisablehook

    def interrupt(number: int, frame: types.FrameType | None) -> None:
        running = _running_threads(threading)
        if any(name.startswith(SAVES) for name in running):
            signal.setitimer(signal.ITIMER_REAL, 0.1)
            return
        sys.stderr.write(f"shoal run: rank {os.environ.get('RANK')} has failed, and leaves though {THREADS_END:g} s later "
                         f"its threads still run: {', '.join(running)}. "
                         "End them when training fails, or make them daemons\n")
        sys.unraisablehook = _ignore  # which would show the error
        raise TimeoutError

    def begin_handlers() -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)
        sys.unraisablehook = hook

    atexit.register(begin_handlers)  # the first one that runs
    signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, THREADS_END)


def _running_threads(threading: types.ModuleType) -> list[str]:
    """Return the names of the threads for which Python waits at its exit."""
    return [thread.name for thread in threading.enumerate() if not thread.daemon and thread is not threading.main_thread()]


def _ignore(_: object) -> None:
    """Show nothing."""


def _code_of(error: BaseException) -> int:
    """Return the exit code of a process that raised `error`.

    The system keeps 8 bits of a code: one that is 0 then is success, for the launcher and everybody else.
    """
    if isinstance(error, SystemExit):
        return 0 if error.code is None else error.code & 0xFF if isinstance(error.code, int) else 1
    return 128 + signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1


class LastExit:
    """The last exit handler of a rank: once a `code` is set, it flushes what is open, and ends the process with it.

    A save that failed after the script had its last chance to learn of it sets the code to 1, and is the rank's error.
    """

    def __init__(self, path: str) -> None:
        """Report in the error file `path`."""
        self.code: int | None = None
        self._path = path

    def __call__(self) -> None:
        saves = sys.modules.get("shoal.checkpoint.unreported")
        if self.code is None and saves is not None and (failure := saves.failure()) is not None:
            self.code = 1
            with _handlers_silenced():
                record(self._path, failure, "")
        if self.code is None:
            return
        for each in gc.get_objects():
            # by its type: isinstance would ask proxies for their class, which some answer with a warning
            if issubclass(type(each), (io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom)):
                with contextlib.suppress(Exception):
                    each.flush()
        os._exit(self.code)


def _file_until_exit(path: str) -> int:
    """Return the descriptor of a new file: of one that is never closed, a file object would warn at the exit."""
    return os.open(path, os.O_CREAT | os.O_TRUNC | os.O_WRONLY, 0o600)


def die_with(parent: int) -> None:
    """Ask the kernel to kill this process when process `parent` ends for any reason (prctl PR_SET_PDEATHSIG)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent:  # the parent ended before the prctl call
        os._exit(128 + signal.SIGKILL)


def bind_to_cores(options: RankOptions, local_rank: int) -> None:
    """Bind this rank and its children to its cores, and set one compute thread per core."""
    if options.cores:
        os.sched_setaffinity(0, options.cores[local_rank])
    if options.threads:
        os.environ.setdefault("OMP_NUM_THREADS", str(options.threads[local_rank]))
    torch = sys.modules.get("torch")
    if torch is not None and os.environ.get("OMP_NUM_THREADS", "").isdecimal():  # which torch has read in the spare
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))


def serve_as_spare(agent: socket.socket, options: RankOptions) -> None:
    """Import what a program of Shoal imports, then fork a rank for each order of the agent; return in these ranks.

    What cannot be imported is left to the program, which then fails as it would have. The spare ends with its agent. An
    order is a line of JSON. A rank is forked twice, so that the kernel makes it a child of the agent, which is the
    subreaper of its descendants; then it answers with its process id.
    """
    with contextlib.suppress(Exception):
        for name in ("torch.distributed", "shoal.engine.build"):
            importlib.import_module(name)
    gc.collect()
    gc.freeze()  # the pages of these objects stay shared with the ranks
    atexit.register(gc.unfreeze)  # at the end of a rank: else libraries report them as leaked
    for line in agent.makefile("rb"):
        child = os.fork()
        if child:
            os.waitpid(child, 0)
            continue
        if os.fork():
            os._exit(0)
        _begin_as_rank(json.loads(line), options)
        agent.sendall(f"{os.getpid()}\n".encode())
        agent.close()
        return
    os._exit(0)


def _begin_as_rank(order: dict[str, typing.Any], options: RankOptions) -> None:
    """Become a rank: a session and a child of the agent, with the environment and the streams of an attempt."""
    os.setsid()
    deadline = time.monotonic() + 10
    while os.getppid() != options.parent and time.monotonic() < deadline:
        time.sleep(0.001)
    die_with(options.parent)
    os.environ.clear()
    os.environ.update(order["variables"])
    bind_to_cores(options, int(os.environ["LOCAL_RANK"]))
    if "numpy" in sys.modules:  # Python's generator is seeded at the fork
        sys.modules["numpy"].random.seed()
    if "torch" in sys.modules:  # those of devices begin with one seed in every process
        sys.modules["torch"].default_generator.seed()
    for stream, path in ((1, order["stdout"]), (2, order["stderr"])):
        if path is not None:
            opened = os.open(path, os.O_WRONLY)
            os.dup2(opened, stream)
            os.close(opened)


def execute(kind: str, target: str, args: list[str]) -> None:
    """Run a script or a module as `__main__`, with the `sys.argv` and `sys.path` that Python sets."""
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


def end_training_phase() -> None:
    """Tell the agent that the script has ended: the exit of the process has no deadline of a training's call."""
    module = sys.modules.get("shoal.recording.page")
    if module is not None:
        module.page.enter(module.TrainingPhase.END)


def destroy_gloo_groups() -> None:
    """Destroy gloo's process groups if the script has not. Otherwise their threads sometimes abort the process at exit.

    A group that the script still references keeps its threads. A thread needs the interpreter to release the last tensor
    that it sent, and aborts the process if the interpreter has exited. The delay gives the threads time to do so.
    """
    if "torch" not in sys.modules:  # a Ctrl-C while it is imported removes it, but not its parts
        return
    dist = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_initialized() and dist.get_backend() == "gloo":
        dist.destroy_process_group()
        time.sleep(GLOO_EXIT_DELAY)


def record(path: str, error: BaseException, text: str, summary: str = "") -> None:
    """Write the error that ended this rank in torch's error file format, with the exact time and the exception classes.

    Where there is no room for the file, the text goes to stderr, for the launcher cannot show it.
    """
    if not path:
        return
    now = time.time()
    summary = summary or type(error).__name__ + (f": {said}" if (said := _message_of(error)) else "")
    content = {"message": {"message": summary, "extraInfo": {"py_callstack": text, "timestamp": str(int(now))}},
               "time": now, "kinds": [f"{kind.__module__}.{kind.__qualname__}" for kind in type(error).__mro__]}
    try:
        with open(f"{path}.part", "w") as file:
            json.dump(content, file)
        os.replace(f"{path}.part", path)
    except OSError as failure:
        sys.stderr.write(f"{text}shoal run: this error cannot be written in {os.path.dirname(path)}, where the launcher "
                         f"would read it: {failure.strerror}; make room there\n")


def _message_of(error: BaseException) -> str:
    """Return the message of an error; that of a class whose `str` fails is what a traceback shows for it."""
    try:
        return str(error)
    except Exception:
        return "<exception str() failed>"


@contextlib.contextmanager
def _handlers_silenced() -> Generator[None]:
    """Have Python's signal handlers do nothing: one that raises, as a loader's for a dead worker, would hide the error."""
    found = {number: signal.getsignal(number) for number in signal.valid_signals() - {signal.SIGINT}}
    handlers = {number: handler for number, handler in found.items() if callable(handler)}
    try:
        for number in handlers:
            signal.signal(number, _do_nothing)
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _do_nothing(number: int, frame: types.FrameType | None) -> None:
    """Handle a signal."""


def _end(path: str, error: BaseException, code: int) -> NoReturn:
    """Exit as Python does after an uncaught exception, but leave the traceback to the launcher."""
    start = error.__traceback__
    while start is not None and start.tb_next is not None and start.tb_frame.f_code.co_filename in (
            __file__, runpy.__file__, "<frozen runpy>"):
        start = start.tb_next
    with _handlers_silenced():
        text = "".join(traceback.format_exception(type(error), error, start))
        record(path, error, text)
    if not path:
        sys.stderr.write(text)
    elif sys.excepthook is not sys.__excepthook__ and not sys.excepthook.__module__.startswith("torch.distributed"):
        sys.excepthook(type(error), error, start)  # the user's hook; torch's hook only prints
    _limit_wait_for_threads()
    sys.exit(code)


if __name__ == "__main__":
    main(sys.argv)
