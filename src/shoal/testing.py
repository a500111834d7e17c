"""Run a function on several real ranks of this machine, quickly.

The ranks are processes of a fork server that has loaded torch, joined by gloo through a file store, so that no port is
opened. After the first call, which starts the server, a trivial job of four ranks takes less than a tenth of a second.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import io
import multiprocessing
import multiprocessing.connection
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Generator
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Any, Generic, ParamSpec, TypeVar

import torch
import torch.distributed as dist

from shoal.device import on_accelerator

__all__ = ["RankFailed", "ranks_on", "run_ranks"]

_PRELOAD = ("torch", "torch.distributed", "torch.distributed.tensor", "torch.utils.checkpoint", "torch._dynamo",
            "shoal.testing", "shoal.engine.build")
"""Modules that the fork server imports for all ranks. (A process's first optimizer imports torch._dynamo: two seconds.)"""

_IF_LOADED = ("pytest", "hypothesis", "transformers")
"""Modules that the fork server imports too, if the calling process has imported them."""

_STACKS_SIGNAL = signal.SIGUSR2
_STACKS_SECONDS = 1.0  # for a rank to write its stacks

P = ParamSpec("P")
T = TypeVar("T")


class RankFailed(AssertionError):
    """A rank raised, died, or did not finish in time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Job(Generic[P, T]):
    function: Callable[P, T]
    rank: int
    ranks: int
    store: str
    seconds: float
    folder: str
    path: tuple[str, ...]
    prepare: Callable[[], str] | None


_prepare: ContextVar[Callable[[], str] | None] = ContextVar("_prepare", default=None)
_preload: ContextVar[tuple[str, ...]] = ContextVar("_preload", default=())


@contextlib.contextmanager
def ranks_on(prepare: Callable[[], str], preload: tuple[str, ...] = ()) -> Generator[None]:
    """Have `run_ranks` call `prepare` in each rank first; it sets up a device and returns the backend, such as
    `cpu:gloo,cuda:nccl`.

    The function must be importable (module level). `preload` names modules that the fork server imports for all ranks; it
    has no effect once the server runs.
    """
    tokens = _prepare.set(prepare), _preload.set(preload)
    try:
        yield
    finally:
        _prepare.reset(tokens[0])
        _preload.reset(tokens[1])


def run_ranks(ranks: int, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> list[T]:
    """Call `function(*args, **kwargs)` on each of `ranks` ranks and return the results by rank.

    The function must be importable (module level); arguments and results travel by pickle. `torch.distributed` is
    initialised with one thread a rank, on gloo unless `ranks_on` says otherwise. Raises `RankFailed` with the traceback of
    the first rank that raised, or after `SHOAL_TEST_TIMEOUT` seconds (120), then with the stacks of the ranks that have not
    finished.
    """
    seconds = float(os.environ.get("SHOAL_TEST_TIMEOUT", "120"))
    context = _context()
    with tempfile.TemporaryDirectory() as folder:
        connections: list[Connection] = []
        processes: list[ForkServerProcess] = []
        for rank in range(ranks):
            ours, theirs = context.Pipe()
            job = _Job(function=function, rank=rank, ranks=ranks, store=str(Path(folder) / "store"), seconds=seconds,
                       folder=os.getcwd(), path=tuple(sys.path), prepare=_prepare.get())
            process = context.Process(target=_run, args=(job, theirs, args, kwargs), daemon=True)
            process.start()
            theirs.close()
            connections.append(ours)
            processes.append(process)
        try:
            return _collect(connections, processes, folder, seconds)
        finally:
            for connection in connections:
                connection.close()
            for process in processes:
                process.join(1)
                if process.is_alive():
                    process.kill()
                    process.join()
                process.close()


def _context() -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*_PRELOAD, *(name for name in _IF_LOADED if name in sys.modules), *_preload.get()])
    return context


def _collect(connections: list[Connection], processes: list[ForkServerProcess], folder: str, seconds: float) -> list[Any]:
    deadline = time.monotonic() + seconds
    results: dict[int, Any] = {}
    while len(results) < len(connections):
        waiting = {c: rank for rank, c in enumerate(connections) if rank not in results}
        ready = multiprocessing.connection.wait(list(waiting), max(0.0, deadline - time.monotonic()))
        if not ready:
            late = sorted(waiting.values())
            stacks = (f"rank {rank}:\n{_stacks(processes[rank], Path(folder) / f'stacks-{rank}')}" for rank in late)
            raise RankFailed(f"ranks {late} did not finish within {seconds:g} s\n" + "\n".join(stacks))
        for connection in ready:
            assert isinstance(connection, Connection)
            rank = waiting[connection]
            try:
                ok, value = pickle.loads(connection.recv_bytes())
            except EOFError:
                raise RankFailed(f"rank {rank} died without an error (killed, aborted, or os._exit)") from None
            if not ok:
                raise RankFailed(f"rank {rank} raised:\n{value}")
            results[rank] = value
    return [results[rank] for rank in range(len(connections))]


def _stacks(process: ForkServerProcess, file: Path) -> str:
    """Return the stacks of all threads of a rank, as its fault handler writes them, also within a call that hangs."""
    if process.is_alive() and process.pid is not None:
        os.kill(process.pid, _STACKS_SIGNAL)
        time.sleep(_STACKS_SECONDS)
    return file.read_text(errors="replace") if file.is_file() else ""


class _ResultPickler(pickle.Pickler):
    """Pickles copies of tensors: those of an accelerator arrive on the host, where the caller is."""

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, torch.Tensor) and on_accelerator(obj):
            return obj.cpu().__reduce_ex__(pickle.HIGHEST_PROTOCOL)
        return NotImplemented


def _packed(value: object) -> bytes:
    buffer = io.BytesIO()
    _ResultPickler(buffer).dump(value)
    return buffer.getvalue()


def _run(job: _Job[..., object], connection: Connection, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
    sys.path[:] = job.path
    os.chdir(job.folder)
    stacks = Path(job.store).with_name(f"stacks-{job.rank}").open("w")  # open until exit: the fault handler writes to it
    faulthandler.register(_STACKS_SIGNAL, stacks)
    torch.set_num_threads(1)
    gc.freeze()  # collections need not look at what the fork server imported, nor copy its pages by doing so
    os.environ.update(RANK=str(job.rank), LOCAL_RANK=str(job.rank), WORLD_SIZE=str(job.ranks),
                      LOCAL_WORLD_SIZE=str(job.ranks))
    try:
        backend = "gloo" if job.prepare is None else job.prepare()
        store = dist.FileStore(job.store, job.ranks)  # pyright: ignore[reportPrivateImportUsage]  documented as public
        dist.init_process_group(backend, store=store, rank=job.rank, world_size=job.ranks,
                                timeout=timedelta(seconds=job.seconds))
        connection.send_bytes(_packed((True, job.function(*args, **kwargs))))
    except BaseException:  # the caller gets any exception, SystemExit included
        connection.send_bytes(pickle.dumps((False, traceback.format_exc())))
    finally:
        with contextlib.suppress(EOFError, OSError):
            connection.recv_bytes()  # stay until the caller has every result: peers may still be connecting
        os._exit(0)  # skip torch's teardown: the caller has the result, and peers may be gone
